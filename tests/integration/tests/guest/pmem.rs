// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-pmem: Debian's own kernel writes to a file of the host as to memory, flushes it, and lets the device go.

use std::fs::{self, File};

use carom_integration::Kernel;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create, put, wait_gone};
use crate::support::{MIB, SITE};

/// Says what each device is that comes, writes to it and flushes that, and ends when the last is gone.
const JOB: &str = "
mark() {
    while [ ! -b /dev/$1 ]; do sleep 0.1; done
    NAME=$(dd if=/dev/$1 bs=16 count=1 2>/dev/null)
    echo CAROM-SIZE $NAME $(cat /sys/block/$1/size)
    printf 'written by the guest' | dd of=/dev/$1 bs=512 seek=1 conv=fsync 2>/dev/null && echo CAROM-FLUSHED $NAME
}
mark pmem0
mark pmem1
echo CAROM-READY
mark pmem2
echo CAROM-PLUGGED
while [ -b /dev/pmem2 ]; do sleep 0.1; done
echo CAROM-UNPLUGGED
";

fn count(vmm: &ApiVmm, device: &str, name: &str) -> u64 {
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    counters[device][name].as_u64().unwrap_or_else(|| panic!("no {device} {name}: {counters}"))
}

#[guest_test(slow = "unit tests have the device; disk:: has one that comes and goes")]
fn files_are_the_guests_memory_and_keep_what_it_writes_unless_that_is_discarded() {
    let mut vmm = ApiVmm::start_with(&SITE, Kernel::Stock, JOB).unwrap();
    let file = |name: &str| {
        let path = vmm.dir().join(name);
        File::create(&path).unwrap().set_len(16 * MIB).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[..16].copy_from_slice(format!("{name:<16}").as_bytes());
        fs::write(&path, bytes).unwrap();
        path
    };
    let (kept, discarded, plugged) = (file("kept"), file("discarded"), file("plugged"));
    let pmem = json!([
        {"file": kept, "iommu": true, "id": "kept"},
        {"file": discarded, "size": 8 * MIB, "discard_writes": true, "id": "discarded"},
    ]);
    create(&vmm, json!({"memory": {"size": 1024 * MIB}, "pmem": pmem}));
    put(&vmm, "vm.boot", &Value::Null);
    vmm.wait_for("CAROM-READY\n", 1, BOOT_TIME).unwrap();
    let (status, added) =
        vmm.call("PUT", "/api/v1/vm.add-pmem", Some(&json!({"file": plugged, "id": "plugged"}))).unwrap();
    assert_eq!((status, &added["id"]), (200, &json!("plugged")), "{added}");
    vmm.wait_for("CAROM-PLUGGED\n", 1, BOOT_TIME).unwrap();
    put(&vmm, "vm.remove-device", &json!({"id": "plugged"}));
    wait_gone(&vmm, "plugged");

    let console = vmm.console();
    // Linux numbers them as they are ready.
    for line in [
        "CAROM-SIZE kept 32768",
        "CAROM-FLUSHED kept",
        "CAROM-SIZE discarded 16384",
        "CAROM-FLUSHED discarded",
        "CAROM-SIZE plugged 32768",
        "CAROM-FLUSHED plugged",
    ] {
        assert!(console.contains(line), "no {line:?}: {console}");
    }
    let written = |path| fs::read(path).unwrap()[512..].starts_with(b"written by");
    assert_eq!((written(&kept), written(&discarded), written(&plugged)), (true, false, true));
    assert!(count(&vmm, "kept", "flushes") > 0 && count(&vmm, "discarded", "flushes") > 0);
    assert_eq!(count(&vmm, "_iommu", "faults"), 0);
    vmm.wait_for("CAROM-JOB-EXIT 0\n", 1, BOOT_TIME).unwrap();
    put(&vmm, "vmm.shutdown", &Value::Null);
    assert!(vmm.wait(BOOT_TIME).unwrap().success());
}
