// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--log-format`: what a line of the log is made of, in Cloud Hypervisor's syntax.

use std::str::FromStr;

use crate::error::ConfigError;
use crate::field::Field;

/// A part of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogPart {
    /// This text.
    Text(String),
    /// Seconds since the program started, with six decimals.
    BootTime,
    /// Time of day by RFC 3339, in UTC, with six decimals.
    WallClock,
    /// Time of day in this zone as `strftime` writes it.
    Time(LogZone, &'static str),
    /// Process ID.
    Pid,
    /// Thread ID of the kernel.
    Tid,
    /// Name of the thread.
    Thread,
    /// Level as a word.
    Level,
    /// First letter of the level.
    LevelLetter,
    /// File and line.
    Location,
    /// The message.
    Message,
}

/// Whose time of day it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogZone {
    /// UTC.
    Utc,
    /// The system's.
    Local,
}

/// What a line of the log is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFormat(pub Vec<LogPart>);

impl LogFormat {
    /// The option.
    pub const OPTION: Field = Field::only("--log-format");
}

/// The part that `{name}` stands for.
fn part(name: &str) -> Option<LogPart> {
    Some(match name {
        "boottime" => LogPart::BootTime,
        "wallclock" => LogPart::WallClock,
        "pid" => LogPart::Pid,
        "tid" => LogPart::Tid,
        "thread" => LogPart::Thread,
        "level" => LogPart::Level,
        "levelchar" => LogPart::LevelLetter,
        "location" => LogPart::Location,
        "msg" => LogPart::Message,
        _ => {
            let (zone, name) = name.strip_prefix("local").map_or((LogZone::Utc, name), |rest| (LogZone::Local, rest));
            LogPart::Time(zone, time(name)?)
        }
    })
}

/// The form for `strftime` of a time of day, which `local` may stand before.
fn time(name: &str) -> Option<&'static str> {
    Some(match name {
        "glog" => "%m%d %H:%M:%S%.6f",
        "year" => "%Y",
        "month" => "%m",
        "day" => "%d",
        "hour" => "%H",
        "minute" => "%M",
        "second" => "%S",
        "micros" => "%6f",
        "offset" => "%:z",
        _ => return None,
    })
}

impl FromStr for LogFormat {
    type Err = ConfigError;

    /// Parses text with `{token}`s in it; `{{` and `}}` are braces.
    fn from_str(format: &str) -> Result<Self, ConfigError> {
        let wrong = |rule: &str| Err(ConfigError::new(Self::OPTION, format!("in '{format}', {rule}")));
        let mut parts = Vec::new();
        let mut text = String::new();
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            let (before, from) = rest.split_at(at);
            text.push_str(before);
            let brace = &from[..1];
            if let Some(after) = from[1..].strip_prefix(brace) {
                text.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return wrong("a '}' closes nothing; '}}' stands for one");
            }
            let Some((name, after)) = from[1..].split_once('}') else {
                return wrong("a '{' is not closed; '{{' stands for one");
            };
            let Some(part) = part(name) else {
                return wrong(&format!(
                    "'{{{name}}}' is no token, such as {{wallclock}}, {{level}}, {{location}}, {{msg}}"
                ));
            };
            if !text.is_empty() {
                parts.push(LogPart::Text(std::mem::take(&mut text)));
            }
            parts.push(part);
            rest = after;
        }
        text.push_str(rest);
        if !text.is_empty() {
            parts.push(LogPart::Text(text));
        }
        Ok(Self(parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_tokens_and_doubled_braces_are_read() {
        let text = |text: &str| LogPart::Text(text.into());
        for (format, parts) in [
            ("", vec![]),
            ("a{{b}}", vec![text("a{b}")]),
            ("{{{level}}}", vec![text("{"), LogPart::Level, text("}")]),
            ("{level}{msg}", vec![LogPart::Level, LogPart::Message]),
            (
                "{localhour}:{hour}{localglog}",
                vec![
                    LogPart::Time(LogZone::Local, "%H"),
                    text(":"),
                    LogPart::Time(LogZone::Utc, "%H"),
                    LogPart::Time(LogZone::Local, "%m%d %H:%M:%S%.6f"),
                ],
            ),
        ] {
            assert_eq!(format.parse(), Ok(LogFormat(parts)), "{format}");
        }
    }

    #[test]
    fn every_token_of_cloud_hypervisor_is_known() {
        let plain = ["boottime", "wallclock", "pid", "tid", "thread", "level", "levelchar", "location", "msg"];
        let times = ["glog", "year", "month", "day", "hour", "minute", "second", "micros", "offset"];
        let local = times.map(|name| format!("local{name}"));
        for name in plain.iter().chain(&times).copied().chain(local.iter().map(String::as_str)) {
            assert!(part(name).is_some(), "{name}");
        }
    }

    #[test]
    fn mistakes_say_what_stands_there() {
        for (format, rule) in [
            ("a{level", "a '{' is not closed"),
            ("a}", "a '}' closes nothing"),
            ("{lvl}", "'{lvl}' is no token"),
            ("{localmsg}", "'{localmsg}' is no token"),
            ("{}", "'{}' is no token"),
            ("{é", "not closed"),
        ] {
            let error = format.parse::<LogFormat>().unwrap_err().to_string();
            assert!(error.starts_with("--log-format: in '") && error.contains(rule), "{error}");
        }
    }
}
