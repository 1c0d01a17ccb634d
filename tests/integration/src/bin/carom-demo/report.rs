// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo's results as text: tables in Markdown, so that they can stand in a document as they are.

use std::collections::BTreeMap;
use std::fmt::Write;

use carom_integration::workload::{BLOCK_SIZES, Fio};
use comfy_table::{CellAlignment, Table, presets};

use crate::results::{Config, Machine, Results};

/// Shown where there is no figure.
pub(crate) const NONE: &str = "–";

/// The report on `results`.
pub(crate) fn table(results: &Results) -> String {
    let machine = &results.machine;
    let mut text = heading(machine, &results.versions);
    // Writing to a String does not fail.
    let _ = writeln!(
        text,
        "Guests: {} MiB of RAM, NVMe by passthrough; fio: read, direct, libaio, depth 64, 1 job on 1 vCPU{}\n",
        machine.guest_ram_bytes >> 20,
        match (results.quick, results.rounds) {
            (true, 1) => " (quick run)".into(),
            (_, 1) => String::new(),
            (_, rounds) => format!("; medians of {rounds} interleaved rounds"),
        }
    );
    text += "IOPS (ratio to strict, ratio to no-viommu):\n\n";
    text += &speeds(results, |config| Some(&config.fio));
    text += "\nWhat it takes:\n\n";
    text += &costs(results);
    if results.configs.iter().any(|config| config.fio_2_jobs.is_some()) {
        text += "\nIOPS with 2 jobs on 2 vCPUs (ratio to strict):\n\n";
        text += &speeds(results, |config| config.fio_2_jobs.as_ref());
    }
    text.push('\n');
    for config in &results.configs {
        if let Some(bytes) = config.verified_bytes {
            let _ = writeln!(
                text,
                "{}: {:.1} MiB written in mixed sizes and verified (crc32c), no error",
                config.name,
                mib(bytes)
            );
        }
    }
    for (carom, mode) in [("bounce", "strict"), ("strict", "strict"), ("lazy", "lazy")] {
        for vmm in ["qemu", "ch"] {
            if let (Some(carom), Some(peer)) = (results.find(carom), results.find(&format!("{vmm}-{mode}"))) {
                text += &ratios(carom, peer);
            }
        }
    }
    let retries: u32 = results.configs.iter().map(|config| config.retries).sum();
    let _ = writeln!(text, "Guests that were started again: {retries}");
    for failure in &results.failures {
        let _ = writeln!(text, "FAILED: {failure}");
    }
    text
}

/// The first lines of a report.
pub(crate) fn heading(machine: &Machine, versions: &BTreeMap<String, String>) -> String {
    let versions: Vec<String> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    format!("Machine: {}; rig: {}; {}\nVersions: {}\n", machine.host, machine.rig, machine.kernel, versions.join("; "))
}

fn ratios(config: &Config, peer: &Config) -> String {
    let ratios = BLOCK_SIZES.map(|size| format!("{} at {size}", ratio(&config.fio, &peer.fio, size)));
    format!("{} ÷ {}: {}\n", config.name, peer.name, ratios.join(", "))
}

impl Results {
    fn find(&self, name: &str) -> Option<&Config> {
        self.configs.iter().find(|config| config.name == name)
    }
}

type BySize = BTreeMap<String, Fio>;

fn speeds<'results>(
    results: &'results Results,
    select: impl Fn(&'results Config) -> Option<&'results BySize>,
) -> String {
    let strict = results.find("strict").and_then(&select);
    let none = results.find("no-viommu").and_then(&select);
    let mut table = new_table(&["configuration", "4k", "16k", "64k", "128k"]);
    for config in &results.configs {
        let Some(fio) = select(config) else { continue };
        let mut row = vec![config.name.clone()];
        for size in BLOCK_SIZES {
            let iops = fio.get(size).map_or(NONE.into(), |fio| format!("{:.0}", fio.iops));
            let mut ratios = vec![strict.map_or(NONE.into(), |base| ratio(fio, base, size))];
            ratios.extend(none.map(|base| ratio(fio, base, size)));
            row.push(format!("{iops} ({})", ratios.join(", ")));
        }
        table.add_row(row);
    }
    finish(table)
}

fn costs(results: &Results) -> String {
    let mut table =
        new_table(&["configuration", "map µs", "unmap µs", "MAP", "UNMAP", "WINDOW_ADD", "pinned MiB", "of RAM"]);
    for config in &results.configs {
        let count = |value: Option<u64>| value.map_or(NONE.to_owned(), |value| value.to_string());
        #[expect(clippy::cast_precision_loss, reason = "shown to a tenth of a per cent")]
        let share = 100.0 * config.pinned_bytes as f64 / results.machine.guest_ram_bytes as f64;
        table.add_row([
            config.name.clone(),
            format!("{:.1}", config.dma_map.map_us),
            format!("{:.1}", config.dma_map.unmap_us),
            count(config.requests.map(|requests| requests.map)),
            count(config.requests.map(|requests| requests.unmap)),
            count(config.requests.map(|requests| requests.window_add)),
            format!("{:.1}", mib(config.pinned_bytes)),
            format!("{share:.1} %"),
        ]);
    }
    finish(table)
}

/// A table whose columns but the first are numbers.
pub(crate) fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The text of a table.
pub(crate) fn finish(table: Table) -> String {
    format!("{table}\n")
}

fn ratio(fio: &BySize, base: &BySize, size: &str) -> String {
    match (fio.get(size), base.get(size)) {
        (Some(fio), Some(base)) if base.iops > 0.0 => format!("{:.2}", fio.iops / base.iops),
        _ => NONE.into(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown to a tenth of a MiB")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Results {
        let config = |name: &str, iops: u32, requests: &str| {
            let fio: Vec<String> =
                BLOCK_SIZES.iter().map(|size| format!(r#""{size}":{{"iops":{iops},"mib_s":1}}"#)).collect();
            format!(
                r#"{{"name":"{name}","vmm":"carom","fio":{{{}}},"dma_map":{{"map_us":1.25,"unmap_us":2}},
                "requests":{requests},"pinned_bytes":104857600,"retries":0}}"#,
                fio.join(",")
            )
        };
        let requests = r#"{"map":11,"unmap":12,"window_add":13,"window_del":0,"attach":1}"#;
        let text = format!(
            r#"{{"machine":{{"host":"h","rig":"tcg","kernel":"k","guest_ram_bytes":2147483648}},"versions":{{"carom":"1"}},
            "quick":true,"rounds":1,"failures":["lazy: it failed"],"configs":[{},{},{},{}]}}"#,
            config("no-viommu", 4000, "null"),
            config("strict", 1000, requests),
            config("bounce", 3600, requests),
            config("qemu-strict", 800, "null"),
        );
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn table_has_ratios_requests_and_failures() {
        let text = table(&results());
        assert!(text.contains("3600 (3.60, 0.90)"), "{text}");
        assert!(text.contains("bounce ÷ qemu-strict: 4.50 at 4k"), "{text}");
        assert!(text.contains("\nstrict ÷ qemu-strict: 1.25 at 4k"), "{text}");
        assert!(
            text.lines().any(|line| line.contains("bounce") && line.contains("13") && line.contains("4.9 %")),
            "{text}"
        );
        assert!(text.contains("FAILED: lazy: it failed"), "{text}");
    }

    #[test]
    fn ratio_to_a_configuration_that_failed_is_left_open() {
        let mut results = results();
        results.configs.retain(|config| config.name != "strict");
        assert!(table(&results).contains("3600 (–, 0.90)"));
    }
}
