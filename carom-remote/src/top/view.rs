// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Output of the view as text and on a terminal.

use carom_api::kinds::KindConfig;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, Table};

use super::look::{History, RATES};

/// Headings of the table of devices.
const DEVICES: [&str; 9] =
    ["device", "address", "domain", "map/s", "unmap/s", "pinned", "window", "chunks r/w/rw", "host device"];

/// Formats a number of bytes.
fn bytes(bytes: u64) -> String {
    const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = UNITS.iter().find(|(_, shift)| bytes >> shift != 0);
    unit.map_or(format!("{bytes} B"), |(unit, shift)| {
        let tenths = (u128::from(bytes) * 10) >> shift;
        format!("{}.{} {unit}", tenths / 10, tenths % 10)
    })
}

/// Returns lines with the VM's state, its mapped memory and its bounce windows.
fn summary(history: &History) -> Vec<String> {
    let Some(look) = history.newest() else { return Vec::new() };
    let Some(info) = &look.info else { return vec!["no VM is created".into()] };
    let vm =
        format!("VM {:?}   vCPUs {}   RAM {}", info.state, info.config.cpus.boot_vcpus, bytes(info.memory_actual_size));
    let limit = info.iommu_bounce.as_ref().and_then(|bounce| bounce.max_mapped);
    let limit = limit.map(|limit| format!(" of {}", bytes(limit))).unwrap_or_default();
    let mapped = format!(
        "pinned {} (peak {})   mapped {}{limit} (peak {})   failed requests {}   host errors {}",
        bytes(look.counter("pinned_bytes")),
        bytes(look.counter("peak_pinned_bytes")),
        bytes(look.counter("mapped_bytes")),
        bytes(look.counter("peak_mapped_bytes")),
        ["map", "map_list", "unmap", "attach", "window_add", "window_del", "invalid"]
            .iter()
            .map(|kind| look.counter(&format!("failed_{kind}")))
            .sum::<u64>(),
        look.counter("host_errors"),
    );
    let windows = info.iommu_bounce.as_ref().filter(|bounce| bounce.max != 0).map(|bounce| {
        let mut threshold = if bounce.threshold == 0 { "auto".into() } else { bytes(bounce.threshold.into()) };
        if bounce.threshold_write != 0 {
            threshold = format!("{threshold}, device writes {}", bytes(bounce.threshold_write.into()));
        }
        format!(
            "windows {} of {} (max {})   held by the host {}   threshold {threshold}",
            bytes(look.counter("window_bytes")),
            bytes(bounce.budget),
            bytes(bounce.max),
            bytes(bounce.held_bytes),
        )
    });
    [vm, mapped].into_iter().chain(windows).collect()
}

/// Returns a row for each device in the VM's configuration.
fn devices(history: &History) -> Vec<[String; DEVICES.len()]> {
    let Some(look) = history.newest() else { return Vec::new() };
    let Some(info) = &look.info else { return Vec::new() };
    let dash = || "–".to_string();
    let row = |device: &dyn KindConfig| {
        // If a VM can have only one device of a kind, the device's configuration may lack an ID. The device then has the fixed ID of its
        // kind.
        let id = device.id().unwrap_or(device.kind().id).to_string();
        let address = info.device_tree.get(&id).map_or_else(dash, |node| node.pci_bdf.clone());
        let windows = info.iommu_bounce.iter().flat_map(|bounce| &bounce.windows);
        let window = windows.into_iter().find(|window| window.endpoints.contains(&address));
        let domain = match window {
            Some(window) => window.domain.to_string(),
            None if device.is_behind_iommu() => dash(),
            None => "none, no IOMMU".into(),
        };
        let size = window.map_or_else(dash, |window| bytes(window.bytes));
        let chunks = window.map_or_else(dash, |window| {
            format!("{}/{}/{}", window.read_chunks, window.write_chunks, window.read_write_chunks)
        });
        let rate = |name| history.rate_of(&id, name).map_or_else(dash, |rate| rate.to_string());
        let (maps, unmaps) = (rate("domain_requests_map"), rate("domain_requests_unmap"));
        let pinned = look.counter_of(&id, "pinned_bytes").map_or_else(dash, bytes);
        let name = device.source().and_then(|path| path.file_name());
        let host = name.map_or_else(dash, |name| name.to_string_lossy().into_owned());
        [id, address, domain, maps, unmaps, pinned, size, chunks, host]
    };
    info.config.parts().filter(|part| part.kind().takes_slot).map(row).collect()
}

/// Returns the view as plain text.
pub(crate) fn text(history: &History) -> String {
    let mut text = summary(history).join("\n") + "\n";
    let rates = RATES.map(|(counter, heading)| format!("{heading} {}", history.rate(counter)));
    text += &(rates.join("   ") + "\n");
    for row in devices(history) {
        let cells: Vec<_> = DEVICES.iter().zip(&row).map(|(heading, cell)| format!("{heading} {cell}")).collect();
        text += &(cells.join("   ") + "\n");
    }
    text
}

/// Draws the view.
pub(crate) fn draw(frame: &mut Frame<'_>, history: &History) {
    let [head, rates, curve, table, foot] = Layout::vertical([
        Constraint::Length(5),
        Constraint::Length(4),
        Constraint::Length(7),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    let lines: Vec<Line<'_>> = summary(history).into_iter().map(Line::from).collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" carom ")), head);
    draw_rates(frame, rates, history);
    draw_curve(frame, curve, history);
    draw_devices(frame, table, history);
    frame.render_widget(Line::from("press q to exit").dim(), foot);
}

fn draw_rates(frame: &mut Frame<'_>, area: Rect, history: &History) {
    let heading = Row::new(RATES.map(|(_, heading)| heading)).style(Style::new().bold());
    let rates = Row::new(RATES.map(|(counter, _)| history.rate(counter).to_string()));
    let table = Table::new([rates], [Constraint::Fill(1); 4]).header(heading);
    frame.render_widget(table.block(Block::bordered().title(" requests to the IOMMU ")), area);
}

fn draw_curve(frame: &mut Frame<'_>, area: Rect, history: &History) {
    let width = usize::from(area.width.saturating_sub(2));
    let sums = history.rates(RATES[0].0).zip(history.rates(RATES[1].0)).map(|(map, unmap)| map.saturating_add(unmap));
    let sums: Vec<u64> = sums.collect();
    let shown = &sums[sums.len().saturating_sub(width)..];
    let title = format!(" map and unmap per second, maximum {} ", shown.iter().max().unwrap_or(&0));
    frame.render_widget(Sparkline::default().data(shown).block(Block::bordered().title(title)), area);
}

fn draw_devices(frame: &mut Frame<'_>, area: Rect, history: &History) {
    let table = Table::new(devices(history).into_iter().map(Row::new), [Constraint::Fill(1); DEVICES.len()])
        .header(Row::new(DEVICES).style(Style::new().bold()));
    frame.render_widget(table.block(Block::bordered().title(" devices ")), area);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use carom_api::{DeviceConfig, RngConfig, UserDeviceConfig};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::top::look::{Look, tests::running};

    fn history() -> History {
        history_from(Instant::now())
    }

    fn history_from(start: Instant) -> History {
        let mut history = History::default();
        history.add(running(start, 100));
        history.add(running(start + Duration::from_secs(1), 350));
        history
    }

    fn screen(history: &History, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, history)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn bytes_are_written_with_a_tenth() {
        for (value, written) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64.0 MiB"), (u64::MAX, "17179869183.9 GiB")]
        {
            assert_eq!(bytes(value), written);
        }
    }

    #[test]
    fn screen_and_text_show_rates_memory_and_windows() {
        for shown in [screen(&history(), 140, 30), text(&history())] {
            let words = ["Running", "250", "6.0 MiB of 64.0 MiB", "64.0 KiB", "2.0 GiB"];
            for word in
                words.into_iter().chain(["pinned 9.0 MiB (peak 11.0 MiB)", "mapped 3.0 MiB of 96.0 MiB (peak 5.0 MiB)"])
            {
                assert!(shown.contains(word), "{word}:\n{shown}");
            }
        }
    }

    #[test]
    fn devices_have_their_window() {
        let start = Instant::now();
        let mut history = history_from(start);
        let mut look = running(start + Duration::from_secs(2), 450);
        let info = look.info.as_mut().unwrap();
        info.config.devices.push(DeviceConfig {
            path: "/sys/bus/pci/devices/0000:03:00.0".into(),
            iommu: true,
            pci_segment: 0,
            pci_device_id: None,
            id: Some("drive".into()),
        });
        info.config.devices.push(DeviceConfig {
            path: "/sys/bus/pci/devices/0000:04:00.0".into(),
            iommu: false,
            pci_segment: 0,
            pci_device_id: None,
            id: Some("card".into()),
        });
        info.config.user_devices.push(UserDeviceConfig {
            socket: "/run/edu.sock".into(),
            iommu: true,
            pci_segment: 0,
            pci_device_id: None,
            id: Some("edu".into()),
        });
        info.config.rng = Some(RngConfig { iommu: true, .."".parse().unwrap() });
        history.add(look);
        let rows = devices(&history);
        assert_eq!(
            rows[0].each_ref().map(String::as_str),
            ["drive", "0000:00:02.0", "1", "50", "0", "9.0 MiB", "6.0 MiB", "1/2/0", "0000:03:00.0"]
        );
        assert_eq!(
            rows[1].each_ref().map(String::as_str),
            ["card", "–", "none, no IOMMU", "–", "–", "–", "–", "–", "0000:04:00.0"]
        );
        assert_eq!((&*rows[2][0], &*rows[2][8]), ("edu", "edu.sock"));
        assert_eq!((&*rows[3][0], &*rows[3][8]), ("_rng", "urandom"));
    }

    #[test]
    fn small_screens_and_missing_vms_are_harmless() {
        let mut empty = History::default();
        assert!(text(&empty).contains("map/s 0"));
        empty.add(Look::new(Instant::now(), None, Default::default()));
        assert!(text(&empty).starts_with("no VM is created"));
        for (width, height) in [(1, 1), (10, 3), (300, 100)] {
            screen(&history(), width, height);
            screen(&empty, width, height);
        }
    }
}
