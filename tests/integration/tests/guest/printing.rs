// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that print a lot while they use a drive. Unmodified QEMU emulates nested guests incorrectly, and reset about 6 of 100
//! such guests (`docs/rig.md`, The emulator).

use std::env;

use carom_integration::Guest;
use carom_integration::harness::{guest_test, tell};
use carom_integration::workload::WAIT_FOR_NVME;

use crate::support::{SITE, number, run};

/// Number of guests, unless `CAROM_BOOTS` is set.
const BOOTS: u32 = 5;

/// Number of lines that each vCPU prints.
const LINES: u64 = 40;

/// Returns a job that reads the drive while both vCPUs print. The vCPUs print to the kernel's log, which the kernel writes to
/// the serial port immediately.
fn job() -> String {
    format!(
        r#"{WAIT_FOR_NVME}
(while [ ! -e /tmp/done ]; do dd if=/dev/nvme0n1 of=/dev/null bs=4k count=64 iflag=direct 2>/dev/null; done) &
READER=$!
for cpu in 0 1; do
    (for i in $(seq {LINES}); do echo "CAROM-LINE vCPU $cpu prints line $i of {LINES}, as long as those of drivers are" >/dev/kmsg; done) &
    eval "PRINTER$cpu=$!"
    taskset -p $((1 << cpu)) $! >/dev/null
done
wait $PRINTER0 $PRINTER1
: >/tmp/done
wait $READER
echo "CAROM-PRINTED $(dmesg | grep -c CAROM-LINE)"
"#
    )
}

#[guest_test(slow = "other tests notice a reset, too; this test is for many boots (CAROM_BOOTS)")]
fn no_guest_resets_or_hangs_while_it_boots_and_prints() {
    let boots = env::var("CAROM_BOOTS").map_or(BOOTS, |value| value.parse().expect("CAROM_BOOTS is a number"));
    let mut again = Vec::new();
    for boot in 1..=boots {
        let guest = Guest::new(&format!("printing-{boot}"))
            .cpus(2)
            .memory_mib(256)
            .cmdline("ignore_loglevel iommu.strict=1")
            .iommu_device(&SITE.nvme[0])
            .job(&job());

        let outcome = run(&guest);

        assert_eq!(number(&outcome, "CAROM-PRINTED"), 2 * LINES, "console:\n{}", outcome.console);
        let lines = outcome.console.lines().filter(|line| line.contains("CAROM-LINE vCPU")).count();
        assert!(lines as u64 >= 2 * LINES, "{lines} lines were printed; console:\n{}", outcome.console);
        if outcome.retries > 0 {
            again.push(boot);
        }
        tell(&format!(
            "boot {boot} of {boots}: {:.1} s, {} bytes printed; reset or hung so far: {again:?}",
            outcome.elapsed.as_secs_f64(),
            outcome.console.len()
        ));
    }
    assert!(again.is_empty(), "of {boots} guests, these guests were reset or hung: {again:?}");
}
