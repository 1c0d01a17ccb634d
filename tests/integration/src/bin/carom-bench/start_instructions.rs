// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Instructions that the emulated machine executes from a VMM's start to its guest's first program. The count includes the guest,
//! the VMM and the host's kernel.

use std::time::Duration;

use anyhow::{Context, Result};
use carom_integration::workload::PRINT_VERSIONS;
use carom_integration::{Outcome, Site};

use crate::table::{self, Measured, Row, Scope, Shown, Table, Work, figure};
use crate::vmm::Started;

const SHOWN: &[Shown] = &[
    Shown::new("instructions", "instructions of the whole machine until the guest's first program", 0),
    Shown::new("exits", "exits until the guest's first program", 0),
];

pub(crate) const TABLE: Table = Table::new("start_instructions", "vmm", SHOWN, work);

/// Estimated duration of a guest. The emulator counts during the whole time, which slows the guest down.
const ESTIMATE: Duration = Duration::from_secs(20);

fn work(_: Scope, site: &Site) -> Vec<Work> {
    let of = |started: Started| Work {
        name: started.name(),
        estimate: ESTIMATE,
        run: Box::new(move |site, name| measure(started, site, name)),
    };
    // An emulated machine without an edu device does not count instructions.
    let there = if site.edu.is_some() { Started::all(site) } else { Vec::new() };
    there.into_iter().map(of).collect()
}

fn measure(started: Started, site: &Site, name: &str) -> Result<Measured> {
    site.instructions.as_ref().context("this table needs a rig that counts instructions")?;
    let dir =
        tempfile::tempdir().context("cannot create a temporary directory for the files of the guest's devices")?;
    let outcome =
        table::run(started.guest(site, name, PRINT_VERSIONS, dir.path())?.cmdline("PROBE=begun"), ESTIMATE, site)?;
    Measured::of(&outcome, vec![Row::new(started.keys(), figures(&outcome)?)])
}

fn figures(outcome: &Outcome) -> Result<[(&'static str, f64); 2]> {
    let begun = outcome.probes.first().context("the console has no CAROM-PROBE line")?;
    let reported = outcome.executed_at_start.zip(begun.executed);
    let (before, until) = reported.context("the emulator reported no instruction count")?;
    let exits = begun.kvm.get("exits").context("cannot read KVM's exit counter in debugfs")?;
    Ok([("instructions", figure(until.saturating_sub(before))), ("exits", figure(*exits))])
}

#[cfg(test)]
mod tests {
    use carom_integration::Probe;

    use super::*;

    /// Returns the outcome of a start. The machine has executed `before` instructions at the VMM's start, and `until` instructions
    /// at the start of the guest's first program.
    fn outcome(before: Option<u64>, until: Option<u64>, exits: &[(&str, u64)]) -> Outcome {
        let kvm = exits.iter().map(|(name, count)| ((*name).into(), *count)).collect();
        let probe = Probe { executed: until, kvm, ..Probe::default() };
        Outcome { executed_at_start: before, probes: vec![probe], ..Outcome::default() }
    }

    #[test]
    fn instructions_before_the_start_do_not_count() {
        let [instructions, exits] = figures(&outcome(Some(1000), Some(5000), &[("exits", 7)])).unwrap();
        assert_eq!(instructions.0, "instructions");
        assert!((instructions.1 - 4000.0).abs() < 1e-9 && (exits.1 - 7.0).abs() < 1e-9, "{instructions:?}, {exits:?}");
    }

    #[test]
    fn error_of_a_start_names_the_missing_counts() {
        let error = |outcome: &Outcome| figures(outcome).unwrap_err().to_string();
        let exits = [("exits", 7)];
        assert!(error(&outcome(None, Some(5000), &exits)).contains("emulator"));
        assert!(error(&outcome(Some(1000), None, &exits)).contains("emulator"));
        assert!(error(&outcome(Some(1000), Some(5000), &[])).contains("exit counter"));
        assert!(error(&Outcome::default()).contains("no CAROM-PROBE"));
    }
}
