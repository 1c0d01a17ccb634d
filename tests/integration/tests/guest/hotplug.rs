// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hotplug of devices, by the unmodified Cloud Hypervisor client from crates.io and by Carom's own client.

use carom_integration::harness::guest_test;
use std::borrow::BorrowMut;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Kernel, Site};
use cloud_hypervisor_client::apis::DefaultApi;
use cloud_hypervisor_client::models::{DeviceConfig, VmRemoveDevice, VmState};
use cloud_hypervisor_client::socket_based_api_client;
use serde_json::{Value, json};

use crate::api::{BOOT_TIME, Calls, command_line, status};
use crate::support::edu::TEST_EDU;
use crate::support::edu_server::EduServer;
use crate::support::{MIB, SITE, required};

/// Returns a job that uses the drive each time it is added: it runs verified I/O, and then reads until the drive is removed.
pub(crate) fn use_whenever_there(drive: &str) -> String {
    let verify = workload::fio_verify(4, 32).replace("nvme0n1", &format!("{drive}n1"));
    format!(
        r#"
echo CAROM-READY
n=0
while :; do
    while [ ! -b /dev/{drive}n1 ]; do sleep 0.1; done
    n=$((n + 1))
    address=$(basename "$(readlink -f /sys/class/nvme/{drive}/device)")
    echo "CAROM-CAME $n $address $(cat /sys/bus/pci/devices/$address/iommu_group/type 2>/dev/null || echo direct)"
    {verify}
    (while dd if=/dev/{drive}n1 of=/dev/null iflag=direct bs=64k; do :; done) 2>/dev/null &
    reader=$!
    echo "CAROM-WORKED $n"
    while [ -e /sys/bus/pci/devices/$address ]; do sleep 0.1; done
    wait $reader
    echo "CAROM-GONE $n"
done
"#
    )
}

pub(crate) fn put(vmm: &ApiVmm, operation: &str, body: &Value) {
    let body = Some(body).filter(|body| !body.is_null());
    let (status, answer) = vmm.call("PUT", &format!("/api/v1/{operation}"), body).unwrap();
    assert_eq!(status, 204, "{operation}: {answer}");
}

pub(crate) fn create(vmm: &ApiVmm, more: Value) {
    let mut config = json!({
        "payload": payload(vmm, ""),
        "memory": {"size": 512 * MIB},
        "platform": {"iommufd": SITE.iommufd},
        "serial": {"mode": "File", "file": vmm.console_file()},
        "console": {"mode": "Off"},
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    put(vmm, "vm.create", &config);
}

/// Creates a VM like [`create`] and boots it.
pub(crate) fn create_and_boot(vmm: &ApiVmm, more: Value) {
    create(vmm, more);
    put(vmm, "vm.boot", &Value::Null);
}

/// Ends the VM and the VMM. The VMM must exit with status 0.
pub(crate) fn end(mut vmm: impl BorrowMut<ApiVmm>) {
    let vmm = vmm.borrow_mut();
    put(vmm, "vmm.shutdown", &Value::Null);
    assert!(vmm.wait(BOOT_TIME).unwrap().success());
}

/// Saves the VM in the directory `name` inside the VMM's directory, and continues the VM in another process.
pub(crate) fn go_on_in_another_process(vmm: &mut ApiVmm, name: &str) {
    let snapshot = format!("file://{}", vmm.dir().join(name).display());
    put(vmm, "vm.pause", &Value::Null);
    put(vmm, "vm.snapshot", &json!({"destination_url": snapshot}));
    end(&mut *vmm);
    fs::remove_file(vmm.console_file()).unwrap();
    vmm.start_again(&SITE, &["--restore", &format!("source_url={snapshot},resume=on")]).unwrap();
}

/// Returns the `payload` of a VM's configuration. `parameters` are additional kernel parameters, each with a leading blank.
pub(crate) fn payload(vmm: &ApiVmm, parameters: &str) -> Value {
    let cmdline = command_line() + parameters;
    json!({"kernel": vmm.kernel(), "initramfs": vmm.initramfs(), "cmdline": cmdline})
}

/// Returns a job for guests with two drives. The job repeatedly writes and verifies `nvme0`, and uses `nvme1` like
/// [`use_whenever_there`].
pub(crate) fn use_two_drives() -> String {
    let on_the_first =
        workload::fio_verify(4, 8).replace("/tmp/verify", "/tmp/first").replace("CAROM-VERIFY", "CAROM-FIRST");
    format!("{WAIT_FOR_NVME}\n(while :; do\n{on_the_first}\ndone) &\n{}", use_whenever_there("nvme1"))
}

pub(crate) fn drive(number: usize, id: &str, iommu: bool) -> DeviceConfig {
    let path = Site::sysfs(&SITE.nvme[number]).display().to_string();
    DeviceConfig { iommu: Some(iommu), id: Some(id.into()), ..DeviceConfig::new(path) }
}

pub(crate) fn info(vmm: &ApiVmm) -> Value {
    vmm.call("GET", "/api/v1/vm.info", None).unwrap().1
}

/// Waits until the VM has no device with this name.
pub(crate) fn wait_gone(vmm: &ApiVmm, id: &str) {
    let start = Instant::now();
    while !info(vmm)["device_tree"][id].is_null() {
        assert!(start.elapsed() < BOOT_TIME, "the guest did not release the device: {}", info(vmm));
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns the bytes of memory that the host has pinned for the VMM.
pub(crate) fn pinned(vmm: &ApiVmm) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.pid())).unwrap();
    let kib = |key: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    (kib("VmLck:") + kib("VmPin:")) * 1024
}

/// Returns the bytes in mappings and windows of the virtio-iommu, and the endpoints with windows.
fn windows(vmm: &ApiVmm) -> (u64, Vec<String>) {
    let bounce = vmm.call("GET", "/api/v1/vm.iommu-bounce", None).unwrap().1;
    let bytes = |name: &str| bounce["counters"][name].as_u64().unwrap();
    let endpoints =
        bounce["windows"].as_array().unwrap().iter().flat_map(|window| window["endpoints"].as_array().unwrap());
    let names = endpoints.map(|name| name.as_str().unwrap().to_owned()).collect();
    (bytes("mapped_bytes") + bytes("window_bytes"), names)
}

#[guest_test(needs(SecondDrive))]
fn iommu_drive_is_added_and_removed_while_another_works() {
    let job = use_two_drives();
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let (client, calls) = (socket_based_api_client(vmm.socket()), Calls::new());
    let first = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "first"});
    create(&vmm, json!({"devices": [first], "iommu_bounce": {"size": 64 * MIB}}));
    calls.make(client.boot_vm()).unwrap();
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-FIRST 0", 1, BOOT_TIME).unwrap();

    let absent = DeviceConfig::new("/sys/bus/pci/devices/ffff:00:00.0".into());
    for (wrong, why) in [
        (drive(0, "second", true), 409),
        (drive(1, "first", true), 409),
        (DeviceConfig { id: Some("second".into()), ..absent }, 400),
        (drive(1, "_second", true), 400),
    ] {
        assert_eq!(status(&calls.make(client.vm_add_device_put(wrong)).unwrap_err()), why);
    }
    let remove = |id: &str| calls.make(client.vm_remove_device_put(VmRemoveDevice { id: Some(id.into()) }));
    assert_eq!(status(&remove("second").unwrap_err()), 404);
    assert_eq!(status(&remove("_iommu").unwrap_err()), 404);

    for round in 1..=2 {
        let added = calls.make(client.vm_add_device_put(drive(1, "second", true))).unwrap();
        assert_eq!((added.id.as_str(), added.bdf.as_str()), ("second", "0000:00:03.0"));
        vmm.wait_for(&format!("CAROM-CAME {round} 0000:00:03.0 DMA\n"), 1, BOOT_TIME).unwrap();
        vmm.wait_for(&format!("CAROM-WORKED {round}\n"), 1, BOOT_TIME).unwrap();
        let (with, endpoints) = windows(&vmm);
        assert!(endpoints.iter().any(|name| name == "0000:00:03.0"), "no windows: {endpoints:?}");
        let pinned_with = pinned(&vmm);

        remove("second").unwrap();
        vmm.wait_for(&format!("CAROM-GONE {round}\n"), 1, BOOT_TIME).unwrap();
        wait_gone(&vmm, "second");
        let (without, endpoints) = windows(&vmm);
        assert_eq!(endpoints, ["0000:00:02.0"]);
        assert!(
            without < with && pinned(&vmm) < pinned_with,
            "windows: {without} of {with}; pinned: {} of {pinned_with}",
            pinned(&vmm)
        );
        println!("CAROM-HOTPLUG pinned {pinned_with} with the drive, {} without", pinned(&vmm));
    }

    // A paused guest does not release the device. The reset then removes the device without the guest's help.
    calls.make(client.vm_add_device_put(drive(1, "second", true))).unwrap();
    vmm.wait_for("CAROM-WORKED 3\n", 1, BOOT_TIME).unwrap();
    calls.make(client.pause_vm()).unwrap();
    remove("second").unwrap();
    remove("second").unwrap();
    assert!(info(&vmm)["device_tree"]["second"].is_object());
    assert_eq!(status(&calls.make(client.vm_add_device_put(drive(1, "third", true))).unwrap_err()), 409);
    calls.make(client.reboot_vm()).unwrap();
    assert!(info(&vmm)["device_tree"]["second"].is_null());
    assert_eq!(calls.make(client.vm_info_get()).unwrap().state, VmState::Running);
    vmm.wait_for("CAROM-READY", 2, BOOT_TIME).unwrap();
    calls.make(client.vm_add_device_put(drive(1, "second", true))).unwrap();
    vmm.wait_for("CAROM-WORKED 1\n", 2, BOOT_TIME).unwrap();
    calls.make(client.shutdown_vm()).unwrap();

    let console = vmm.console();
    assert!(!console.contains("CAROM-VERIFY 1") && !console.contains("CAROM-FIRST 1"), "{console}");
    let events = vmm.events().unwrap();
    let devices: Vec<_> = events.iter().map(|event| &*event.event).filter(|name| name.starts_with("device-")).collect();
    let pair = ["device-added", "device-removed"];
    assert_eq!(devices, [&pair[..], &pair, &pair, &pair[..1]].concat());
}

#[guest_test(
    slow = "iommu_drive_is_added_and_removed_while_another_works covers a drive, and user_device_is_added_to_a_running_guest_and_removed covers a guest without devices"
)]
fn devices_are_added_to_a_guest_without_any() {
    let job = format!("({}) &\n{}", edu_is_tested_whenever_there(), use_whenever_there("nvme0"));
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let (client, calls) = (socket_based_api_client(vmm.socket()), Calls::new());
    create(&vmm, json!({}));
    calls.make(client.boot_vm()).unwrap();
    let (refused, why) = vmm
        .call("PUT", "/api/v1/vm.add-device", Some(&json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true})))
        .unwrap();
    assert_eq!(refused, 400);
    assert!(why[0].as_str().unwrap().contains("devices.iommu: the VM runs without a virtio-iommu"), "{why}");
    // The guest is still booting and does not handle hotplug yet. It must find the device later.
    let added = calls.make(client.vm_add_device_put(drive(0, "drive", false))).unwrap();
    assert_eq!(added.bdf, "0000:00:02.0");
    vmm.wait_for("CAROM-CAME 1 0000:00:02.0 direct\n", 1, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-WORKED 1\n", 1, BOOT_TIME).unwrap();
    assert!(pinned(&vmm) >= 512 * MIB, "{}", pinned(&vmm));
    for round in 1..=2 {
        calls.make(client.vm_remove_device_put(VmRemoveDevice { id: Some("drive".into()) })).unwrap();
        vmm.wait_for(&format!("CAROM-GONE {round}\n"), 1, BOOT_TIME).unwrap();
        wait_gone(&vmm, "drive");
        assert_eq!(pinned(&vmm), 0);
        if round == 1 {
            calls.make(client.vm_add_device_put(drive(0, "drive", false))).unwrap();
            vmm.wait_for("CAROM-WORKED 2\n", 1, BOOT_TIME).unwrap();
        }
    }
    calls.make(client.delete_vm()).unwrap();

    // The VM has windows but no device yet: the virtio-iommu must exist for devices that are added later.
    create(&vmm, json!({"iommu_bounce": {"size": 128 * MIB}}));
    calls.make(client.boot_vm()).unwrap();
    let added = calls.make(client.vm_add_device_put(drive(0, "drive", true))).unwrap();
    assert_eq!(added.bdf, "0000:00:02.0");
    vmm.wait_for("CAROM-WORKED 1\n", 1, BOOT_TIME).unwrap();
    assert!(vmm.console().contains("CAROM-CAME 1 0000:00:02.0 DMA\n"), "{}", vmm.console());
    assert_eq!(windows(&vmm).1, ["0000:00:02.0"]);
    calls.make(client.vm_remove_device_put(VmRemoveDevice { id: Some("drive".into()) })).unwrap();
    vmm.wait_for("CAROM-GONE 1\n", 1, BOOT_TIME).unwrap();
    wait_gone(&vmm, "drive");
    assert_eq!((windows(&vmm), pinned(&vmm)), ((0, Vec::new()), 0));
    if SITE.edu.is_some() {
        edu_comes_and_goes(&vmm, 2);
    }
    // Do not use `client` here: its connection was idle for so long that the VMM may have closed the connection.
    put(&vmm, "vmm.shutdown", &Value::Null);
}

/// Returns a job that runs the patch's test driver on the edu device each time the device is added.
fn edu_is_tested_whenever_there() -> String {
    format!(
        r#"
n=0
while :; do
    EDU=
    while [ -z "$EDU" ]; do
        sleep 0.2
        EDU=$(cd /sys/bus/pci/devices && grep -ls '^0x11e8' */device | cut -d/ -f1)
    done
    n=$((n + 1))
    # The kernel shows a device in sysfs before it accepts a driver for the device.
    sleep 0.5
    ({TEST_EDU})
    echo "CAROM-EDU-BAR $(head -n 1 "/sys/bus/pci/devices/$EDU/resource")"
    dmesg -c | sed -n 's/^.*dma-bounce-test: all \([0-9]*\) cases passed/CAROM-EDU-CASES \1/p'
    echo "CAROM-EDU-WORKED $n"
    while [ -e "/sys/bus/pci/devices/$EDU" ]; do sleep 0.1; done
    echo "CAROM-EDU-GONE $n"
done
"#
    )
}

/// Adds the host's edu device to a running guest and removes it again by carom-remote, `rounds` times.
fn edu_comes_and_goes(vmm: &ApiVmm, rounds: usize) {
    let edu = required(SITE.edu.as_ref(), "QEMU's edu device (CAROM_EDU)");
    let path = Site::sysfs(edu);
    for round in 1..=rounds {
        edu_comes_and_goes_once(vmm, round, "add-device", &format!("path={}", path.display()));
    }
    let again = vmm.remote(&SITE, &["remove-device", "edu"]).unwrap_err().to_string();
    assert!(again.contains("there is no device 'edu': vm.info lists the devices (status 404)"), "{again}");
    check_edu(&vmm.console(), rounds);
}

/// Adds an edu device behind the virtio-iommu by the subcommand `verb` of carom-remote, and removes the device after the guest
/// has tested it.
fn edu_comes_and_goes_once(vmm: &ApiVmm, round: usize, verb: &str, source: &str) {
    let remote = |arguments: &[&str]| vmm.remote(&SITE, arguments).unwrap();
    let device = format!("{source},iommu=on,id=edu");
    let added: Value = serde_json::from_str(&remote(&[verb, &device])).unwrap();
    assert_eq!(added, json!({"id": "edu", "bdf": "0000:00:02.0"}));
    vmm.wait_for(&format!("CAROM-EDU-WORKED {round}\n"), 1, BOOT_TIME).unwrap();
    assert_eq!(remote(&["remove-device", "edu"]), "");
    vmm.wait_for(&format!("CAROM-EDU-GONE {round}\n"), 1, BOOT_TIME).unwrap();
    wait_gone(vmm, "edu");
    assert_eq!((windows(vmm), pinned(vmm)), ((0, Vec::new()), 0));
}

/// Checks the test results and the BAR address that the guest printed for each added edu device.
fn check_edu(console: &str, rounds: usize) {
    let values = |key: &str| -> Vec<String> {
        console.lines().filter_map(|line| line.strip_prefix(key)).map(str::to_owned).collect()
    };
    let cases = values("CAROM-EDU-CASES ");
    assert!(cases.len() == rounds && cases.iter().all(|cases| cases.parse::<u32>().unwrap() >= 12), "{console}");
    // A 32-bit BAR of 1 MiB must be between the end of RAM and ECAM.
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
    for bar in values("CAROM-EDU-BAR ") {
        let words: Vec<u64> = bar.split(' ').map(hex).collect();
        assert!((0xe000_0000..0xf800_0000).contains(&words[0]) && words[1] == words[0] + 0xf_ffff, "{bar}");
    }
}

/// A vfio-user server serves one client after the other, so a removed device can be added again.
#[guest_test]
fn user_device_is_added_to_a_running_guest_and_removed() {
    const ROUNDS: usize = 2;
    let server = EduServer::start(&[]);
    let vmm = ApiVmm::start(&SITE, &edu_is_tested_whenever_there()).unwrap();
    create(&vmm, json!({"memory": {"size": 512 * MIB}, "iommu_bounce": {"size": 32 * MIB}}));
    vmm.remote(&SITE, &["boot"]).unwrap();
    for round in 1..=ROUNDS {
        edu_comes_and_goes_once(&vmm, round, "add-user-device", &format!("socket={}", server.socket().display()));
    }
    check_edu(&vmm.console(), ROUNDS);
    let events = vmm.events().unwrap();
    for event in ["device-added", "device-removed"] {
        assert_eq!(events.iter().filter(|reported| reported.event == event).count(), ROUNDS, "{event}");
    }
    vmm.remote(&SITE, &["shutdown-vmm"]).unwrap();
}

#[guest_test(
    needs(Edu),
    slow = "devices_are_added_to_a_guest_without_any and others cover the same devices on the older kernel"
)]
fn devices_are_added_and_removed_on_the_newer_kernel() {
    let job = format!("({}) &\n{}", edu_is_tested_whenever_there(), use_whenever_there("nvme0"));
    let vmm = ApiVmm::start_with(&SITE, Kernel::Newer, &job).unwrap();
    let (client, calls) = (socket_based_api_client(vmm.socket()), Calls::new());
    create(&vmm, json!({"iommu_bounce": {"size": 128 * MIB}}));
    vmm.remote(&SITE, &["boot"]).unwrap();

    edu_comes_and_goes(&vmm, 1);

    calls.make(client.vm_add_device_put(drive(0, "drive", true))).unwrap();
    vmm.wait_for("CAROM-WORKED 1\n", 1, BOOT_TIME).unwrap();
    assert_eq!(windows(&vmm).1, ["0000:00:02.0"]);
    calls.make(client.vm_remove_device_put(VmRemoveDevice { id: Some("drive".into()) })).unwrap();
    vmm.wait_for("CAROM-GONE 1\n", 1, BOOT_TIME).unwrap();
    wait_gone(&vmm, "drive");
    assert_eq!((windows(&vmm), pinned(&vmm)), ((0, Vec::new()), 0));
    assert!(vmm.console().contains("CAROM-VERIFY 0 "), "{}", vmm.console());
    calls.make(client.shutdown_vmm()).unwrap();
}

/// Hotplug on a kernel that does not support windows. At the end, an NMI makes the kernel panic (`unknown_nmi_panic`), and the
/// VMM reports the panic.
#[guest_test(slow = "other tests of this file cover the patched kernel")]
fn stock_kernel_hotplug_works_and_its_panic_is_reported() {
    let job = format!("echo 1 >/proc/sys/kernel/unknown_nmi_panic\n{}", use_whenever_there("nvme0"));
    let vmm = ApiVmm::start_with(&SITE, Kernel::Stock, &job).unwrap();
    let (client, calls) = (socket_based_api_client(vmm.socket()), Calls::new());
    create(&vmm, json!({"memory": {"size": 1024 * MIB}, "iommu_bounce": {"size": 64 * MIB}, "pvpanic": true}));
    calls.make(client.boot_vm()).unwrap();
    assert_eq!(info(&vmm)["device_tree"]["_pvpanic"]["pci_bdf"], "0000:00:1f.0");
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();

    let added = calls.make(client.vm_add_device_put(drive(0, "drive", true))).unwrap();
    assert_eq!(added.bdf, "0000:00:02.0");
    vmm.wait_for("CAROM-WORKED 1\n", 1, BOOT_TIME).unwrap();
    let console = vmm.console();
    assert!(console.contains("CAROM-CAME 1 0000:00:02.0 DMA\n") && console.contains("CAROM-VERIFY 0 "), "{console}");
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    assert!(counters["_iommu"]["requests_map"].as_u64().unwrap() > 256, "{counters}");
    assert_eq!(
        (&counters["_iommu"]["requests_window_add"], &counters["_iommu"]["window_bytes"]),
        (&json!(0), &json!(0))
    );
    let gone = VmRemoveDevice { id: Some("drive".into()) };
    calls.make(client.vm_remove_device_put(gone)).unwrap();
    vmm.wait_for("CAROM-GONE 1\n", 1, BOOT_TIME).unwrap();
    wait_gone(&vmm, "drive");
    assert_eq!(pinned(&vmm), 0);

    // The VMM only reports the panic. The guest's kernel decides what happens next.
    calls.make(client.vmm_nmi_put()).unwrap();
    let of_guest = || vmm.events().unwrap().into_iter().filter(|event| event.source == "guest").collect::<Vec<_>>();
    let start = Instant::now();
    while of_guest().is_empty() {
        assert!(start.elapsed() < BOOT_TIME, "no panic is reported: {}", vmm.console());
        thread::sleep(Duration::from_millis(50));
    }
    let reported = of_guest();
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert_eq!((reported[0].event.as_str(), &reported[0].properties), ("panic", &json!({"event": "panic"})));
    assert!(vmm.console().contains("Kernel panic"), "{}", vmm.console());
    assert_eq!(info(&vmm)["state"], "Running");
    calls.make(client.shutdown_vmm()).unwrap();
}
