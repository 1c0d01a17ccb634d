// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A run of one form of the demo: runs the guests and collects their figures.

use std::marker::PhantomData;
use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::Site;
use carom_integration::measure::journal;
use carom_integration::measure::machine::{self, Machine};
use carom_integration::workload::{self, PRINT_VERSIONS, WAIT_FOR_NVME};

use crate::demo::config::Config;
use crate::demo::form::Form;
use crate::demo::plan::{self, Options, Step};
use crate::demo::results::{Configs, Results};
use crate::demo::samples::{Key, Measured, Sample, Samples};

/// Runs the guests of the selected configurations, or of the default configurations if none is selected. Returns their figures.
pub(crate) fn run<F: Form>(options: Options<'_>) -> Result<Results>
where
    Configs: From<Vec<Config<F::Summary>>>,
{
    let site = Site::from_env()?;
    let mut samples: Samples<F> = Samples::open(options.samples)?;
    let steps: Vec<StepOf<F>> = plan::steps(&options, |mode| F::is_usual(mode, &site), F::TWO_JOBS)
        .into_iter()
        .map(|step| StepOf { step, form: PhantomData })
        .collect();
    samples.measure(&steps, |of| measure(&of.step, &site, options.quick))?;
    let machine = Machine::here(&site, options.host, plan::GUEST_RAM_BYTES)?;
    Ok(Results::new(machine, machine::versions(&site)?, options.quick, options.rounds, &samples.all))
}

/// Guest to measure in the form `F`.
struct StepOf<F> {
    step: Step,
    form: PhantomData<F>,
}

impl<F: Form> journal::Step for StepOf<F> {
    type Sample = Sample<F>;

    fn key(&self) -> Key {
        Key { name: self.step.mode.name.into(), round: self.step.round, two_jobs: self.step.two_jobs }
    }

    fn label(&self) -> String {
        format!("{}{}", self.step.mode.name, if self.step.two_jobs { ", 2 jobs on 2 vCPUs" } else { "" })
    }

    fn estimate(&self) -> Duration {
        F::ESTIMATE
    }
}

fn measure<F: Form>(step: &Step, site: &Site, quick: bool) -> Result<Sample<F>> {
    let job = format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{}", F::job(step, quick));
    let mut guest = step.guest(site).time_limit(F::TIME_LIMIT).job(&job);
    if F::VCPUS_APART {
        guest = guest.vcpus_apart();
    }
    let outcome = guest.run(site)?;
    ensure!(outcome.job_status == 0, "the job ended with status {}; console:\n{}", outcome.job_status, outcome.console);
    let measured = Measured {
        figures: F::read(step, &outcome)?,
        versions: workload::guest_versions(&outcome)?,
        retries: outcome.retries,
    };
    Ok(Sample { name: step.mode.name.into(), round: step.round, two_jobs: step.two_jobs, measured: Ok(measured) })
}
