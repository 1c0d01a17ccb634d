// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Options of Cloud Hypervisor that Carom does not support. Carom rejects such an option with an error that names the alternative.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};

use crate::unsupported::UNSUPPORTED;

/// Unsupported option.
struct Refused {
    /// Name without dashes.
    name: &'static str,
    /// Neutral value, if the option has one. A neutral value requests no feature.
    neutral: Option<&'static str>,
    /// Alternative that the error names: a text, or the path of an entry of [`UNSUPPORTED`] that has the text.
    instead: Instead,
}

enum Instead {
    Field(&'static str),
    Text(&'static str),
}

const fn of_field(name: &'static str, path: &'static str) -> Refused {
    Refused { name, neutral: None, instead: Instead::Field(path) }
}

const fn alone(name: &'static str, instead: &'static str) -> Refused {
    Refused { name, neutral: None, instead: Instead::Text(instead) }
}

const NO_DBUS: &str = "use the REST API on a socket (--api-socket)";

static REFUSED: &[Refused] = &[
    alone("dbus-object-path", NO_DBUS),
    alone("dbus-service-name", NO_DBUS),
    alone("dbus-system-bus", NO_DBUS),
    Refused { neutral: Some("off"), ..of_field("debug-console", "debug_console") },
    of_field("fw-cfg-config", "payload.fw_cfg_config"),
    of_field("gdb", "gdb"),
    of_field("generic-vhost-user", "generic_vhost_user"),
    of_field("host-data", "payload.host_data"),
    of_field("igvm", "payload.igvm"),
    of_field("ivshmem", "ivshmem"),
    alone("log-format", "a log line always has the time, the level and the message"),
    of_field("pvmemcontrol", "pvmemcontrol"),
    of_field("rtc", "rtc"),
    of_field("tpm", "tpm"),
    of_field("vdpa", "vdpa"),
];

impl Refused {
    fn instead(&self) -> &'static str {
        match self.instead {
            Instead::Text(text) => text,
            Instead::Field(path) => {
                UNSUPPORTED.iter().find(|field| field.path == path).map_or("", |field| field.instead)
            }
        }
    }

    /// Returns the message that names the option and its alternative.
    fn rule(&self) -> String {
        let instead = self.instead();
        let rule = if instead.is_empty() { String::new() } else { format!(": {instead}") };
        format!("--{} is not supported{rule}", self.name)
    }

    /// True if all `values` are neutral.
    fn is_neutral<'a>(&self, mut values: impl Iterator<Item = &'a str>) -> bool {
        self.neutral.is_some_and(|neutral| values.all(|value| value.split(',').next() == Some(neutral)))
    }
}

/// Returns an error that names all options in `refused`, or `None` if `refused` is empty.
fn error(refused: impl Iterator<Item = &'static Refused>) -> Option<Error> {
    let rules: Vec<String> = refused.map(Refused::rule).collect();
    (!rules.is_empty()).then(|| Error::raw(ErrorKind::UnknownArgument, rules.join("; ")))
}

/// Finds unsupported options in a command line that has other mistakes. Every word that begins with two dashes counts as an option,
/// because no option takes a value that begins with two dashes.
pub(super) fn find(arguments: &[OsString]) -> Option<Error> {
    let words: Vec<&str> = arguments.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    let given = |option: &&Refused| {
        words.iter().enumerate().any(|(place, word)| {
            let Some(rest) = word.strip_prefix("--").and_then(|word| word.strip_prefix(option.name)) else {
                return false;
            };
            match rest.strip_prefix('=') {
                Some(value) => !option.is_neutral(std::iter::once(value)),
                None if rest.is_empty() => {
                    let values = words[place + 1..].iter().copied();
                    let mut values = values.take_while(|word| !word.starts_with('-')).peekable();
                    values.peek().is_none() || !option.is_neutral(values)
                }
                None => false,
            }
        })
    };
    error(REFUSED.iter().filter(given))
}

/// Names of the unsupported options, without dashes.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    REFUSED.iter().map(|option| option.name)
}

/// Proof that no unsupported option was given, except with its neutral value.
#[derive(Debug)]
pub(super) struct RefusedOptions;

impl Args for RefusedOptions {
    fn augment_args(command: Command) -> Command {
        command.args(
            REFUSED.iter().map(|option| {
                Arg::new(option.name).long(option.name).num_args(0..).action(ArgAction::Append).hide(true)
            }),
        )
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for RefusedOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = |option: &&Refused| {
            matches.contains_id(option.name)
                && !matches
                    .get_many::<String>(option.name)
                    .is_some_and(|values| option.is_neutral(values.map(String::as_str)))
        };
        error(REFUSED.iter().filter(given)).map_or(Ok(Self), Err)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::kinds::KINDS;

    #[test]
    fn refused_option_is_unique_and_its_field_is_known() {
        let mut seen: BTreeSet<_> = KINDS.iter().map(|kind| kind.field.option().trim_start_matches("--")).collect();
        for option in REFUSED {
            assert!(seen.insert(option.name), "{}", option.name);
            if let Instead::Field(path) = option.instead {
                assert!(UNSUPPORTED.iter().any(|field| field.path == path), "{path}");
            }
        }
    }

    #[test]
    fn every_unsupported_config_field_has_a_refused_option() {
        // Cloud Hypervisor has no option for the field `iommu`.
        let others = ["iommu"];
        let fields: BTreeSet<_> = REFUSED
            .iter()
            .filter_map(|option| if let Instead::Field(path) = option.instead { Some(path) } else { None })
            .chain(others)
            .collect();
        for field in UNSUPPORTED.iter().filter(|field| !field.path.contains('.')) {
            assert!(fields.contains(field.path), "{}", field.path);
        }
    }
}
