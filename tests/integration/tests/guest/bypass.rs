// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest with a device that bypasses the virtio-iommu, and so can access all RAM of the guest. Carom maps the RAM in several
//! pieces, so that the VM can be paused between two pieces.

use std::time::Instant;

use carom_integration::api::ApiVmm;
use carom_integration::harness::{guest_test, tell};
use carom_integration::workload::{self, WAIT_FOR_NVME};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, drive, payload, put};
use crate::net::counter;
use crate::support::{MIB, SITE};

/// RAM that is mapped in three pieces of at most 1 GiB.
const RAM: u64 = 2560 * MIB;

#[guest_test(slow = "unit tests interrupt mappings anywhere; other tests map small guests for bypass")]
fn vm_pauses_in_time_while_all_ram_is_mapped_for_bypass() {
    let job =
        format!("{WAIT_FOR_NVME}cat /sys/kernel/iommu_groups/*/type\n{}sleep 1000\n", workload::fio_verify(16, 32));
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let payload = payload(&vmm, " iommu=pt");
    create_and_boot(&vmm, json!({"payload": payload, "memory": {"size": RAM}, "devices": [drive(0, "drive", true)]}));
    // Pause the VM at arbitrary times. Each call must return soon, even while Carom maps RAM for the guest's requests.
    let (mut longest, mut pauses) = (0, 0);
    while counter(&vmm, "_iommu", "mapped_bytes") < RAM - 64 * MIB {
        let start = Instant::now();
        put(&vmm, "vm.pause", &Value::Null);
        longest = longest.max(start.elapsed().as_millis());
        pauses += 1;
        put(&vmm, "vm.resume", &Value::Null);
        assert!(pauses < 10_000, "{}", vmm.console());
    }
    vmm.wait_for(&format!("CAROM-VERIFY 0 {}", 16 * MIB), 1, BOOT_TIME).unwrap();
    assert!(vmm.console().contains("identity"), "{}", vmm.console());
    tell(&format!("{pauses} pauses, of {longest} ms at most"));
    assert!(longest < 10_000, "a pause took {longest} ms");
    // No ATTACH may fail, because the guest's driver would give up after a failure.
    assert_eq!((counter(&vmm, "_iommu", "failed_attach"), counter(&vmm, "_iommu", "faults")), (0, 0));
    assert!(counter(&vmm, "_iommu", "host_maps") >= 3, "RAM was not mapped in pieces");
}
