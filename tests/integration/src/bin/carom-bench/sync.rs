// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of `dma_sync_*()` in guest kernels with and without the patch. Compares a device whose mappings have never bounced with a
//! device that had a bounced mapping. A module of `guest/bench` makes the calls, and the rig's emulator counts the instructions
//! between the module's marks.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::measure::mode::{BOUNCE, Mode, STRICT};
use carom_integration::vmm::Kernel;
use carom_integration::{Outcome, Site};

use crate::counted::{self, Counts, FIRST_END, Guests};
use crate::table::{Measured, Row, Scope, Shown, Table, Work};

const SHOWN: &[Shown] = &[
    Shown::new("instructions", "instructions per call", 0),
    Shown::new("ns", "time per call while instructions are counted, in ns", 1),
];

pub(crate) const TABLE: Table = Table::new("sync", "mode", SHOWN, work).once();

/// Names of the measured calls, as the module prints them. The first call does nothing. Its cost is subtracted from the cost of
/// the other calls.
const CALLS: [&str; 5] = ["nothing", "single_for_cpu", "single_for_device", "sg_for_cpu", "sg_for_device"];

/// States of the device, as the module prints them. For the second state, the module clears the device's flag that the first
/// bounced mapping would clear.
const DEVICES: [&str; 2] = ["never-bounced", "has-bounced"];

/// Guests of the table. In modes with windows, mappings of the guest's drive bounce, but mappings of the edu device do not bounce.
static GUESTS: Guests = Guests {
    modes: [
        (Mode { name: "stock", ..STRICT }, Kernel::ModularStock),
        (STRICT, Kernel::Modular),
        (BOUNCE, Kernel::Modular),
    ],
    cpus: 1,
    module: "dma_sync_bench",
    jobs: [JOB, ""],
    estimate: Duration::from_secs(40),
    measured,
};

/// Shell lines that read from the drive, and print how many mappings have bounced.
const JOB: &str = r#"
dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64 2>/dev/null || exit 91
echo "CAROM-BOUNCED $(cat /sys/kernel/debug/iommu_bounce/*/stats 2>/dev/null | awk '/^bounced_/ { n += $2 } END { printf "%d\n", n }')"
"#;

fn work(_: Scope, site: &Site) -> Vec<Work> {
    GUESTS.work(site)
}

fn measured(outcome: &Outcome, mode: &Mode, counts: Option<&Counts>) -> Result<Measured> {
    let lost = outcome.values("CAROM-SYNC-LOST").next().is_some();
    ensure!(
        !lost,
        "the kernel no longer skips the edu device's sync calls, although no mapping of this device has bounced yet"
    );
    let bounced: u64 =
        outcome.value("CAROM-BOUNCED")?.parse().context("CAROM-BOUNCED in the console is not a number")?;
    ensure!(
        (bounced > 0) == mode.windows,
        "{bounced} mappings of the drive bounced; some must bounce in a mode with windows, and none in other modes"
    );
    let mut rows = Vec::new();
    for (place, device) in DEVICES.into_iter().enumerate() {
        let time = |call: &str| {
            let prefix = format!("{device} {call} ");
            let ps = outcome.values("CAROM-SYNC").find_map(|line| line.strip_prefix(&prefix));
            Ok::<f64, anyhow::Error>(
                ps.with_context(|| format!("the console has no line 'CAROM-SYNC {prefix}PICOSECONDS'"))?
                    .parse::<f64>()?
                    / 1000.0,
            )
        };
        let count = |counts: &Counts, call: usize| {
            counted::median(counts, FIRST_END + place * CALLS.len() + call, "instructions")
        };
        for (call, name) in CALLS.into_iter().enumerate().skip(1) {
            let of = [("mode", mode.name.into()), ("device", device.into()), ("call", name.into())];
            let mut row = Row::new(of, [("ns", (time(name)? - time(CALLS[0])?).max(0.0))]);
            if let Some(counts) = counts {
                row.figures.insert("instructions".into(), count(counts, call)? - count(counts, 0)?);
            }
            rows.push(row);
        }
    }
    Measured::of(outcome, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an outcome in which each call takes a nanosecond longer than the previous call.
    fn outcome(bounced: u32) -> Outcome {
        let mut console = format!("CAROM-FIO-VERSION fio-3.33\nCAROM-KERNEL 6.12\nCAROM-BOUNCED {bounced}\n");
        for device in DEVICES {
            for (ns, call) in CALLS.iter().enumerate() {
                console += &format!("CAROM-SYNC {device} {call} {ns}500\n");
            }
        }
        Outcome { console, ..Outcome::default() }
    }

    #[test]
    fn cost_of_the_empty_call_is_subtracted_from_medians() {
        let text: String =
            (16..26).map(|number| format!("{number} instructions 1000 1 {} 9999\n", number * 3)).collect();

        let found = measured(&outcome(7), &BOUNCE, Some(&counted::parse(&text).unwrap())).unwrap();

        let figures: Vec<(f64, f64)> =
            found.rows.iter().map(|row| (row.figures["instructions"], row.figures["ns"])).collect();
        assert_eq!(figures, [(3.0, 1.0), (6.0, 2.0), (9.0, 3.0), (12.0, 4.0)].repeat(2));
        let [_, _, _, _, row, ..] = &found.rows[..] else { panic!("{found:?}") };
        assert_eq!(row.key("device").unwrap(), "has-bounced");
        assert_eq!(row.key("call").unwrap(), "single_for_cpu");
    }

    #[test]
    fn wrong_bounce_count_or_mark_without_count_is_an_error() {
        assert!(measured(&outcome(0), &BOUNCE, None).is_err());
        assert!(measured(&outcome(7), &STRICT, None).is_err());
        assert!(measured(&outcome(0), &STRICT, None).is_ok());
        assert!(measured(&outcome(0), &STRICT, Some(&counted::parse("16 instructions 1 1 1 1\n").unwrap())).is_err());
    }

    #[test]
    fn device_that_needs_sync_calls_is_an_error() {
        let mut lost = outcome(0);
        lost.console += "CAROM-SYNC-LOST 1\n";
        assert!(measured(&lost, &STRICT, None).is_err());
    }
}
