// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Rules that do not hold, told in the words of whoever broke them.

use std::borrow::Cow;
use std::fmt;
use std::io;

use crate::field::{Field, Terms};

/// A message may quote what the user gave: what would end its line is escaped.
pub fn one_line(message: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().collect() } else { c.to_string() };
    message.chars().map(escape).collect()
}

/// Longest text in bytes that a message quotes of what a client sent.
pub(crate) const MAX_QUOTED: usize = 64;

/// A name that a client sent, for a message: what is longer than [`MAX_QUOTED`] ends with `…` there.
pub(crate) fn quotable(name: &str) -> Cow<'_, str> {
    if name.len() <= MAX_QUOTED {
        return name.into();
    }
    format!("{}…", &name[..name.floor_char_boundary(MAX_QUOTED)]).into()
}

/// An error that may name fields. `Display` has them in the words of the command line.
pub trait Explain {
    /// The error in these words.
    fn explain(&self, terms: Terms) -> String;
}

/// A rule of the configuration that does not hold; one line, for the user.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The field that breaks it.
    pub field: Field,
    rule: Rule,
}

/// What is wrong, and what would be right.
#[derive(Debug, PartialEq, Eq)]
enum Rule {
    /// In the same words for all.
    Plain(String),
    /// The same, of something that two devices have and no two may.
    Conflict(String),
    /// A rule that names other fields.
    InTerms { options: String, json: String },
}

impl ConfigError {
    /// A rule for `field`.
    pub fn new(field: Field, rule: impl AsRef<str>) -> Self {
        Self { field, rule: Rule::Plain(one_line(rule.as_ref())) }
    }

    /// A rule for `field` that names other fields; `rule` writes it in the words that it is given.
    pub fn in_terms(field: Field, rule: impl Fn(Terms) -> String) -> Self {
        let rule = |terms| one_line(&rule(terms));
        Self { field, rule: Rule::InTerms { options: rule(Terms::Options), json: rule(Terms::Json) } }
    }

    /// A rule for `field`, which has what another device has and no two may.
    pub fn conflict(field: Field, rule: impl AsRef<str>) -> Self {
        Self { field, rule: Rule::Conflict(one_line(rule.as_ref())) }
    }

    /// Whether it is one of [`Self::conflict`].
    pub fn is_conflict(&self) -> bool {
        matches!(self.rule, Rule::Conflict(_))
    }

    /// What is wrong, and what would be right.
    pub fn rule(&self, terms: Terms) -> &str {
        match (&self.rule, terms) {
            (Rule::Plain(rule) | Rule::Conflict(rule), _) => rule,
            (Rule::InTerms { options, .. }, Terms::Options) => options,
            (Rule::InTerms { json, .. }, Terms::Json) => json,
        }
    }
}

/// Checks a rule for `field`.
///
/// # Errors
/// It does not hold.
pub(crate) fn ensure<R: AsRef<str>>(holds: bool, field: Field, rule: impl FnOnce() -> R) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::new(field, rule())) }
}

/// [`ensure`] with a rule that names other fields, in the words that it is given.
///
/// # Errors
/// It does not hold.
pub(crate) fn ensure_in_terms(holds: bool, field: Field, rule: impl Fn(Terms) -> String) -> Result<(), ConfigError> {
    if holds { Ok(()) } else { Err(ConfigError::in_terms(field, rule)) }
}

/// Checks that none of these fields is given.
///
/// # Errors
/// One is. This is its rule.
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

/// A file that a field names and that cannot be used.
#[derive(Debug)]
pub struct FileError {
    /// The field.
    pub field: Field,
    /// The file.
    pub path: String,
    /// What the kernel said.
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
