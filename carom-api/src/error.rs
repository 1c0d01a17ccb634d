// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors for broken configuration rules. An error names fields as the source of the configuration does: as command line options, or as
//! JSON fields.

use std::borrow::Cow;
use std::fmt;
use std::io;

use crate::field::{Field, Terms};

/// Escapes control characters, so that quoted user input cannot break the message into several lines.
pub fn one_line(message: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().collect() } else { c.to_string() };
    message.chars().map(escape).collect()
}

/// Maximum bytes of a client's text that a message quotes.
pub(crate) const MAX_QUOTED: usize = 64;

/// Shortens a name from a client, so that a message can quote the name. A name longer than [`MAX_QUOTED`] is cut, and ends with `…`.
pub(crate) fn quotable(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_QUOTED {
        return name.into();
    }
    format!("{}…", &name[..name.floor_char_boundary(MAX_QUOTED)]).into()
}

/// Error whose text may name configuration fields. `Display` names the fields as command line options.
pub trait Explain {
    /// Returns the error text. `terms` selects the names of fields.
    fn explain(&self, terms: Terms) -> String;
}

/// Broken rule of the configuration, as one line for the user.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Field that breaks the rule.
    pub field: Field,
    rule: Rule,
}

/// Text that says what is wrong and how to correct it.
#[derive(Debug, PartialEq, Eq)]
enum Rule {
    /// The same text for all front ends.
    Plain(String),
    /// The text for two devices with the same ID, path or other value that must be unique.
    Conflict(String),
    /// The text names other fields, so each front end has its own text.
    InTerms { options: String, json: String },
}

impl ConfigError {
    /// Creates an error for `field`.
    pub fn new(field: Field, rule: impl AsRef<str>) -> Self {
        Self { field, rule: Rule::Plain(one_line(rule.as_ref())) }
    }

    /// Creates an error for `field` whose text names other fields. `rule` returns the text for each front end.
    pub fn in_terms(field: Field, rule: impl Fn(Terms) -> String) -> Self {
        let rule = |terms| one_line(&rule(terms));
        Self { field, rule: Rule::InTerms { options: rule(Terms::Options), json: rule(Terms::Json) } }
    }

    /// Creates an error for `field`, whose value another device already uses.
    pub fn conflict(field: Field, rule: impl AsRef<str>) -> Self {
        Self { field, rule: Rule::Conflict(one_line(rule.as_ref())) }
    }

    /// True if the error was created by [`Self::conflict`].
    pub fn is_conflict(&self) -> bool {
        matches!(self.rule, Rule::Conflict(_))
    }

    /// Returns the text for the front end of `terms`.
    pub fn rule(&self, terms: Terms) -> &str {
        match (&self.rule, terms) {
            (Rule::Plain(rule) | Rule::Conflict(rule), _) => rule,
            (Rule::InTerms { options, .. }, Terms::Options) => options,
            (Rule::InTerms { json, .. }, Terms::Json) => json,
        }
    }
}

/// Returns an error for `field` if `holds` is false. `rule` returns the text of the error.
///
/// # Errors
/// The rule does not hold.
pub(crate) fn ensure<R: AsRef<str>>(holds: bool, field: Field, rule: impl FnOnce() -> R) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::new(field, rule())) }
}

/// Returns an error for `field` if `holds` is false. The text names other fields, so `rule` returns a text for each front end.
///
/// # Errors
/// The rule does not hold.
pub(crate) fn ensure_in_terms(holds: bool, field: Field, rule: impl Fn(Terms) -> String) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::in_terms(field, rule)) }
}

/// Checks that no field of `fields` is given.
///
/// # Errors
/// A field is given. `rule` is the text of the error.
pub(crate) fn ensure_none(fields: &[(Field, bool)], rule: &str) -> Result<(), ConfigError> {
    fields.iter().try_for_each(|(field, given)| ensure(!given, *field, || rule))
}

impl Explain for ConfigError {
    fn explain(&self, terms: Terms) -> String {
        [&self.field.name(terms), ": ", self.rule(terms)].concat()
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain(Terms::Options))
    }
}

impl std::error::Error for ConfigError {}

/// Error of a system call on a file that a field names.
#[derive(Debug)]
pub struct FileError {
    /// Field that names the file.
    pub field: Field,
    /// Path of the file.
    pub path: String,
    /// Error of the system call.
    pub source: io::Error,
}

impl Explain for FileError {
    fn explain(&self, terms: Terms) -> String {
        one_line(&format!("{}: {}", self.field.with_value(&self.path, terms), self.source))
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain(Terms::Options))
    }
}

impl std::error::Error for FileError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
