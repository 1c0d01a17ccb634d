// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that the demo runs.

use std::path::Path;

use carom_integration::measure::mode::{MODES, Mode};
use carom_integration::{Guest, Site};
use carom_tools::demo::CONFIGURATIONS;

/// RAM of each guest. The project's goal for pinned memory applies to guests of this size.
const GUEST_RAM_MIB: u32 = 2048;

/// RAM of each guest, in bytes.
pub(crate) const GUEST_RAM_BYTES: u64 = (GUEST_RAM_MIB as u64) << 20;

/// Modes that the full run also measures with two jobs on two vCPUs.
const WITH_TWO_JOBS: [&str; 2] = ["bounce", "strict"];

/// Guest to measure.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) mode: &'static Mode,
    pub(crate) round: u32,
    pub(crate) two_jobs: bool,
}

/// Options of a run.
#[derive(Debug)]
pub(crate) struct Options<'text> {
    /// True for shorter measurements.
    pub(crate) quick: bool,
    /// Rounds per configuration.
    pub(crate) rounds: u32,
    /// Names of the configurations to measure. Empty for the configurations that the form measures by default.
    pub(crate) only: &'text [String],
    /// Description of the machine.
    pub(crate) host: String,
    /// File of the samples.
    pub(crate) samples: &'text Path,
}

/// Returns the guests of a run. Each round has one guest of each selected configuration, or of each `usual` configuration if none
/// is selected. With `two_jobs`, a full run also has guests with two jobs for some configurations. All configurations finish a
/// round before the next round starts, so that changes of the machine's speed affect all configurations.
pub(crate) fn steps(options: &Options<'_>, usual: impl Fn(&Mode) -> bool, two_jobs: bool) -> Vec<Step> {
    let Options { quick, rounds, only, .. } = *options;
    let wanted = |mode: &&Mode| if only.is_empty() { usual(mode) } else { only.iter().any(|name| name == mode.name) };
    let modes: Vec<&'static Mode> =
        MODES.iter().filter(|mode| CONFIGURATIONS.contains(&mode.name)).filter(wanted).collect();
    let both = |mode: &&Mode| two_jobs && !quick && WITH_TWO_JOBS.contains(&mode.name);
    let step = |round: u32, two_jobs: bool| move |mode| Step { mode, round, two_jobs };
    (0..rounds)
        .flat_map(|round| {
            let single = modes.iter().copied().map(step(round, false));
            single.chain(modes.iter().copied().filter(both).map(step(round, true))).collect::<Vec<_>>()
        })
        .collect()
}

impl Step {
    /// Returns the guest, without a job.
    pub(crate) fn guest(&self, site: &Site) -> Guest {
        let suffix = if self.two_jobs { "-2" } else { "" };
        let guest = self.mode.guest(site, &format!("demo-{}{suffix}-{}", self.mode.name, self.round));
        guest.memory_mib(GUEST_RAM_MIB).cpus(if self.two_jobs { 2 } else { 1 })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_configurations_are_modes() {
        let modes: BTreeSet<&str> = MODES.iter().map(|mode| mode.name).collect();
        assert!(modes.is_superset(&CONFIGURATIONS.into()));
    }
}
