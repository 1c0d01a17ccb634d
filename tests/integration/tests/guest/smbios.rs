// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SMBIOS tables: Debian's kernel shows the machine's names.

use carom_integration::Kernel;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use serde_json::json;

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end};
use crate::support::{MIB, SITE};

const JOB: &str = "
cd /sys/class/dmi/id
for name in sys_vendor product_name product_version product_serial product_uuid product_sku product_family chassis_vendor chassis_asset_tag; do
    echo \"CAROM-$name $(cat $name)\"
done
echo \"CAROM-oem $(grep -ac 'io.test:key=value' /sys/firmware/dmi/tables/DMI)\"
dmesg | grep -E 'SMBIOS|DMI:'
";

#[guest_test(slow = "unit tests check the tables byte by byte")]
fn stock_kernel_shows_the_names_of_the_machine() {
    let mut vmm = ApiVmm::start_with(&SITE, Kernel::Stock, JOB).unwrap();
    let platform = json!({
        "system_manufacturer": "A, Manufacturer", "system_version": "1.2", "serial_number": "VM-17",
        "uuid": "00112233-4455-6677-8899-aabbccddeeff", "system_sku_number": "SKU", "system_family": "Family",
        "chassis_asset_tag": "Tag", "oem_strings": ["io.test:key=value", "other"],
    });
    create_and_boot(&vmm, json!({"memory": {"size": 1024 * MIB}, "platform": platform}));
    vmm.wait_for("CAROM-JOB-EXIT 0\n", 1, BOOT_TIME).unwrap();

    let console = vmm.console();
    for line in [
        "CAROM-sys_vendor A, Manufacturer",
        "CAROM-product_name Carom virtual machine",
        "CAROM-product_version 1.2",
        "CAROM-product_serial VM-17",
        "CAROM-product_uuid 00112233-4455-6677-8899-aabbccddeeff",
        "CAROM-product_sku SKU",
        "CAROM-product_family Family",
        "CAROM-chassis_vendor A, Manufacturer",
        "CAROM-chassis_asset_tag Tag",
        "CAROM-oem 1",
        "SMBIOS 3.2.0 present.",
    ] {
        assert!(console.contains(&format!("{line}\n")), "no {line:?}: {console}");
    }
    end(&mut vmm);
}
