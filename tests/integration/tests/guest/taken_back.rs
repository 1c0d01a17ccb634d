// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices that the host's administrator unbinds from vfio-pci while a guest uses them.

use carom_integration::harness::guest_test;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::events::Event;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, info, pinned, put, use_two_drives, wait_gone};
use crate::support::{MIB, SITE};

/// Interval at which the kernel repeats its request to release a device.
const KERNEL_ASKS_AGAIN: Duration = Duration::from_secs(10);
/// Maximum time of a command on a slow machine.
const COMMAND_TIME: Duration = Duration::from_secs(60);

/// Device that the administrator unbinds from vfio-pci and binds again. At the beginning, the device is bound. Dropping this
/// value waits for a pending unbinding and binds the device again. The VMM must have exited or released the device before this
/// value is dropped.
struct HostDevice<'a> {
    address: &'a str,
    unbind: Option<Child>,
}

impl<'a> HostDevice<'a> {
    fn new(address: &'a str) -> Self {
        Self { address, unbind: None }
    }

    fn is_bound(&self) -> bool {
        fs::read_link(Site::sysfs(self.address).join("driver")).is_ok_and(|driver| driver.ends_with("vfio-pci"))
    }

    /// Starts to unbind the device from vfio-pci. The kernel waits until the device is closed.
    fn unbind(&mut self) {
        let script = r#"echo "$1" >/sys/bus/pci/drivers/vfio-pci/unbind"#;
        let child = Command::new("sh").args(["-c", script, "sh", self.address]).stdin(Stdio::null()).spawn();
        self.unbind = Some(child.unwrap());
    }

    /// True if the unbinding still waits for the device to be closed.
    fn waits(&mut self) -> bool {
        self.unbind.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// Waits until the device is unbound.
    fn wait_unbound(&mut self) {
        let start = Instant::now();
        while self.waits() {
            assert!(start.elapsed() < COMMAND_TIME, "unbinding {} does not end", self.address);
            thread::sleep(Duration::from_millis(50));
        }
        assert!(self.unbind.take().unwrap().wait().unwrap().success() && !self.is_bound());
    }

    fn bind(&self) -> bool {
        let bound = fs::write("/sys/bus/pci/drivers_probe", self.address);
        bound.is_ok() && self.is_bound()
    }
}

impl Drop for HostDevice<'_> {
    fn drop(&mut self) {
        let start = Instant::now();
        while self.waits() && start.elapsed() < COMMAND_TIME {
            thread::sleep(Duration::from_millis(50));
        }
        if !self.is_bound() && !self.bind() {
            eprintln!("{} is no longer bound to vfio-pci: tests that need it will fail", self.address);
        }
    }
}

/// Returns the events about devices, without events of added devices.
fn of_devices(vmm: &ApiVmm) -> Vec<(String, Value)> {
    let events = vmm.events().unwrap().into_iter();
    let named = events.map(|Event { event, properties, .. }| (event, properties));
    named.filter(|(event, _)| event.starts_with("device-") && event != "device-added").collect()
}

fn add(vmm: &ApiVmm, device: &Value) {
    let (status, answer) = vmm.call("PUT", "/api/v1/vm.add-device", Some(device)).unwrap();
    assert_eq!((status, &answer["bdf"]), (200, &json!("0000:00:03.0")), "{answer}");
}

#[guest_test(needs(SecondDrive), slow = "hotplug:: covers removal of a drive, and unit tests cover the host's request")]
fn drive_that_the_host_wants_back_leaves_the_running_guest() {
    let job = use_two_drives();
    // `taken` is declared before the VMM, so that it is dropped after the VMM.
    let mut taken = HostDevice::new(&SITE.nvme[1]);
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let device = |number: usize, id: &str| json!({"path": Site::sysfs(&SITE.nvme[number]), "iommu": true, "id": id});
    let devices = [device(0, "first"), device(1, "second")];
    create_and_boot(&vmm, json!({"devices": devices.clone(), "iommu_bounce": {"size": 64 * MIB}}));
    vmm.wait_for("CAROM-WORKED 1\n", 1, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-FIRST 0", 1, BOOT_TIME).unwrap();
    let pinned_with = pinned(&vmm);

    // Unbind while the guest reads from the drive.
    let start = Instant::now();
    taken.unbind();
    vmm.wait_for("CAROM-GONE 1\n", 1, BOOT_TIME).unwrap();
    taken.wait_unbound();
    println!("CAROM-TAKEN-BACK-MS {}", start.elapsed().as_millis());
    wait_gone(&vmm, "second");
    let requested =
        ("device-requested".into(), json!({"id": "second", "bdf": "0000:00:03.0", "host": SITE.nvme[1].as_str()}));
    let removed = ("device-removed".into(), json!({"id": "second", "bdf": "0000:00:03.0"}));
    assert_eq!(of_devices(&vmm), [requested.clone(), removed.clone()]);
    assert!(pinned(&vmm) < pinned_with, "{} of {pinned_with} bytes are still pinned", pinned(&vmm));
    let left = info(&vmm);
    assert_eq!((&left["state"], left["config"]["devices"].as_array().unwrap().len()), (&json!("Running"), 1));
    let done = vmm.console().matches("CAROM-FIRST 0").count();
    vmm.wait_for("CAROM-FIRST 0", done + 2, BOOT_TIME).unwrap();

    // Add the drive again, and unbind it while the guest is paused. The kernel repeats its request to release the drive, but
    // the VMM reports the request only once.
    assert!(taken.bind(), "vfio-pci does not accept the drive");
    add(&vmm, &devices[1]);
    vmm.wait_for("CAROM-WORKED 2\n", 1, BOOT_TIME).unwrap();
    put(&vmm, "vm.pause", &Value::Null);
    taken.unbind();
    thread::sleep(KERNEL_ASKS_AGAIN + Duration::from_secs(3));
    assert!(taken.waits(), "the drive was unbound without being closed");
    assert_eq!(of_devices(&vmm), [requested.clone(), removed.clone(), requested.clone()]);
    put(&vmm, "vm.resume", &Value::Null);
    vmm.wait_for("CAROM-GONE 2\n", 1, BOOT_TIME).unwrap();
    taken.wait_unbound();
    wait_gone(&vmm, "second");

    // Add and unbind the drive once more. This time, the VM is reset before the guest reacts.
    assert!(taken.bind(), "vfio-pci does not accept the drive");
    add(&vmm, &devices[1]);
    vmm.wait_for("CAROM-WORKED 3\n", 1, BOOT_TIME).unwrap();
    put(&vmm, "vm.pause", &Value::Null);
    taken.unbind();
    let start = Instant::now();
    while of_devices(&vmm).len() < 5 {
        assert!(start.elapsed() < COMMAND_TIME, "{:?}", of_devices(&vmm));
        thread::sleep(Duration::from_millis(50));
    }
    put(&vmm, "vm.reboot", &Value::Null);
    taken.wait_unbound();
    let pair = [requested, removed];
    assert_eq!(of_devices(&vmm), [&pair[..], &pair, &pair].concat());
    vmm.wait_for("CAROM-READY", 2, BOOT_TIME).unwrap();
    let figures = vmm.text("/metrics").unwrap();
    assert!(figures.contains("\ncarom_device_requests_total 3\n"), "{figures}");
    assert!(figures.contains("\ncarom_device_errors_total 0\n"), "{figures}");
    let console = vmm.console();
    assert!(!console.contains("CAROM-VERIFY 1") && !console.contains("CAROM-FIRST 1"), "{console}");
    put(&vmm, "vmm.shutdown", &Value::Null);
}

/// Devices without a virtual IOMMU share one address space of the host's IOMMU. A device that is added again must join the
/// other device's address space.
#[guest_test(needs(SecondDrive), slow = "drive_that_the_host_wants_back_* covers a drive with the IOMMU")]
fn drive_without_iommu_rejoins_another_after_the_host_took_it() {
    let job = use_two_drives();
    let mut taken = HostDevice::new(&SITE.nvme[1]);
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let devices = [0, 1].map(|number| json!({"path": Site::sysfs(&SITE.nvme[number]), "id": format!("drive{number}")}));
    create_and_boot(&vmm, json!({"devices": devices.clone()}));
    for round in 1..=2 {
        vmm.wait_for(&format!("CAROM-WORKED {round}\n"), 1, BOOT_TIME).unwrap();
        taken.unbind();
        vmm.wait_for(&format!("CAROM-GONE {round}\n"), 1, BOOT_TIME).unwrap();
        taken.wait_unbound();
        wait_gone(&vmm, "drive1");
        assert!(taken.bind(), "vfio-pci does not accept the drive");
        add(&vmm, &devices[1]);
    }
    vmm.wait_for("CAROM-WORKED 3\n", 1, BOOT_TIME).unwrap();
    let done = vmm.console().matches("CAROM-FIRST 0").count();
    vmm.wait_for("CAROM-FIRST 0", done + 2, BOOT_TIME).unwrap();
    let console = vmm.console();
    assert!(!console.contains("CAROM-VERIFY 1") && !console.contains("CAROM-FIRST 1"), "{console}");
    for id in ["drive0", "drive1"] {
        put(&vmm, "vm.remove-device", &json!({"id": id}));
        wait_gone(&vmm, id);
    }
    assert_eq!(pinned(&vmm), 0);
    put(&vmm, "vmm.shutdown", &Value::Null);
}
