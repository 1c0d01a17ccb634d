// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that share a CPU of the host. While a guest runs, the CPU must use only this guest's address translations. With
//! another guest's translations, the guest would read wrong memory.

use std::time::Duration;

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, put};
use crate::support::{MIB, SITE};
use crate::vcpus::verified;

/// Size of the memory that each process of a guest checks, in MiB.
const KEPT_MIB: u32 = 4;

/// Minimum number of checks of each process.
const LOOKS: usize = 20;

/// Minimum number of verified passes of each guest's drive.
const VERIFIED: usize = 4;

/// Maximum time for the work of all guests.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns a job with two processes that repeatedly check that their memory has kept its contents. Meanwhile, the job verifies
/// I/O on the drive. The guests run the same kernel and programs, and so use the same virtual addresses. So a check fails if
/// the CPU uses another guest's translations.
fn keep_memory_and_work() -> String {
    let verify = workload::fio_verify(4, 8);
    format!(
        r#"{WAIT_FOR_NVME}
keep() {{
    dd if=/dev/urandom of="/kept$1" bs=1M count={KEPT_MIB} 2>/dev/null
    sum=$(md5sum <"/kept$1")
    while :; do
        if [ "$(md5sum <"/kept$1")" = "$sum" ]; then echo "CAROM-KEPT $1"; else echo "CAROM-LOST $1"; fi
    done
}}
keep 1 &
keep 2 &
while :; do
{verify}
done
"#
    )
}

fn boot(drive: &str) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, &keep_memory_and_work()).unwrap();
    let drive = json!({"path": Site::sysfs(drive), "iommu": true, "id": "drive"});
    let cpus = json!({"boot_vcpus": 1, "max_vcpus": 1, "affinity": [{"vcpu": 0, "host_cpus": [0]}]});
    create_and_boot(&vmm, json!({"cpus": cpus, "devices": [drive], "iommu_bounce": {"size": 16 * MIB}}));
    vmm
}

#[guest_test]
fn guests_sharing_a_cpu_keep_their_memory_and_drives() {
    let mut guests = [0, 1].map(|number| boot(&SITE.nvme[number]));
    for vmm in &guests {
        for line in ["CAROM-KEPT 1", "CAROM-KEPT 2"] {
            vmm.wait_for(line, LOOKS, LIMIT).unwrap();
        }
        vmm.wait_for("CAROM-VERIFY 0 4194304", VERIFIED, LIMIT).unwrap();
    }
    for vmm in &mut guests {
        let console = vmm.console();
        assert!(!console.contains("CAROM-LOST"), "{console}");
        assert!(verified(vmm) >= VERIFIED, "{console}");
        let counted = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1["_iommu"].take();
        for name in ["faults", "failed_map", "failed_map_list"] {
            assert_eq!(counted[name], 0, "{counted}");
        }
        put(vmm, "vmm.shutdown", &Value::Null);
        assert!(vmm.wait(BOOT_TIME).unwrap().success());
    }
}
