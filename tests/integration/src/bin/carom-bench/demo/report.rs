// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of the demo as text. The tables are Markdown, so they can be copied into a document.

use crate::demo::config::Config;
use crate::demo::form::Form;
use crate::demo::map_time::MapTimes;
use crate::demo::patterns::PatternFigures;
use crate::demo::plain::Plain;
use crate::demo::results::{Configs, Results};
use crate::report::{head, tail};

/// Returns the report on `results`.
pub(crate) fn table(results: &Results) -> String {
    match &results.configs {
        Configs::Plain(configs) => table_of::<Plain>(results, configs),
        Configs::Patterns(configs) => table_of::<PatternFigures>(results, configs),
        Configs::MapTimes(configs) => table_of::<MapTimes>(results, configs),
    }
}

fn table_of<F: Form>(results: &Results, configs: &[Config<F::Summary>]) -> String {
    let rounds = match (results.rounds, results.quick) {
        (1, None) => "; one round".into(),
        (1, Some(true)) => " (quick run)".into(),
        (1, Some(false)) => String::new(),
        (rounds, _) => format!("; medians of {rounds} rounds"),
    };
    let mib = results.machine.guest_ram_bytes >> 20;
    let guests = format!("Guests: {mib} MiB of RAM, NVMe by passthrough; fio: {}{rounds}\n", F::FIO);
    let tables = F::tables(configs, &results.machine);
    let retries = configs.iter().map(|config| config.retries).sum();
    head(&results.machine, &results.versions) + &guests + &tables + &tail(retries, &results.failures)
}
