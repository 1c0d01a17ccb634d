// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The demo's results as text: tables in Markdown, so that they can stand in a document as they are.

use std::fmt::Write;

use crate::config::Config;
use crate::form::Form;
use crate::map_time::MapTimes;
use crate::patterns::PatternFigures;
use crate::plain::Plain;
use crate::results::{Configs, Results};

/// The report on `results`.
pub(crate) fn table(results: &Results) -> String {
    match &results.configs {
        Configs::Plain(configs) => table_of::<Plain>(results, configs),
        Configs::Patterns(configs) => table_of::<PatternFigures>(results, configs),
        Configs::MapTimes(configs) => table_of::<MapTimes>(results, configs),
    }
}

fn table_of<F: Form>(results: &Results, configs: &[Config<F::Summary>]) -> String {
    let machine = &results.machine;
    let versions: Vec<String> = results.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let rounds = match (results.rounds, results.quick) {
        (1, None) => "; one round".into(),
        (1, Some(true)) => " (quick run)".into(),
        (1, Some(false)) => String::new(),
        (rounds, _) => format!("; medians of {rounds} interleaved rounds"),
    };
    let mut text = format!(
        "Machine: {}; rig: {}; {}\nVersions: {}\nGuests: {} MiB of RAM, NVMe by passthrough; fio: {}{rounds}\n",
        machine.host,
        machine.rig,
        machine.kernel,
        versions.join("; "),
        machine.guest_ram_bytes >> 20,
        F::FIO,
    );
    text += &F::tables(configs, machine);
    let retries: u32 = configs.iter().map(|config| config.retries).sum();
    // Writing to a String does not fail.
    let _ = writeln!(text, "Guests that were started again: {retries}");
    for failure in &results.failures {
        let _ = writeln!(text, "FAILED: {failure}");
    }
    text
}
