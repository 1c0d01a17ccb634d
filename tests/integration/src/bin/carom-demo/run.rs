// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One run of a form of the demo: guest after guest, and their figures put together.

use anyhow::{Result, ensure};
use carom_integration::Site;
use carom_integration::workload::{self, PRINT_VERSIONS, WAIT_FOR_NVME};

use crate::config::Config;
use crate::form::Form;
use crate::plan::{self, Options, Step};
use crate::results::{Configs, Results};
use crate::samples::{Measured, Samples};

/// Runs the configurations, or only those named, and collects their figures.
pub(crate) fn run<F: Form>(options: Options<'_>) -> Result<Results>
where
    Configs: From<Vec<Config<F::Summary>>>,
{
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
