// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Verified I/O for a selectable amount of data, while events end windows and mappings. These events are cuts of the budget,
//! resets of the drive's controller, resets of the VM, and unbinding of a second drive with I/O in flight.

use std::env;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::{guest_test, tell};
use carom_integration::workload::WAIT_FOR_NVME;
use serde_json::{Value, json};

use crate::hotplug::{create_and_boot, end, put};
use crate::support::{COMPLAINTS, MIB, REBIND_UNDER_LOAD, SITE};

/// MiB to verify, unless `CAROM_SOAK_MIB` is set.
const VERIFIED_MIB: u64 = 768;

/// Budgets that the test sets one after the other, in MiB.
const BUDGETS: [u64; 5] = [64, 4, 16, 2, 8];
const BUDGET_TIME: Duration = Duration::from_millis(700);

/// Interval between resets of the VM.
const RESET_TIME: Duration = Duration::from_secs(60);

/// Maximum time until the next verified pass, even if the guest must boot first.
const SILENCE: Duration = Duration::from_secs(240);

/// Lines of the job. `verify` writes a part of a drive in mixed sizes, reads it back and prints a result line. The word `end`
/// shows that no reset has cut off the line.
const WORK: &str = r#"
drive_of() { basename /sys/bus/pci/devices/"$1"/nvme/nvme*/nvme*n1; }
verify() {
    fio --name="$1" --filename="/dev/$2" --direct=1 --rw=randwrite --ioengine=libaio --iodepth=32 --size="$3M" \
        --bssplit=4k/10:16k/15:64k/35:256k/40 --verify=xxhash --do_verify=1 --verify_fatal=1 --verify_dump=0 --output-format=terse \
        --terse-version=3 >"/tmp/verify-$1" 2>&1
    status=$?
    [ $status = 0 ] || cat "/tmp/verify-$1"
    echo "CAROM-SOAKED $1 $status $(awk -F';' '/^3;/ { print $6 * 1024 }' "/tmp/verify-$1") end"
}
set -- $(cd /sys/bus/pci/drivers/nvme && echo 0*)
FIRST=$1 SECOND=$2
echo "CAROM-DRIVES $FIRST $SECOND"
while :; do
    sleep 6
    echo 1 >"$(echo /sys/bus/pci/devices/"$FIRST"/nvme/nvme*)/reset_controller" && echo CAROM-CONTROLLER-RESET
done &
while :; do
    rebind_under_load "$SECOND"
    until [ -b "/dev/$(drive_of "$SECOND")" ]; do sleep 0.1; done
    echo CAROM-BOUND
    verify second "$(drive_of "$SECOND")" 16
    sleep 5
done &
while :; do
    verify first "$(drive_of "$FIRST")" 128
    complaints
done
"#;

/// Returns the number of verified bytes, and the lines of failed passes.
fn verified(console: &str) -> (u64, Vec<&str>) {
    let (mut bytes, mut failed) = (0, Vec::new());
    for line in console.lines() {
        let Some(pass) = line.strip_prefix("CAROM-SOAKED ").and_then(|pass| pass.strip_suffix(" end")) else {
            continue;
        };
        match pass.split(' ').collect::<Vec<_>>()[..] {
            [_, "0", count] if count.parse().is_ok_and(|count: u64| count > 0) => {
                bytes += count.parse().unwrap_or(0);
            }
            _ => failed.push(line),
        }
    }
    (bytes, failed)
}

#[guest_test(
    needs(SecondDrive),
    slow = "each disturbance has its own test; this test combines them for CAROM_SOAK_MIB of I/O"
)]
fn verified_io_goes_on_under_budget_cuts_unbinding_and_resets() {
    let wanted =
        env::var("CAROM_SOAK_MIB").map_or(VERIFIED_MIB, |value| value.parse().expect("CAROM_SOAK_MIB is a number"));
    let mut vmm =
        ApiVmm::start(&SITE, &format!("{WAIT_FOR_NVME}complaints() {{\n{COMPLAINTS}}}\n{REBIND_UNDER_LOAD}{WORK}"))
            .unwrap();
    let drives: Vec<Value> = SITE.nvme.iter().map(|drive| json!({"path": Site::sysfs(drive), "iommu": true})).collect();
    create_and_boot(
        &vmm,
        json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}, "devices": drives, "iommu_bounce": {"size": 64 * MIB}}),
    );
    let (mut seen, mut progress, mut reset) = (0, Instant::now(), Instant::now());
    let (mut resets, mut cuts) = (0, 0);
    let mut budgets = BUDGETS.iter().cycle();
    while seen < wanted * MIB {
        thread::sleep(BUDGET_TIME);
        let budget = budgets.next().expect("it never ends");
        put(&vmm, "vm.iommu-bounce", &json!({"budget": budget * MIB, "threshold": 0}));
        cuts += 1;
        if reset.elapsed() > RESET_TIME {
            put(&vmm, "vm.reboot", &Value::Null);
            reset = Instant::now();
            resets += 1;
        }
        let console = vmm.console();
        let (bytes, failed) = verified(&console);
        assert!(failed.is_empty(), "{failed:?}\n{console}");
        if bytes > seen {
            tell(&format!("{} of {wanted} MiB verified, {cuts} budgets, {resets} resets", bytes / MIB));
            (seen, progress) = (bytes, Instant::now());
        }
        assert!(progress.elapsed() < SILENCE, "no pass has ended for {SILENCE:?}:\n{console}");
    }
    let counted = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1["_iommu"].take();
    println!("CAROM-COUNTED {counted}");
    assert_eq!(
        (&counted["faults"], &counted["stuck_ranges"], &counted["lost_chunks"]),
        (&json!(0), &json!(0), &json!(0)),
        "{counted}"
    );
    let console = vmm.console();
    let count = |text: &str| console.matches(text).count();
    let disturbed = (count("CAROM-CONTROLLER-RESET"), count("CAROM-BOUND"));
    println!(
        "CAROM-SOAK {} MiB, {cuts} budgets, {resets} resets, {disturbed:?} of controllers and drivers",
        seen / MIB
    );
    assert!(disturbed.0 > 1 && disturbed.1 > 1, "{disturbed:?}\n{console}");
    let complaints: Vec<&str> = console.lines().filter(|line| line.starts_with("CAROM-COMPLAINTS ")).collect();
    // The last line may be incomplete and lack its number.
    let quiet = complaints.iter().all(|line| *line == "CAROM-COMPLAINTS 0" || *line == "CAROM-COMPLAINTS ");
    assert!(quiet && count("CAROM-COMPLAINTS 0") > 0, "{console}");
    end(&mut vmm);
}
