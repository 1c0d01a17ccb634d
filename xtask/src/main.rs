// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Program that the scripts run. Each script is a subcommand with its name. Help texts are in `help/NAME.txt`; the scripts show
//! them without building anything.

use std::process::ExitCode;

use anyhow::Result;
use carom_tools::progress::Progress;
use carom_tools::signals::Signals;
use carom_tools::{Tools, Usage, bench, check, demo, initramfs, kernel, package, series, test, vm};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "scripts", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    #[command(override_help = include_str!("help/bench.txt"))]
    Bench(bench::Options),
    #[command(override_help = include_str!("help/demo.txt"))]
    Demo(demo::Options),
    #[command(override_help = include_str!("help/test.txt"))]
    Test(test::Options),
    #[command(override_help = include_str!("help/guest-kernel.txt"))]
    GuestKernel(kernel::Options),
    #[command(override_help = include_str!("help/guest-check.txt"))]
    GuestCheck(check::Options),
    #[command(override_help = include_str!("help/guest-series.txt"))]
    GuestSeries(series::Options),
    #[command(override_help = include_str!("help/guest-initramfs.txt"))]
    GuestInitramfs(initramfs::GuestInitramfs),
    #[command(override_help = include_str!("help/package.txt"))]
    Package(package::Options),
    #[command(override_help = include_str!("help/vm.txt"))]
    Vm(vm::Options),
}

fn main() -> ExitCode {
    let matches = Arguments::command().get_matches();
    let action = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).action;
    let name = matches.subcommand_name().unwrap_or_default();
    let progress = Progress::new(name);
    let signals = match Signals::catch() {
        Ok(signals) => signals,
        Err(error) => {
            progress.say(&format!("{error:#}"));
            return ExitCode::FAILURE;
        }
    };
    let done = Tools::new(&signals, &progress).and_then(|tools| act(&action, &tools));
    match (signals.caught(), done) {
        (Some(signal), _) => ExitCode::from(128 + signal),
        (None, Ok(code)) => code,
        (None, Err(error)) if error.is::<Usage>() => {
            progress.say(&format!("{error:#} (try '{name} --help')"));
            ExitCode::from(2)
        }
        (None, Err(error)) => {
            progress.say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn act(action: &Action, tools: &Tools) -> Result<ExitCode> {
    match action {
        Action::Vm(options) => return tools.vm(options).map(ExitCode::from),
        Action::Bench(options) => return tools.bench(options).map(ExitCode::from),
        Action::Demo(options) => return tools.demo(options).map(ExitCode::from),
        Action::Test(options) if !tools.test(options)? => return Ok(ExitCode::FAILURE),
        Action::Test(_) => {}
        Action::GuestKernel(options) => match tools.print_guest_kernel(options)? {
            Some(path) => println!("{}", path.display()),
            None => return Ok(ExitCode::FAILURE),
        },
        Action::GuestCheck(options) => tools.guest_check(options)?,
        Action::GuestSeries(options) => tools.guest_series(options)?,
        Action::Package(options) => println!("{}", tools.package(options)?.display()),
        Action::GuestInitramfs(options) => println!("{}", tools.guest_initramfs(options)?.display()),
    }
    Ok(ExitCode::SUCCESS)
}
