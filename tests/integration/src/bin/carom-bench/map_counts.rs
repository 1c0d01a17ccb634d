// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cost of mapping and unmapping in the guest's kernel. A module of `guest/bench` makes mappings for the edu device. The rig's
//! emulator counts the executed instructions and the touched memory, which do not depend on the host's load.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::measure::mode::{BOUNCE, GUEST_PAGES, Mode, NO_VIOMMU};
use carom_integration::vmm::Kernel;
use carom_integration::{Outcome, Site};

use crate::counted::{self, Counts, FIRST_END, Guests};
use crate::table::{Measured, Row, Scope, Shown, Table, Work};

const SHOWN: &[Shown] = &[
    Shown::new("instructions", "instructions per call", 0),
    Shown::new("locked", "locked operations per call", 0),
    Shown::new("lines", "cache lines that a call touches, except data and stack", 0),
    Shown::new("pages", "pages that a call touches, except data and stack", 0),
];

pub(crate) const TABLE: Table = Table::new("map_counts", "mode", SHOWN, work).once();

/// Measured calls, in the order of the module's marks. Each entry contains the mapped object, the direction, and the number of
/// mapped pages. The module uses one mark for the mapping and one mark for the unmapping of each entry. The first entry maps
/// nothing. Its cost is subtracted from the cost of the other entries.
const CALLS: [(&str, &str, u32); 5] = [
    ("nothing", "", 0),
    ("page", "to the device", 1),
    ("page", "from the device", 1),
    ("list", "to the device", 4),
    ("list", "from the device", 4),
];

/// Number of counted calls of each kind.
const COUNTED: u64 = 1000;

/// Kinds of counts.
const WHATS: [&str; 4] = ["instructions", "locked", "lines", "pages"];

const PAGE: f64 = 4096.0;
const LINE: f64 = 64.0;

/// Guests of the table. No guest uses strict mode, because the instruction count of strict mode depends on the host's speed. The
/// guests have two CPUs, because a kernel with one CPU replaces the lock prefixes of its instructions. The emulator could then
/// count no locked operations.
static GUESTS: Guests = Guests {
    modes: [(NO_VIOMMU, Kernel::ModularStock), (BOUNCE, Kernel::Modular), (GUEST_PAGES, Kernel::Modular)],
    cpus: 2,
    module: "dma_map_counts",
    jobs: [JOB, AFTER],
    estimate: Duration::from_secs(60),
    measured,
};

/// Shell lines that count the mappings that have bounced so far.
const JOB: &str = r#"
bounced() {
    cat /sys/kernel/debug/iommu_bounce/*/stats 2>/dev/null | awk '/^bounced_/ { n += $2 } END { printf "%d\n", n }'
}
before=$(bounced)
"#;

/// Shell lines that print the number of mappings that have bounced since [`JOB`].
const AFTER: &str = r#"
echo "CAROM-BOUNCED $(($(bounced) - before))"
"#;

fn work(_: Scope, site: &Site) -> Vec<Work> {
    GUESTS.work(site)
}

fn measured(outcome: &Outcome, mode: &Mode, counts: Option<&Counts>) -> Result<Measured> {
    let counts = counts.context("this table needs a rig that counts instructions")?;
    let bounced: u64 =
        outcome.value("CAROM-BOUNCED")?.parse().context("CAROM-BOUNCED in the console is not a number")?;
    let bounces = mode.iommu;
    ensure!(
        (bounced >= COUNTED * 4) == bounces,
        "{bounced} mappings of the edu device bounced; all must bounce in a mode with an IOMMU, and none in other modes"
    );
    let mut rows = Vec::new();
    for (place, (what, direction, data)) in CALLS.into_iter().enumerate().skip(1) {
        for (unmaps, call) in ["map", "unmap"].into_iter().enumerate() {
            // The map call copies data for the device, and the unmap call copies data from the device. A copy touches both the
            // buffer and the slot.
            let copied = bounces && (unmaps == 1) == (direction == "from the device");
            let data = if copied { 2.0 * f64::from(data) } else { 0.0 };
            let of: [(&str, serde_json::Value); 4] = [
                ("mode", mode.name.into()),
                ("call", call.into()),
                ("what", what.into()),
                ("direction", direction.into()),
            ];
            let mut row = Row::new(of, []);
            for figure in WHATS {
                let count = |place: usize| counted::median(counts, FIRST_END + 2 * place + unmaps, figure);
                let of_data = match figure {
                    "lines" => data * PAGE / LINE,
                    "pages" => data,
                    _ => 0.0,
                };
                row.figures.insert(figure.into(), count(place)? - count(0)? - of_data);
            }
            rows.push(row);
        }
    }
    Measured::of(outcome, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(bounced: u32) -> Outcome {
        let console = format!("CAROM-FIO-VERSION fio-3.33\nCAROM-KERNEL 6.12\nCAROM-BOUNCED {bounced}\n");
        Outcome { console, ..Outcome::default() }
    }

    /// Returns counts: 10 for the first call, which maps nothing, and 1000 for each other call.
    fn counts() -> Counts {
        let of =
            |number: usize| WHATS.map(|what| ((number, what.into()), if number < FIRST_END + 2 { 10 } else { 1000 }));
        (FIRST_END..FIRST_END + 10).flat_map(of).collect()
    }

    #[test]
    fn cost_of_the_empty_call_and_of_data_is_subtracted() {
        let found = measured(&outcome(4000), &BOUNCE, Some(&counts())).unwrap();

        let lines: Vec<f64> = found.rows.iter().map(|row| row.figures["lines"]).collect();
        assert_eq!(lines, [862.0, 990.0, 990.0, 862.0, 478.0, 990.0, 990.0, 478.0]);
        assert_eq!(found.rows[0].figures["pages"], 988.0);
        assert!(found.rows.iter().all(|row| row.figures["instructions"] == 990.0 && row.figures["locked"] == 990.0));
        assert_eq!(found.rows[1].key("call").unwrap(), "unmap");
    }

    #[test]
    fn bounce_count_must_fit_the_mode_and_zero_subtracts_no_data() {
        assert!(measured(&outcome(3999), &BOUNCE, Some(&counts())).is_err());
        assert!(measured(&outcome(4000), &NO_VIOMMU, Some(&counts())).is_err());
        let found = measured(&outcome(0), &NO_VIOMMU, Some(&counts())).unwrap();
        assert!(found.rows.iter().all(|row| row.figures["lines"] == 990.0));
        assert!(measured(&outcome(0), &NO_VIOMMU, Some(&Counts::new())).is_err());
    }
}
