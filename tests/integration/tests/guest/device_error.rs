// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Device errors that the host's kernel detects and handles (AER). The kernel's module `aer_inject` injects the errors.

use carom_integration::harness::guest_test;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_tools::children::KilledOnDrop;
use serde_json::{Value, json};

use crate::api::{BOOT_TIME, COUNT, command_line, ticks};
use crate::hotplug::{create_and_boot, info, put, wait_gone};
use crate::support::{SITE, required};

/// Poisoned TLP received: an uncorrectable error that leaves the link intact (PCI Express 6.0, section 7.8.4.2, bit 12).
const POISONED: u32 = 1 << 12;

/// Makes the host's kernel handle `errors` as if the device had reported them. The module reads a `struct aer_error_inj` of 32
/// bytes: bus, device and function in one byte each, and the uncorrectable errors at offset 4. The other bytes are 0 here.
fn inject(address: &str, errors: u32) {
    let hex = |text: &str| u8::from_str_radix(text, 16).unwrap();
    let mut request = [0; 32];
    request[..3].copy_from_slice(&[hex(&address[5..7]), hex(&address[8..10]), hex(&address[11..12])]);
    request[4..8].copy_from_slice(&errors.to_ne_bytes());
    let mut file = OpenOptions::new().write(true).open("/dev/aer_inject").expect("the kernel has aer_inject");
    file.write_all(&request).expect("the error is injected");
}

/// Waits until `times` errors have been reported and the VM is paused. Checks that the VM then stays paused.
fn wait_paused(vmm: &ApiVmm, times: usize) {
    let start = Instant::now();
    let reported = || {
        let events = vmm.events().unwrap();
        events
            .into_iter()
            .filter(|event| event.event == "device-error")
            .map(|event| event.properties)
            .collect::<Vec<_>>()
    };
    while reported().len() < times || info(vmm)["state"] != "Paused" {
        assert!(start.elapsed() < BOOT_TIME, "{:?}, {}", reported(), info(vmm));
        thread::sleep(Duration::from_millis(50));
    }
    let device = json!({"id": "card", "bdf": "0000:00:02.0", "host": SITE.aer.as_deref().unwrap()});
    assert_eq!(reported(), vec![device; times]);
    let count = ticks(vmm);
    thread::sleep(Duration::from_secs(2));
    assert_eq!((ticks(vmm), info(vmm)["state"].as_str()), (count, Some("Paused")));
    let figures = vmm.text("/metrics").unwrap();
    assert!(figures.contains(&format!("\ncarom_device_errors_total {times}\n")), "{figures}");
}

/// Waits until the guest makes progress.
fn wait_running(vmm: &ApiVmm) {
    let (start, count) = (Instant::now(), ticks(vmm));
    while ticks(vmm) < count + 2 {
        assert!(start.elapsed() < BOOT_TIME, "the guest makes no progress: {}", info(vmm));
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(info(vmm)["state"], "Running");
}

#[guest_test(
    needs(ErrorInjection),
    slow = "error_ends_a_guest_without_a_client_to_resume_it covers the error, and unit tests cover the pause"
)]
fn device_error_pauses_the_guest_until_the_client_decides() {
    let card = required(SITE.aer.as_ref(), "a device below a root port (CAROM_AER)");
    let vmm = ApiVmm::start(&SITE, COUNT).unwrap();
    create_and_boot(&vmm, json!({"devices": [{"path": Site::sysfs(card), "iommu": true, "id": "card"}]}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();

    inject(card, POISONED);
    wait_paused(&vmm, 1);
    put(&vmm, "vm.resume", &Value::Null);
    wait_running(&vmm);

    inject(card, POISONED);
    wait_paused(&vmm, 2);
    put(&vmm, "vm.reboot", &Value::Null);
    vmm.wait_for("CAROM-READY", 2, BOOT_TIME).unwrap();
    wait_running(&vmm);

    inject(card, POISONED);
    wait_paused(&vmm, 3);
    put(&vmm, "vm.remove-device", &json!({"id": "card"}));
    put(&vmm, "vm.resume", &Value::Null);
    wait_gone(&vmm, "card");
    wait_running(&vmm);
    put(&vmm, "vmm.shutdown", &Value::Null);
}

#[guest_test(needs(ErrorInjection))]
fn error_ends_a_guest_without_a_client_to_resume_it() {
    let card = required(SITE.aer.as_ref(), "a device below a root port (CAROM_AER)");
    // The tested VMM is started below, without an API. `other` only provides the kernel and the initramfs.
    let other = ApiVmm::start(&SITE, COUNT).unwrap();
    let (dir, path) = (tempfile::tempdir().unwrap(), |name: &str, file: &str| format!("{name}={file}"));
    let [console, events, log] = ["console", "events", "log"].map(|name| dir.path().join(name));
    let carom = Command::new(&SITE.carom)
        .arg("--kernel")
        .arg(other.kernel())
        .arg("--initramfs")
        .arg(other.initramfs())
        .args(["--cmdline", &command_line(), "--memory", "size=512M"])
        .args(["--serial", &path("file", console.to_str().unwrap())])
        .args(["--event-monitor", &path("path", events.to_str().unwrap())])
        .args(["--device", &path("path", Site::sysfs(card).to_str().unwrap())])
        .args(if SITE.iommufd { &["--platform", "iommufd=on"][..] } else { &[] })
        .stdin(Stdio::null())
        .stderr(File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut carom = KilledOnDrop(carom);
    let said = || fs::read_to_string(&log).unwrap();
    let start = Instant::now();
    while !fs::read_to_string(&console).is_ok_and(|text| text.contains("CAROM-READY")) {
        assert!(start.elapsed() < BOOT_TIME, "the guest does not start: {}", said());
        thread::sleep(Duration::from_millis(50));
    }
    assert!(carom.0.try_wait().unwrap().is_none(), "{}", said());
    inject(card, POISONED);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = carom.0.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < BOOT_TIME, "carom continues: {}", said());
        thread::sleep(Duration::from_millis(50));
    };
    let why = said();
    assert!(status.code() == Some(1) && why.contains("device '_vfio0'") && why.contains(card), "{status}: {why}");
    let events = carom_integration::events::read(&events).unwrap();
    let names: Vec<_> = events.iter().map(|event| format!("{}:{}", event.source, event.event)).collect();
    let end = ["vm:device-error", "vm:failed", "vm:shutdown", "vm:deleted", "vmm:shutdown"];
    assert_eq!(names[names.len() - end.len()..], end, "{names:?}");
}
