// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Options of all device kinds, generated from the registry.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};

use crate::kinds::{KINDS, Kind, Number, PartConfig};

/// Devices that the command line configures.
#[derive(Debug)]
pub(super) struct PartArguments(pub(super) Vec<PartConfig>);

impl Args for PartArguments {
    fn augment_args(command: Command) -> Command {
        command.args(KINDS.iter().map(|kind| argument(kind)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for PartArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = KINDS.iter().filter_map(|kind| matches.get_many::<PartConfig>(kind.name));
        Ok(Self(given.flatten().cloned().collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Returns the command line option for devices of `kind`.
fn argument(kind: &'static Kind) -> Arg {
    let option = kind.field.option().trim_start_matches("--");
    let argument =
        Arg::new(kind.name).long(option).value_name(kind.value).value_parser(move |text: &str| kind.parse(text));
    let argument = match kind.number {
        Number::Many => argument
            .help(format!("{}. Can be given several times", kind.help()))
            .action(ArgAction::Append)
            .num_args(1..),
        Number::One => argument.help(kind.help()),
    };
    match kind.bare {
        Some(bare) => argument.num_args(0..=1).default_missing_value(bare),
        None => argument,
    }
}
