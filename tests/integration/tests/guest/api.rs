// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the API with a real guest. One test uses the unmodified Cloud Hypervisor client from crates.io. Another test
//! changes the budget of the bounce windows while the guest does I/O.

use carom_integration::harness::guest_test;
use std::fs;
use std::future::Future;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use cloud_hypervisor_client::apis::{DefaultApi, Error as ClientError};
use cloud_hypervisor_client::models::{
    ConsoleMode, CpusConfig, DeviceConfig, MemoryConfig, PayloadConfig, PlatformConfig, SerialConfig, VmConfig,
    VmRemoveDevice, VmState,
};
use cloud_hypervisor_client::socket_based_api_client;
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use crate::support::{MIB, SITE};

/// Maximum boot time of a guest under emulation.
pub(crate) const BOOT_TIME: Duration = Duration::from_secs(120);

/// Job that reports its start, prints rising numbers, and reports NMIs and presses of the power button.
pub(crate) const COUNT: &str = r#"
irqs() { awk -v key="$1" 'index($0, key) { for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) n += $i } END { print n + 0 }' /proc/interrupts; }
echo "CAROM-READY $(nproc)"
i=0
while :; do
    i=$((i + 1))
    echo "CAROM-TICK $i"
    [ "$(irqs NMI:)" = 0 ] || echo CAROM-NMI
    [ "$(irqs ACPI:Ged)" = 0 ] || echo CAROM-BUTTON
    sleep 0.2
done
"#;

pub(crate) fn command_line() -> String {
    "console=ttyS0 quiet panic=-1 oops=panic mitigations=off iommu.strict=1 nmi_watchdog=0".into()
}

/// Runtime that runs each call of the asynchronous client to its end. The runtime keeps the client's connection between calls.
pub(crate) struct Calls(Runtime);

impl Calls {
    pub(crate) fn new() -> Self {
        Self(Builder::new_current_thread().enable_all().build().unwrap())
    }

    pub(crate) fn make<T>(&self, call: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        self.0.block_on(call)
    }
}

pub(crate) fn status(error: &ClientError) -> u16 {
    match error {
        ClientError::Api(error) => error.code.as_u16(),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn ticks(vmm: &ApiVmm) -> usize {
    vmm.console().matches("CAROM-TICK ").count()
}

#[guest_test]
fn cloud_hypervisors_client_drives_a_guest_through_its_life() {
    let segments = "echo CAROM-SEGMENTS $(ls -d /sys/devices/pci*:00 | sed 's,.*/pci,,')\n";
    let mut vmm = ApiVmm::start(&SITE, &format!("{segments}{WAIT_FOR_NVME}{COUNT}")).unwrap();
    let client = socket_based_api_client(vmm.socket());
    let calls = Calls::new();

    let ping = calls.make(client.vmm_ping_get()).unwrap();
    assert_eq!(ping.pid, Some(i64::from(vmm.pid())));
    assert_eq!(status(&calls.make(client.vm_info_get()).unwrap_err()), 404);
    assert_eq!(status(&calls.make(client.boot_vm()).unwrap_err()), 404);

    let config = VmConfig {
        cpus: Some(CpusConfig { max_phys_bits: Some(46), ..CpusConfig::new(2, 2) }),
        memory: Some(MemoryConfig::new(512 << 20)),
        // Two segments, as in Kata Containers. The second segment has no devices.
        platform: Some(PlatformConfig { num_pci_segments: Some(2), ..PlatformConfig::new() }),
        serial: Some(SerialConfig {
            file: Some(vmm.console_file().display().to_string()),
            ..SerialConfig::new(ConsoleMode::File)
        }),
        ..VmConfig::new(PayloadConfig {
            kernel: Some(vmm.kernel().display().to_string()),
            initramfs: Some(vmm.initramfs().display().to_string()),
            cmdline: Some(command_line()),
            ..PayloadConfig::new()
        })
    };
    calls.make(client.create_vm(config.clone())).unwrap();
    assert_eq!(calls.make(client.vm_info_get()).unwrap().state, VmState::Created);
    assert_eq!(status(&calls.make(client.pause_vm()).unwrap_err()), 500);

    // A device that is added before the boot has no PCI address yet. The client cannot parse an answer without an address, so
    // the test ignores this error.
    let device = |id: &str| DeviceConfig {
        iommu: Some(true),
        id: Some(id.into()),
        ..DeviceConfig::new(Site::sysfs(&SITE.nvme[0]).display().to_string())
    };
    let added = calls.make(client.vm_add_device_put(device("first")));
    assert!(matches!(added, Ok(_) | Err(ClientError::Serde(_))), "{added:?}");
    calls.make(client.vm_remove_device_put(VmRemoveDevice { id: Some("first".into()) })).unwrap();
    let added = calls.make(client.vm_add_device_put(device("drive")));
    assert!(matches!(added, Ok(_) | Err(ClientError::Serde(_))), "{added:?}");

    calls.make(client.boot_vm()).unwrap();
    vmm.wait_for("CAROM-READY 2", 1, BOOT_TIME).unwrap();
    assert!(vmm.console().contains("CAROM-SEGMENTS 0000:00 0001:00"), "{}", vmm.console());
    let info = calls.make(client.vm_info_get()).unwrap();
    assert_eq!(info.state, VmState::Running);
    let tree = info.device_tree.unwrap();
    assert_eq!(tree["drive"].pci_bdf.as_deref(), Some("0000:00:02.0"), "{tree:?}");
    let counters = calls.make(client.vm_counters_get()).unwrap();
    assert!(counters["_iommu"]["requests_map"] > 0, "{counters:?}");

    // Each of the two vCPUs has a named thread.
    let threads = fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap();
    let names: Vec<_> = threads.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap()).collect();
    assert!(["vcpu0\n", "vcpu1\n"].iter().all(|name| names.iter().any(|other| other == name)), "{names:?}");

    vmm.wait_for("CAROM-TICK 5\n", 1, BOOT_TIME).unwrap();
    calls.make(client.pause_vm()).unwrap();
    assert_eq!(status(&calls.make(client.pause_vm()).unwrap_err()), 500);
    let before = ticks(&vmm);
    thread::sleep(Duration::from_secs(2));
    assert_eq!(ticks(&vmm), before, "the paused guest continued");
    assert_eq!(calls.make(client.vm_info_get()).unwrap().state, VmState::Paused);
    calls.make(client.resume_vm()).unwrap();
    vmm.wait_for("CAROM-TICK ", before + 3, BOOT_TIME).unwrap();

    calls.make(client.vmm_nmi_put()).unwrap();
    vmm.wait_for("CAROM-NMI", 1, BOOT_TIME).unwrap();
    assert!(!vmm.console().contains("CAROM-BUTTON"));
    calls.make(client.power_button_vm()).unwrap();
    vmm.wait_for("CAROM-BUTTON", 1, BOOT_TIME).unwrap();

    calls.make(client.reboot_vm()).unwrap();
    vmm.wait_for("CAROM-READY", 2, BOOT_TIME).unwrap();

    // After a shutdown, the same VM boots again. After the deletion of this VM, a new VM boots. Both VMs use the same drive and
    // files. Each boot creates the console's file again, so the count of CAROM-READY lines starts again.
    calls.make(client.shutdown_vm()).unwrap();
    assert_eq!(calls.make(client.vm_info_get()).unwrap().state, VmState::Created);
    assert_eq!(status(&calls.make(client.vm_counters_get()).unwrap_err()), 500);
    calls.make(client.boot_vm()).unwrap();
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    calls.make(client.delete_vm()).unwrap();
    assert_eq!(status(&calls.make(client.vm_info_get()).unwrap_err()), 404);
    calls.make(client.create_vm(VmConfig { devices: Some(vec![device("again")]), ..config })).unwrap();
    calls.make(client.boot_vm()).unwrap();
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    calls.make(client.shutdown_vmm()).unwrap();
    assert!(vmm.wait(BOOT_TIME).unwrap().success());
    assert!(!vmm.socket().exists());

    let events = vmm.events().unwrap();
    let names_of = |sources: &[&str]| {
        let of = events.iter().filter(|event| sources.contains(&event.source.as_str()));
        of.map(|event| event.event.as_str()).collect::<Vec<_>>().join(" ")
    };
    let expected = "starting booting booted pausing paused resuming resumed rebooting rebooted shutdown booting booted shutdown \
                    deleted booting booted shutdown deleted shutdown";
    assert_eq!(names_of(&["vm", "vmm"]), expected);
    // In each boot, the guest's driver activates the virtio-iommu. Only the reboot reports a reset of the device, because
    // shutdown and deletion remove the device. All other events of virtio devices are from `_console`.
    let of_devices = events.iter().filter(|event| event.source == "virtio-device");
    let (of_iommu, others): (Vec<_>, Vec<_>) =
        of_devices.partition(|event| event.properties == json!({"id": "_iommu"}));
    let names: Vec<&str> = of_iommu.iter().map(|event| event.event.as_str()).collect();
    assert_eq!(names, ["activated", "reset", "activated", "activated", "activated"]);
    assert!(others.iter().all(|event| event.properties == json!({"id": "_console"})), "{others:?}");
}

#[guest_test(slow = "exhausted_budget_falls_back_and_loses_nothing covers the load, and unit tests cover the change")]
fn guest_follows_a_changed_budget_under_load() {
    // The job repeats verified I/O. In the pause between two runs, no slot is in use.
    let verify = workload::fio_verify(16, 64);
    let thresholds = "sed -n 's/^threshold/CAROM-THRESHOLD/p' /sys/kernel/debug/iommu_bounce/*/stats";
    let job = format!(
        "{WAIT_FOR_NVME}\nwhile [ ! -e /stop ]; do\n{verify}\n{thresholds}\necho CAROM-ROUND\nsleep 0.5\ndone\n"
    );
    let mut vmm = ApiVmm::start(&SITE, &job).unwrap();
    let put = |path: &str, body: Value| {
        let (status, answer) = vmm.call("PUT", path, Some(&body)).unwrap();
        assert_eq!(status, 204, "{answer}");
    };
    put(
        "/api/v1/vm.create",
        json!({
            "payload": {"kernel": vmm.kernel(), "initramfs": vmm.initramfs(), "cmdline": command_line()},
            "serial": {"mode": "File", "file": vmm.console_file()},
            "devices": [{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true}],
            "iommu_bounce": {"size": 64 * MIB},
        }),
    );
    assert_eq!(vmm.call("PUT", "/api/v1/vm.boot", None).unwrap().0, 204);
    vmm.wait_for("CAROM-ROUND", 2, BOOT_TIME * 2).unwrap();

    let bounce = || vmm.call("GET", "/api/v1/vm.iommu-bounce", None).unwrap().1;
    let backed = || bounce()["counters"]["window_bytes"].as_u64().unwrap();
    let full = backed();
    assert!(full > 8 * MIB, "the guest has too few chunks for this test: {}", bounce());
    let windows = bounce()["windows"].clone();
    assert!(windows[0]["endpoints"][0] == "0000:00:02.0", "{windows}");
    assert_eq!(windows[0]["bytes"], full, "{windows}");

    let start = Instant::now();
    put("/api/v1/vm.iommu-bounce", json!({"budget": 4 * MIB, "threshold": 16384, "threshold_write": 8192}));
    while backed() > 4 * MIB {
        // The limit is generous, because the emulated machine may be slow. The actual time is printed below. The goal on real
        // hardware is two seconds.
        assert!(start.elapsed() < Duration::from_secs(120), "the guest keeps its chunks: {}", bounce());
        thread::sleep(Duration::from_millis(20));
    }
    println!("CAROM-BUDGET-FOLLOWED-MS {}", start.elapsed().as_millis());
    vmm.wait_for("CAROM-ROUND", 4, BOOT_TIME * 2).unwrap();
    assert!(backed() <= 4 * MIB, "{}", bounce());
    assert!(vmm.console().contains("CAROM-THRESHOLD 16384"), "{}", vmm.console());
    assert!(vmm.console().contains("CAROM-THRESHOLD_write 8192"), "{}", vmm.console());

    put("/api/v1/vm.iommu-bounce", json!({"budget": 64 * MIB, "threshold": 0, "threshold_write": 0}));
    vmm.wait_for("CAROM-ROUND", 6, BOOT_TIME * 2).unwrap();
    assert!(backed() > 4 * MIB, "{}", bounce());
    assert_eq!(vmm.call("PUT", "/api/v1/vmm.shutdown", None).unwrap().0, 204);
    let console = vmm.console();
    assert!(console.matches("CAROM-VERIFY 0 ").count() >= 6, "{console}");
    assert!(
        // The last line may be incomplete, so ignore it.
        console
            .rsplit_once('\n')
            .map_or("", |(whole, _)| whole)
            .lines()
            .all(|line| !line.starts_with("CAROM-VERIFY ") || line.starts_with("CAROM-VERIFY 0 ")),
        "{console}"
    );
    assert!(vmm.wait(BOOT_TIME).unwrap().success());
}
