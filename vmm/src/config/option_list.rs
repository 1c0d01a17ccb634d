// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `key=value,key=value` arguments, in Cloud Hypervisor's syntax.

use thiserror::Error;

/// Why an argument could not be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionListError {
    /// A part is neither `key=value` nor a flag that is allowed bare.
    #[error("'{0}' is no key=value")]
    NoValue(String),
    /// The key is not one of those that this option knows.
    #[error("unknown key '{key}', known are: {known}")]
    UnknownKey {
        /// What was given.
        key: String,
        /// What would be right.
        known: String,
    },
    /// The key stands there twice.
    #[error("'{0}' is given twice")]
    Repeated(String),
    /// A double quote is not closed.
    #[error("a double quote is not closed")]
    UnclosedQuote,
    /// There is an empty part.
    #[error("empty part in '{0}'")]
    Empty(String),
}

/// The parsed parts of one argument. A value may stand in double quotes to hold commas.
#[derive(Debug)]
pub struct OptionList<'a> {
    values: Vec<(&'a str, String)>,
}

impl<'a> OptionList<'a> {
    /// Parses `text`, in which `keys` may occur, each once, as `key=value`.
    pub fn parse(text: &str, keys: &[&'a str]) -> Result<Self, OptionListError> {
        let mut values: Vec<(&'a str, String)> = Vec::new();
        for part in split(text)? {
            if part.is_empty() {
                return Err(OptionListError::Empty(text.to_string()));
            }
            let (key, value) = part.split_once('=').ok_or_else(|| OptionListError::NoValue(part.clone()))?;
            let known = keys.iter().copied().find(|known| *known == key);
            let key = known.ok_or_else(|| OptionListError::UnknownKey { key: key.into(), known: keys.join(", ") })?;
            if values.iter().any(|(seen, _)| *seen == key) {
                return Err(OptionListError::Repeated(key.into()));
            }
            values.push((key, value.to_string()));
        }
        Ok(Self { values })
    }

    /// The value of `key`, if it was given.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.iter().find(|(known, _)| *known == key).map(|(_, value)| value.as_str())
    }
}

/// Splits at commas outside double quotes and takes the quotes away.
fn split(text: &str) -> Result<Vec<String>, OptionListError> {
    let mut parts = vec![String::new()];
    let mut quoted = false;
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => parts.push(String::new()),
            _ => parts.last_mut().expect("there is always a last part").push(c),
        }
    }
    if quoted { Err(OptionListError::UnclosedQuote) } else { Ok(parts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_key() {
        let list = OptionList::parse("path=/a,iommu=on", &["path", "iommu", "id"]).unwrap();
        assert_eq!(list.get("path"), Some("/a"));
        assert_eq!(list.get("iommu"), Some("on"));
        assert_eq!(list.get("id"), None);
    }

    #[test]
    fn quoted_value_may_hold_commas_and_equals_signs() {
        let list = OptionList::parse("path=\"/a,b=c\"", &["path"]).unwrap();
        assert_eq!(list.get("path"), Some("/a,b=c"));
    }

    #[test]
    fn mistakes_name_the_part() {
        let parse = |text| OptionList::parse(text, &["path", "id"]).unwrap_err();
        assert_eq!(parse("pth=/a").to_string(), "unknown key 'pth', known are: path, id");
        assert_eq!(parse("path").to_string(), "'path' is no key=value");
        assert_eq!(parse("path=/a,path=/b").to_string(), "'path' is given twice");
        assert_eq!(parse("path=\"/a"), OptionListError::UnclosedQuote);
        assert_eq!(parse("path=/a,"), OptionListError::Empty("path=/a,".into()));
    }
}
