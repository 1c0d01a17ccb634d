// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-console: the console of a real guest prints to a pseudoterminal, reads text that is typed there, and follows the
//! terminal's size. Three cases are tested: the device is not behind the virtio-iommu, is behind it without bounce windows, or is
//! behind it with a bounce window.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use rustix::fs::OFlags;
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{self, create_and_boot, info};
use crate::support::SITE;

/// Job that prints 2000 lines. Then it reads typed lines. It answers `size` with the terminal's size, ends after `end`, and
/// echoes other lines.
const JOB: &str = r#"
seq 1 2000 | sed 's/^/CAROM-LINE /'
echo CAROM-READY
while read -r line; do
    case $line in
        size) echo "CAROM-SIZE $(stty size)" ;;
        end) break ;;
        *) echo "CAROM-TYPED $line" ;;
    esac
done </dev/hvc0
"#;

/// User's side of the console: the pseudoterminal, and the text that it has shown.
struct User {
    terminal: File,
    seen: String,
}

impl User {
    fn new(vmm: &ApiVmm) -> Self {
        let console = info(vmm)["config"]["console"].take();
        assert_eq!(console["mode"], "Pty");
        let flags = (OFlags::NOCTTY | OFlags::NONBLOCK).bits().cast_signed();
        let path = console["file"].as_str().unwrap();
        let terminal = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap();
        Self { terminal, seen: String::new() }
    }

    /// Reads until `text` has arrived.
    fn wait_for(&mut self, text: &str) {
        let start = Instant::now();
        while !self.seen.contains(text) {
            assert!(start.elapsed() < BOOT_TIME, "no {text:?} in:\n{}", self.seen);
            let mut bytes = [0; 4096];
            match self.terminal.read(&mut bytes) {
                Ok(len) => self.seen.push_str(&String::from_utf8_lossy(&bytes[..len]).replace('\r', "")),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                    thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }

    fn type_line(&mut self, line: &str) {
        self.terminal.write_all(format!("{line}\r").as_bytes()).unwrap();
    }

    fn resize(&self, columns: u16, rows: u16) {
        tcsetwinsize(&self.terminal, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    }
}

fn count(vmm: &ApiVmm, device: &str, name: &str) -> u64 {
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    counters[device][name].as_u64().unwrap_or_else(|| panic!("no {device} {name}: {counters}"))
}

/// Boots a guest on `hvc0` with additional kernel `parameters` and the additional configuration `more`. Checks the console's
/// output, input and sizes.
fn converse(parameters: &str, more: Value) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, JOB).unwrap();
    let cmdline = format!("console=hvc0 quiet panic=-1 oops=panic mitigations=off nmi_watchdog=0 {parameters}");
    let mut config = json!({"payload": {"kernel": vmm.kernel(), "initramfs": vmm.initramfs(), "cmdline": cmdline}});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    create_and_boot(&vmm, config);
    let mut user = User::new(&vmm);
    user.resize(100, 40);

    user.wait_for("CAROM-READY\n");
    let lines: Vec<&str> = user.seen.lines().filter(|line| line.starts_with("CAROM-LINE ")).collect();
    let expected: Vec<String> = (1..=2000).map(|number| format!("CAROM-LINE {number}")).collect();
    assert!(lines == expected, "{} lines were printed:\n{}", lines.len(), user.seen);
    user.type_line("hello, guest");
    user.wait_for("CAROM-TYPED hello, guest\n");
    user.type_line("size");
    user.wait_for("CAROM-SIZE 40 100\n");
    user.resize(132, 50);
    // Wait, because the device checks the terminal's size only periodically.
    thread::sleep(Duration::from_secs(2));
    user.type_line("size");
    user.wait_for("CAROM-SIZE 50 132\n");
    assert!(count(&vmm, "_console", "tx_bytes") > 30_000 && count(&vmm, "_console", "rx_bytes") >= 23);
    assert!(count(&vmm, "_console", "resizes") >= 2);
    vmm
}

fn end(vmm: ApiVmm) {
    let mut user = User::new(&vmm);
    user.type_line("end");
    user.wait_for("CAROM-JOB-EXIT 0\n");
    hotplug::end(vmm);
}

#[guest_test]
fn pty_console_behind_the_iommu_carries_text_and_sizes() {
    let vmm = converse("iommu.strict=1", json!({"console": {"mode": "Pty", "iommu": true}}));

    assert!(count(&vmm, "_iommu", "requests_map") > 100, "printed text was not mapped");
    assert_eq!(count(&vmm, "_iommu", "faults"), 0);
    end(vmm);
}

#[guest_test(slow = "the test behind the IOMMU covers everything except direct access to memory")]
fn pty_console_without_iommu_carries_text_and_sizes() {
    end(converse("", json!({"console": {"mode": "Pty"}})));
}

#[guest_test(slow = "the test behind the IOMMU covers the console, and rng:: covers a device with a window")]
fn console_behind_the_iommu_uses_a_window() {
    let more = json!({"console": {"mode": "Pty", "iommu": true}, "iommu_bounce": {"size": 16 << 20}});
    let vmm = converse("iommu.strict=1", more);

    assert_eq!(count(&vmm, "_iommu", "faults"), 0);
    end(vmm);
}
