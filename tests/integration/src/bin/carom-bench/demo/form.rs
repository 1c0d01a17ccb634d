// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Interface of the demo's forms. A form is a kind of measurement. It runs guests of some configurations, parses the guests'
//! figures, and shows the figures in tables.

use std::time::Duration;

use anyhow::Result;
use carom_integration::measure::machine::Machine;
use carom_integration::measure::mode::Mode;
use carom_integration::{Outcome, Site};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::demo::config::Config;
use crate::demo::plan::Step;

/// Kind of measurement in the demo. A value of an implementing type contains the figures of one guest.
pub(crate) trait Form: Clone + Serialize + DeserializeOwned {
    /// Figures of one configuration.
    type Summary;

    /// Estimated duration of a guest.
    const ESTIMATE: Duration;
    /// Maximum duration of a guest.
    const TIME_LIMIT: Duration;
    /// True if some configurations are also measured with two jobs.
    const TWO_JOBS: bool = false;
    /// True if the guest's vCPU threads are kept apart from other work ([`carom_integration::Guest::vcpus_apart`]).
    const VCPUS_APART: bool = false;
    /// Description of fio's work, for the report.
    const FIO: &'static str;

    /// True if the configuration is measured by default.
    fn is_usual(mode: &Mode, site: &Site) -> bool;

    /// Returns the guest's job, which runs after the drive has become available.
    fn job(step: &Step, quick: bool) -> String;

    /// Parses the output of the job.
    ///
    /// # Errors
    /// Fails if a figure is missing, or if the VMM's counters do not fit the guest's configuration.
    fn read(step: &Step, outcome: &Outcome) -> Result<Self>;

    /// Summarizes the figures of a configuration's guests with one job and with two jobs. Returns `None` if a required figure is
    /// missing.
    fn summary(one_job: &[&Self], two_jobs: &[&Self]) -> Option<Self::Summary>;

    /// Returns the tables of the report, and the lines that follow the tables.
    fn tables(configs: &[Config<Self::Summary>], machine: &Machine) -> String;
}
