// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest that makes the VMM open as many file descriptors as possible.

use std::fs;
use std::os::unix::net::UnixStream;

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, put};
use crate::support::{MIB, SITE};

/// Number of simultaneous API clients. The VMM opens a descriptor for each client.
const CLIENTS: usize = 8;
/// Number of descriptors that the VMM can open for the guest after [`leave_few`].
const FOR_THE_GUEST: u64 = 3;

fn open_descriptors(vmm: &ApiVmm) -> u64 {
    fs::read_dir(format!("/proc/{}/fd", vmm.pid())).unwrap().count() as u64
}

/// Lowers the VMM's limit on open descriptors, and returns the new limit. The VMM reserves a quarter of the limit for other
/// work. So it can open only [`FOR_THE_GUEST`] more descriptors for the guest.
fn leave_few(vmm: &ApiVmm) -> u64 {
    let limit = (open_descriptors(vmm) + FOR_THE_GUEST) * 4 / 3;
    let pid = Pid::from_raw(i32::try_from(vmm.pid()).unwrap());
    prlimit(pid, Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    limit
}

#[guest_test(slow = "unit tests cover the reserve and its errors")]
fn windows_leave_descriptors_to_clients_and_resets() {
    let verify = workload::fio_verify(8, 64);
    let vmm =
        ApiVmm::start(&SITE, &format!("{WAIT_FOR_NVME}\necho CAROM-READY\nsleep 2\nwhile :; do\n{verify}\ndone\n"))
            .unwrap();
    let drive = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true});
    create_and_boot(&vmm, json!({"devices": [drive], "iommu_bounce": {"size": 64 * MIB}}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();

    let limit = leave_few(&vmm);
    vmm.wait_for("CAROM-VERIFY 0", 2, BOOT_TIME).unwrap();
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    assert!(counters["_iommu"]["failed_window_add"].as_u64().unwrap() > 0, "no window was refused: {counters}");
    let open = open_descriptors(&vmm);
    assert!(open <= limit - limit / 4 + 2, "{open} of {limit} descriptors are open");

    let clients: Vec<_> = (0..CLIENTS).map(|_| UnixStream::connect(vmm.socket()).unwrap()).collect();
    assert_eq!(vmm.call("GET", "/api/v1/vm.info", None).unwrap().1["state"], "Running");
    drop(clients);
    put(&vmm, "vm.reboot", &Value::Null);
    let done = vmm.console().matches("CAROM-VERIFY 0").count();
    vmm.wait_for("CAROM-VERIFY 0", done + 1, BOOT_TIME).unwrap();
    put(&vmm, "vmm.shutdown", &Value::Null);
}
