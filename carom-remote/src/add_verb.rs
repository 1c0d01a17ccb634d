// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Verbs that add devices, one for each kind that can be hot-plugged. The verbs are generated from the registry of kinds.

use carom_api::ConfigError;
use carom_api::kinds::{Add, KINDS, Kind, PartConfig};
use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, Command, Error, FromArgMatches, Subcommand};

/// Verb that adds a device.
#[derive(Debug)]
pub(crate) struct AddVerb {
    /// Name of the operation.
    pub(crate) operation: &'static str,
    /// Body of the request.
    pub(crate) device: Box<PartConfig>,
}

fn verbs() -> impl Iterator<Item = (&'static Kind, &'static Add)> {
    KINDS.iter().filter_map(|kind| Some((*kind, kind.add.as_ref()?)))
}

/// Parses the configuration of a device. Rejects the numbers of file descriptors, because they have no meaning in the VMM's process.
fn parse(kind: &'static Kind, text: &str) -> Result<PartConfig, ConfigError> {
    let part = kind.parse(text)?;
    if part.inherited().is_empty() {
        return Ok(part);
    }
    let rule = "works only on the command line of carom: carom-remote cannot pass descriptors, so send them with an API request (SCM_RIGHTS) instead";
    Err(ConfigError::new(kind.field.key("fd"), rule))
}

impl Subcommand for AddVerb {
    fn augment_subcommands(command: Command) -> Command {
        command.subcommands(verbs().map(|(kind, add)| {
            let value = Arg::new("device").help("The device").required(true).value_name("DEVICE");
            Command::new(add.verb())
                .about(kind.help_of_verb(add))
                .arg(value.value_parser(move |text: &str| parse(kind, text)))
        }))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        verbs().any(|(_, add)| add.verb() == name)
    }
}

impl FromArgMatches for AddVerb {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = matches.subcommand().and_then(|(name, arguments)| {
            let (_, add) = verbs().find(|(_, add)| add.verb() == name)?;
            let device = Box::new(arguments.get_one::<PartConfig>("device")?.clone());
            Some(Self { operation: add.operation, device })
        });
        given.ok_or_else(|| Error::new(ErrorKind::InvalidSubcommand))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
