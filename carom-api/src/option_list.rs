// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `key=value,key=value` arguments, in Cloud Hypervisor's syntax.

use std::str::FromStr;

use thiserror::Error;

use crate::error::ConfigError;
use crate::field::Field;
use crate::size::parse_size;

/// Why an argument could not be read.
#[derive(Debug, Error, PartialEq, Eq)]
enum Malformed {
    /// A part is not `key=value`.
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
    /// A list is not closed.
    #[error("a list is not closed: ']' is missing")]
    UnclosedList,
    /// There is an empty part.
    #[error("empty part in '{0}'")]
    Empty(String),
}

/// The parsed parts of one argument. A value may stand in double quotes to hold commas.
#[derive(Debug)]
pub struct OptionList {
    option: Field,
    values: Vec<(&'static str, String)>,
}

impl OptionList {
    /// Parses `text`, the argument of `option`, in which `keys` may occur, each once, as `key=value`.
    ///
    /// # Errors
    /// The text is none of these.
    pub fn parse(option: Field, text: &str, keys: &[&'static str]) -> Result<Self, ConfigError> {
        Self::parse_with_words(option, text, &[], keys)
    }

    /// The same where `words` may stand among the parts, each without a value. One that does has an empty value here.
    ///
    /// # Errors
    /// The text is none of these.
    pub fn parse_with_words(
        option: Field,
        text: &str,
        words: &[&'static str],
        keys: &[&'static str],
    ) -> Result<Self, ConfigError> {
        let values = parse(text, words, keys).map_err(|error| ConfigError::new(option, error.to_string()))?;
        Ok(Self { option, values })
    }

    /// The value of `key`, if it was given.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values.iter().find(|(known, _)| *known == key).map(|(_, value)| value.as_str())
    }

    /// The value of `key`, which must be given.
    ///
    /// # Errors
    /// It is not, or is empty.
    pub fn required(&self, key: &str) -> Result<&str, ConfigError> {
        match self.get(key) {
            Some(value) if !value.is_empty() => Ok(value),
            _ => Err(ConfigError::new(self.option, format!("'{key}=' is needed"))),
        }
    }

    /// Whether `key` is on; `default` where it was not given.
    ///
    /// # Errors
    /// It is neither on nor off.
    pub fn toggle(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        self.get(key).map_or(Ok(default), |value| on_or_off(self.option.key(key), value))
    }

    /// The PCI segment that `pci_segment` says; the first where it was not given.
    ///
    /// # Errors
    /// It is no number that fits.
    pub fn segment(&self) -> Result<u16, ConfigError> {
        self.number("pci_segment").map(|segment| segment.unwrap_or(0))
    }

    /// The number that `key` says, if it was given.
    ///
    /// # Errors
    /// It is none that fits.
    pub fn number<T: FromStr>(&self, key: &'static str) -> Result<Option<T>, ConfigError> {
        let number = self.get(key).map(str::parse).transpose();
        number.map_err(|_| ConfigError::new(self.option.key(key), "is no number that fits"))
    }

    /// The numbers that `key` says, if it was given: `2`, or `[0,2-4]`.
    ///
    /// # Errors
    /// It is none of these.
    pub fn numbers(&self, key: &'static str) -> Result<Option<Vec<u16>>, ConfigError> {
        let numbers = self.get(key).map(parse_numbers).transpose();
        numbers.map_err(|rule| ConfigError::new(self.option.key(key), rule))
    }

    /// The pairs that `key` lists, if it was given: `[0@[2,3],1@4]` is `0` with `[2,3]` and `1` with `4`.
    ///
    /// # Errors
    /// It is no such list.
    pub fn pairs(&self, key: &'static str) -> Result<Option<Vec<(&str, &str)>>, ConfigError> {
        let pairs = self.get(key).map(|text| parse_pairs(text).ok_or(text)).transpose();
        pairs.map_err(|text| {
            let rule = format!("'{text}' is no list of pairs, such as [0@[2,3],1@[4]]");
            ConfigError::new(self.option.key(key), rule)
        })
    }

    /// The texts that `key` says: `one`, or `[one,two]`. None where it was not given.
    pub fn texts(&self, key: &'static str) -> Vec<String> {
        let inner = |text: &str| text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).map(str::to_string);
        match self.get(key) {
            None => Vec::new(),
            Some(text) => inner(text).map_or_else(
                || vec![text.to_string()],
                |texts| if texts.is_empty() { Vec::new() } else { texts.split(',').map(str::to_string).collect() },
            ),
        }
    }

    /// The number of bytes that `key` says, if it was given.
    ///
    /// # Errors
    /// It is no size.
    pub fn size(&self, key: &'static str) -> Result<Option<u64>, ConfigError> {
        let bytes = self.get(key).map(parse_size).transpose();
        bytes.map_err(|rule| ConfigError::new(self.option.key(key), rule))
    }
}

fn parse(text: &str, words: &[&'static str], keys: &[&'static str]) -> Result<Vec<(&'static str, String)>, Malformed> {
    let mut values: Vec<(&'static str, String)> = Vec::new();
    for part in split(text)? {
        if part.is_empty() {
            return Err(Malformed::Empty(text.to_string()));
        }
        let word = words.iter().find(|word| **word == part).map(|word| (*word, "", words));
        let pair = || part.split_once('=').map(|(key, value)| (key, value, keys));
        let (key, value, all) = word.or_else(pair).ok_or_else(|| Malformed::NoValue(part.clone()))?;
        let known = all.iter().copied().find(|known| *known == key);
        let key = known.ok_or_else(|| Malformed::UnknownKey { key: key.into(), known: keys.join(", ") })?;
        if values.iter().any(|(seen, _)| *seen == key) {
            return Err(Malformed::Repeated(key.into()));
        }
        values.push((key, value.to_string()));
    }
    Ok(values)
}

/// The pairs of a list without spaces, `[a@[1,2],b@3]`.
fn parse_pairs(text: &str) -> Option<Vec<(&str, &str)>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    let mut within = false;
    let parts = inner.split(|c| {
        within = c == '[' || within && c != ']';
        c == ',' && !within
    });
    let pairs =
        parts.map(|pair| pair.split_once('@').filter(|(first, second)| !first.is_empty() && !second.is_empty()));
    if inner.is_empty() { Some(Vec::new()) } else { pairs.collect() }
}

/// The numbers of a list without spaces, `[0,2-4]`, or a single one.
pub(crate) fn parse_numbers(text: &str) -> Result<Vec<u16>, String> {
    let wrong = || format!("'{text}' is no number and no list of them, such as [0,2-4]");
    let inner = match text.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']').ok_or_else(wrong)?,
        None => text,
    };
    if inner.is_empty() {
        return Ok(Vec::new());
    }
    let mut numbers = Vec::new();
    for part in inner.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else { return Err(wrong()) };
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

/// Splits at commas outside double quotes and lists, and takes the quotes away. A list is a value that begins with `[`, or
/// the second of a pair in one.
fn split(text: &str) -> Result<Vec<String>, Malformed> {
    let mut parts = vec![String::new()];
    let (mut quoted, mut lists) = (false, 0);
    for c in text.chars() {
        let part = parts.last_mut().expect("there is always a last part");
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted && lists == 0 => parts.push(String::new()),
            _ => {
                match c {
                    '[' if lists == 0 && part.find('=').is_some_and(|at| at + 1 == part.len()) => lists = 1,
                    '[' if lists == 1 && part.ends_with('@') => lists = 2,
                    ']' if lists > 0 => lists -= 1,
                    _ => {}
                }
                if quoted {
                    lists = 0;
                }
                part.push(c);
            }
        }
    }
    match (quoted, lists) {
        (true, _) => Err(Malformed::UnclosedQuote),
        (false, 0) => Ok(parts),
        (false, _) => Err(Malformed::UnclosedList),
    }
}

/// What `value` of `field` says.
///
/// # Errors
/// It is neither on nor off.
pub(crate) fn on_or_off(field: Field, value: &str) -> Result<bool, ConfigError> {
    match value {
        "off" => Ok(false),
        "on" => Ok(true),
        other => Err(ConfigError::new(field, format!("'{other}' is neither 'on' nor 'off'"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTION: Field = Field::new("--device", "devices");

    #[test]
    fn values_are_found_by_key() {
        let list = OptionList::parse(OPTION, "path=/a,iommu=on,size=2K", &["path", "iommu", "id", "size"]).unwrap();
        assert_eq!(list.required("path"), Ok("/a"));
        assert_eq!(list.toggle("iommu", false), Ok(true));
        assert_eq!(list.size("size"), Ok(Some(2048)));
        assert_eq!(list.get("id"), None);
        assert_eq!(list.required("id").unwrap_err().to_string(), "--device: 'id=' is needed");
        assert_eq!(list.toggle("path", true).unwrap_err().to_string(), "--device path: '/a' is neither 'on' nor 'off'");
    }

    #[test]
    fn quoted_value_may_hold_commas_and_equals_signs() {
        let list = OptionList::parse(OPTION, "path=\"/a,b=c\"", &["path"]).unwrap();
        assert_eq!(list.get("path"), Some("/a,b=c"));
    }

    #[test]
    fn list_may_hold_commas_and_spans() {
        let numbers = |text: &str| {
            OptionList::parse(OPTION, text, &["a", "b"]).and_then(|list| list.numbers("a")).map_err(|e| e.to_string())
        };
        assert_eq!(numbers("a=[0,2-4],b=1"), Ok(Some(vec![0, 2, 3, 4])));
        assert_eq!((numbers("a=7"), numbers("a=[]"), numbers("b=x")), (Ok(Some(vec![7])), Ok(Some(vec![])), Ok(None)));
        assert_eq!(numbers("a=[1,b=2").unwrap_err(), "--device: a list is not closed: ']' is missing");
        for wrong in ["x", "[1,]", "1,", "[1-]", "[65536]", "[1]2"] {
            let refused = numbers(&format!("a={wrong}")).unwrap_err();
            assert!(refused.contains("no list of them") || refused.contains("empty part"), "{refused}");
        }
    }

    #[test]
    fn list_may_hold_pairs_whose_second_is_a_list() {
        let parse = |text: &str| OptionList::parse(OPTION, text, &["a", "b"]);
        let list = parse("a=[0@[2,3],x@4],b=on").unwrap();
        assert_eq!(list.pairs("a"), Ok(Some(vec![("0", "[2,3]"), ("x", "4")])));
        assert_eq!(list.toggle("b", false), Ok(true));
        assert_eq!(parse("a=[]").unwrap().pairs("a"), Ok(Some(Vec::new())));
        assert_eq!(parse("b=on").unwrap().pairs("a"), Ok(None));
        for wrong in ["a=0@[1,2]", "a=[0@[1,2]"] {
            let refused = parse(wrong).and_then(|list| list.pairs("a").map(|_| ())).unwrap_err().to_string();
            assert!(
                refused.contains("empty part") || refused.contains("no key=value") || refused.contains("not closed")
            );
        }
        for wrong in ["a=0@1", "a=[1]", "a=[@1]", "a=[1@]", "a=[1@2,]", "a=[1@2,,1@3]"] {
            let refused = parse(wrong).unwrap().pairs("a").unwrap_err().to_string();
            assert!(refused.starts_with("--device a: '") && refused.contains("no list of pairs"), "{refused}");
        }
    }

    #[test]
    fn mistakes_name_the_part() {
        let mistake = |text| parse(text, &[], &["path", "id"]).unwrap_err();
        assert_eq!(mistake("pth=/a").to_string(), "unknown key 'pth', known are: path, id");
        assert_eq!(mistake("path").to_string(), "'path' is no key=value");
        assert_eq!(mistake("path=/a,path=/b").to_string(), "'path' is given twice");
        assert_eq!(mistake("path=\"/a"), Malformed::UnclosedQuote);
        assert_eq!(mistake("path=/a,"), Malformed::Empty("path=/a,".into()));
    }
}
