// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that take turns on a CPU of the host: each goes on with its own translations.

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

/// Memory that each of a guest's processes looks at.
const KEPT_MIB: u32 = 4;

/// How often each of them does so at least.
const LOOKS: usize = 20;

/// How often each guest's drive is written and verified at least.
const VERIFIED: usize = 4;

/// Each guest's work is done by then.
const PATIENCE: Duration = Duration::from_secs(120);

/// Two processes that look again and again whether memory has kept what is in it, and a drive that is verified meanwhile. Guests with
/// the same kernel and the same program use the same virtual addresses, so each would find translations that the other one left.
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
            vmm.wait_for(line, LOOKS, PATIENCE).unwrap();
        }
        vmm.wait_for("CAROM-VERIFY 0 4194304", VERIFIED, PATIENCE).unwrap();
    }
    for vmm in &mut guests {
        let console = vmm.console();
        assert!(!console.contains("CAROM-LOST"), "{console}");
        assert!(verified(vmm) >= VERIFIED, "{console}");
        let counted = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1["_iommu"].take();
        assert_eq!((&counted["faults"], &counted["failed_map"]), (&json!(0), &json!(0)), "{counted}");
        put(vmm, "vmm.shutdown", &Value::Null);
        assert!(vmm.wait(BOOT_TIME).unwrap().success());
    }
}
