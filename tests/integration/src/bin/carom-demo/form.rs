// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the forms of the demo have in common: each runs guests of some configurations, reads figures from what they print,
//! and shows them in tables.

use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::workload::{self, PRINT_VERSIONS, WAIT_FOR_NVME};
use carom_integration::{Outcome, Site};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::plan::{self, Options, Plan, Step};
use crate::results::{Config, Configs, Machine, Results};
use crate::samples::{Measured, Samples};

/// A form of the demo, as the figures that it has of one guest.
pub(crate) trait Form: Clone + Serialize + DeserializeOwned {
    /// Figures of one configuration.
    type Summary;

    /// How long a guest may take.
    const TIME_LIMIT: Duration;
    /// Whether some configurations are also measured with two jobs.
    const TWO_JOBS: bool;
    /// Whether guests get a CPU for themselves ([`carom_integration::Guest::vcpus_apart`]).
    const VCPUS_APART: bool;
    /// What fio does, for the report.
    const FIO: &'static str;

    /// Whether the configuration is measured unless others are asked for.
    fn is_usual(plan: &Plan, site: &Site) -> bool;

    /// The guest's job, once its drive is there.
    fn job(step: &Step, quick: bool) -> String;

    /// Reads what the job printed.
    ///
    /// # Errors
    /// A figure is missing, or the guest did not do what its configuration says.
    fn read(step: &Step, outcome: &Outcome) -> Result<Self>;

    /// Puts the figures of a configuration's guests together, which have one job each, or two. `None` where some are missing
    /// that there must be.
    fn summary(one_job: &[&Self], two_jobs: &[&Self]) -> Option<Self::Summary>;

    /// The results' field of this form.
    fn field(configs: Vec<Config<Self::Summary>>) -> Configs;

    /// The report's tables, and an empty line or more lines behind them.
    fn tables(configs: &[Config<Self::Summary>], machine: &Machine) -> String;
}

/// Runs the configurations, or only those named, and collects their figures.
pub(crate) fn run<F: Form>(options: Options<'_>) -> Result<Results> {
    plan::check_names(options.only)?;
    let site = Site::from_env()?;
    let mut samples: Samples<F> = Samples::open(options.samples)?;
    let steps = plan::steps(&options, |plan| F::is_usual(plan, &site), F::TWO_JOBS);
    plan::run_steps(&steps, &mut samples, |step| measure(step, &site, options.quick))?;
    let machine = plan::machine(&site, options.host)?;
    Ok(Results::new(machine, plan::versions(&site)?, options.quick, options.rounds, &samples.all))
}

fn measure<F: Form>(step: &Step, site: &Site, quick: bool) -> Result<Measured<F>> {
    let job = format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{}", F::job(step, quick));
    let mut guest = step.guest(site).time_limit(F::TIME_LIMIT).job(&job);
    if F::VCPUS_APART {
        guest = guest.vcpus_apart();
    }
    let outcome = guest.run(site)?;
    ensure!(outcome.job_status == 0, "the job ended with status {}; console:\n{}", outcome.job_status, outcome.console);
    Ok(Measured {
        figures: F::read(step, &outcome)?,
        versions: workload::guest_versions(&outcome)?,
        retries: outcome.retries,
    })
}
