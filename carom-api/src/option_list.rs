// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Option values of the form `key=value,key=value`, in Cloud Hypervisor's syntax.

mod deserializer;
mod grammar;
mod unsupported_keys;

use std::str::FromStr;

use serde::Deserialize;

use crate::error::ConfigError;
use crate::field::Field;
use deserializer::Reader;
use grammar::Malformed;

pub(crate) use deserializer::{FromOption, Special, defaults, from_option, from_str, read};

/// Parsed value of one option: keys with their values. The value of a key may contain commas if it is in double quotes. A key with an empty
/// value counts as missing.
#[derive(Debug)]
pub struct OptionList {
    option: Field,
    values: Vec<(&'static str, Value)>,
}

/// Value of a key.
#[derive(Debug)]
struct Value {
    /// Text as the user wrote it.
    raw: String,
    /// Text without double quotes.
    text: String,
}

impl OptionList {
    /// Parses `text`, the value of `option`. The text may be empty, or contain each of `keys` at most once as `key=value`. Keys
    /// of Cloud Hypervisor that Carom does not support are accepted with their neutral value.
    ///
    /// # Errors
    /// The text does not have this form.
    pub fn parse(option: Field, text: &str, keys: &[&'static str]) -> Result<Self, ConfigError> {
        Self::parse_with_words(option, text, &[], keys)
    }

    /// Parses an option value that may also contain `words`, which have no value.
    ///
    /// # Errors
    /// The text does not have this form.
    fn parse_with_words(
        option: Field,
        text: &str,
        words: &[&'static str],
        keys: &[&'static str],
    ) -> Result<Self, ConfigError> {
        let malformed = |error: Malformed| ConfigError::new(option, error.to_string());
        let mut list = Self { option, values: Vec::new() };
        let text = text.trim();
        if text.is_empty() {
            return Ok(list);
        }
        for part in grammar::split_at_commas(text).map_err(malformed)? {
            if part.is_empty() {
                return Err(malformed(Malformed::Empty(text.into())));
            }
            if let Some(word) = words.iter().find(|word| **word == part) {
                list.add(word, "").map_err(malformed)?;
                continue;
            }
            let no_pair = || match words {
                [] => Malformed::NoValue(part.into()),
                words => Malformed::UnknownWord { word: part.into(), known: words.join(", ") },
            };
            let (name, raw) = part.split_once('=').ok_or_else(|| malformed(no_pair()))?;
            let raw = raw.trim();
            if let Some(key) = keys.iter().find(|key| **key == name) {
                list.add(key, raw).map_err(malformed)?;
            } else if let Some(key) = unsupported_keys::find(option, name) {
                list.add(key.name(), raw).map_err(malformed)?;
                key.check(option, raw)?;
            } else {
                return Err(malformed(Malformed::UnknownKey { key: name.into(), known: keys.join(", ") }));
            }
        }
        Ok(list)
    }

    fn add(&mut self, key: &'static str, raw: &str) -> Result<(), Malformed> {
        if self.values.iter().any(|(seen, _)| *seen == key) {
            return Err(Malformed::Repeated(key.into()));
        }
        self.values.push((key, Value { raw: raw.into(), text: grammar::unquoted(raw)? }));
        Ok(())
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.values.iter().find(|(known, _)| *known == key).map(|(_, value)| value)
    }

    /// Returns the value of `key`, if it was given and is not empty.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.value(key).map(|value| value.text.as_str()).filter(|text| !text.is_empty())
    }

    /// True if the word or key was given, even without a value.
    pub fn has(&self, word: &str) -> bool {
        self.value(word).is_some()
    }

    /// Returns the value of `key`, which is required.
    ///
    /// # Errors
    /// The key is missing, or its value is empty.
    pub fn required(&self, key: &str) -> Result<&str, ConfigError> {
        self.get(key).ok_or_else(|| ConfigError::new(self.option, format!("'{key}=' is required")))
    }

    /// Sets the value of `key`, and replaces an existing value.
    pub(crate) fn set(&mut self, key: &'static str, text: String) {
        self.values.retain(|(known, _)| *known != key);
        self.values.push((key, Value { raw: text.clone(), text }));
    }

    /// Sets the value of `key` if it was not given.
    pub(crate) fn set_default(&mut self, key: &'static str, text: String) {
        if self.get(key).is_none() {
            self.set(key, text);
        }
    }

    /// Returns the value of `key`, if it was given and is not empty. A `u64` is parsed as a size: see [`deserializer`].
    ///
    /// # Errors
    /// The value is not valid for this type.
    pub(crate) fn read<'de, T: Deserialize<'de>>(&self, key: &'static str) -> Result<Option<T>, ConfigError> {
        self.reader(key).map(T::deserialize).transpose()
    }

    /// Returns the value of `key` as a number, if it was given and is not empty.
    ///
    /// # Errors
    /// The value is not a number, or is out of range.
    pub(crate) fn number<T: FromStr>(&self, key: &'static str) -> Result<Option<T>, ConfigError> {
        self.reader(key).map(Reader::number).transpose()
    }

    fn reader(&self, key: &'static str) -> Option<Reader<'_>> {
        let value = self.value(key).filter(|value| !value.text.is_empty())?;
        Some(Reader::new(self.option.key(key), value))
    }
}

/// Parses a single number, or a list such as `[0,2-4]` without spaces.
fn parse_numbers(text: &str) -> Result<Vec<u16>, String> {
    let wrong = || format!("'{text}' must be a number from 0 to 65535, or a list of numbers such as [0,2-4]");
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
        if first > last {
            return Err(format!("'{part}' is a range that starts above its end: write the smaller number first"));
        }
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

/// Parses `value` of `field` as on or off, in upper or lower case.
///
/// # Errors
/// The value is neither on nor off.
pub(crate) fn on_or_off(field: Field, value: &str) -> Result<bool, ConfigError> {
    match value.to_lowercase().as_str() {
        "off" | "false" => Ok(false),
        "on" | "true" => Ok(true),
        _ => Err(ConfigError::new(field, format!("'{value}' is neither 'on' nor 'off'"))),
    }
}

/// Returns the entry of `choices` that `value` names, in upper or lower case. `field` is the field that the error names.
///
/// # Errors
/// The value names no choice.
fn choice<T: Copy>(field: Field, value: &str, choices: &[(String, T)]) -> Result<T, ConfigError> {
    let lower = value.to_lowercase();
    if let Some((_, chosen)) = choices.iter().find(|(name, _)| *name == lower) {
        return Ok(*chosen);
    }
    let names: Vec<String> = choices.iter().map(|(name, _)| format!("'{name}'")).collect();
    let rule = match names.as_slice() {
        [one] => format!("'{value}' is not {one}"),
        [one, other] => format!("'{value}' is neither {one} nor {other}"),
        [first @ .., last] => format!("'{value}' is not one of {} or {last}", first.join(", ")),
        [] => format!("'{value}' is not known"),
    };
    Err(ConfigError::new(field, rule))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const OPTION: Field = Field::new("--device", "devices");

    #[test]
    fn values_are_found_by_key() {
        let list = OptionList::parse(OPTION, "path=/a,iommu=on,size=2K", &["path", "iommu", "id", "size"]).unwrap();
        assert_eq!(list.required("path"), Ok("/a"));
        assert_eq!(list.read("iommu"), Ok(Some(true)));
        assert_eq!(list.read("size"), Ok(Some(2048u64)));
        assert_eq!(list.get("id"), None);
        assert_eq!(list.required("id").unwrap_err().to_string(), "--device: 'id=' is required");
        let refused = list.read::<bool>("path").unwrap_err().to_string();
        assert_eq!(refused, "--device path: '/a' is neither 'on' nor 'off'");
    }

    #[test]
    fn quoted_value_may_hold_commas_and_equals_signs() {
        let list = OptionList::parse(OPTION, "path=\"/a,b=c\"", &["path"]).unwrap();
        assert_eq!(list.get("path"), Some("/a,b=c"));
    }

    #[test]
    fn list_may_hold_commas_and_ranges() {
        let numbers = |text: &str| {
            OptionList::parse(OPTION, text, &["a", "b"])
                .and_then(|list| list.read::<Vec<u16>>("a"))
                .map_err(|e| e.to_string())
        };
        assert_eq!(numbers("a=[0,2-4],b=1"), Ok(Some(vec![0, 2, 3, 4])));
        assert_eq!((numbers("a=7"), numbers("a=[]"), numbers("b=x")), (Ok(Some(vec![7])), Ok(Some(vec![])), Ok(None)));
        assert_eq!(numbers("a=[1,b=2").unwrap_err(), "--device: a list is not closed: ']' is missing");
        for wrong in ["x", "[1,]", "1,", "[1-]", "[65536]", "[1]2"] {
            let refused = numbers(&format!("a={wrong}")).unwrap_err();
            assert!(refused.contains("a list of numbers") || refused.contains("empty part"), "{refused}");
        }
        assert_eq!(
            numbers("a=[1,5-3]").unwrap_err(),
            "--device a: '5-3' is a range that starts above its end: write the smaller number first"
        );
    }

    #[test]
    fn list_may_hold_pairs_of_a_number_and_a_list() {
        let parse = |text: &str| OptionList::parse(OPTION, text, &["a", "b"]);
        let pairs = |text: &str| parse(text)?.read::<Vec<BTreeMap<u64, String>>>("a");
        let pair = |first: &str, second: &str| BTreeMap::from([(0, first.into()), (1, second.into())]);
        assert_eq!(pairs("a=[0@[2,3],x@4],b=on"), Ok(Some(vec![pair("0", "[2,3]"), pair("x", "4")])));
        assert_eq!(parse("a=[0@[2,3],x@4],b=on").unwrap().read("b"), Ok(Some(true)));
        assert_eq!((pairs("a=[]"), pairs("b=on")), (Ok(Some(Vec::new())), Ok(None)));
        assert_eq!(pairs(r#"a=["x@y"@1, z@[2,3]]"#), Ok(Some(vec![pair("x@y", "1"), pair("z", "[2,3]")])));
        let lists =
            parse("a=[0@[2-4],1@7]").unwrap().read::<Vec<BTreeMap<u64, Vec<u32>>>>("a").map_err(|e| e.to_string());
        assert_eq!(
            lists,
            Ok(Some(vec![
                BTreeMap::from([(0, vec![0]), (1, vec![2, 3, 4])]),
                BTreeMap::from([(0, vec![1]), (1, vec![7])])
            ]))
        );
        assert!(parse("a=[0@[1,2]").unwrap_err().to_string().contains("not closed"));
        for wrong in ["a=0@[1,2]", "a=0@1", "a=[1]", "a=[@1]", "a=[1@]", "a=[1@2,]", "a=[1@2,,1@3]"] {
            let refused = pairs(wrong).unwrap_err().to_string();
            assert!(refused.starts_with("--device a: '") && refused.contains("not a list of pairs"), "{refused}");
        }
    }

    #[test]
    fn mistakes_name_the_part() {
        let mistake = |text| OptionList::parse(OPTION, text, &["path", "id"]).unwrap_err().to_string();
        assert_eq!(mistake("pth=/a"), "--device: unknown key 'pth'; known keys: path, id");
        assert_eq!(mistake("path"), "--device: 'path' is not key=value");
        assert_eq!(mistake("path=/a,path=/b"), "--device: 'path' is given twice: leave one out");
        assert_eq!(mistake("path=\"/a"), "--device: a double quote is not closed: add the closing quote");
        assert_eq!(mistake("path=/a,"), "--device: empty part in 'path=/a,': remove the extra comma");
        assert!(mistake("path=/a\"b\"c").contains("has a double quote in the middle"));
    }

    #[test]
    fn empty_value_counts_as_not_given() {
        let keys = ["path", "size", "on", "list", "pairs"];
        for text in ["path=,size=,on=,list=,pairs=", "path= ,size= ", "", "  ", "path=\"\""] {
            let list = OptionList::parse(OPTION, text, &keys).unwrap();
            assert_eq!(
                (list.get("path"), list.read::<u64>("size"), list.number::<u8>("size")),
                (None, Ok(None), Ok(None))
            );
            assert_eq!((list.read::<bool>("on"), list.read::<Vec<u16>>("list")), (Ok(None), Ok(None)));
            assert_eq!((list.read::<Vec<String>>("pairs"), list.read::<Vec<String>>("list")), (Ok(None), Ok(None)));
            assert_eq!(list.required("path").unwrap_err().to_string(), "--device: 'path=' is required");
        }
    }

    #[test]
    fn toggle_takes_four_words_in_any_case() {
        let toggle = |value: &str| OptionList::parse(OPTION, &format!("a={value}"), &["a"]).unwrap().read::<bool>("a");
        for (value, on) in [("on", true), ("TRUE", true), ("True", true), ("Off", false), ("false", false)] {
            assert_eq!(toggle(value), Ok(Some(on)), "{value}");
        }
        assert_eq!(toggle("yes").unwrap_err().to_string(), "--device a: 'yes' is neither 'on' nor 'off'");
    }

    #[test]
    fn quoted_element_with_a_comma_is_one_text() {
        for (value, texts) in [
            (r#"["a,b",c]"#, &["a,b", "c"][..]),
            (r#"["say ""hi""",[x]]"#, &["say \"hi\"", "[x]"]),
            (r#""a,b""#, &["a,b"]),
            ("one", &["one"]),
            ("[]", &[]),
        ] {
            let list = OptionList::parse(OPTION, &format!("a={value}"), &["a"]).unwrap();
            assert_eq!(list.read::<Vec<String>>("a").unwrap().unwrap(), texts);
        }
    }

    #[test]
    fn quoted_path_is_exact_and_stray_quotes_are_refused() {
        let path = |value: &str| {
            let list = OptionList::parse(OPTION, &format!("path={value},id=x"), &["path", "id"]).ok()?;
            list.get("path").map(String::from)
        };
        assert_eq!(path(r#""/we""ird""#).as_deref(), Some(r#"/we"ird"#));
        assert_eq!(path(r#""/a,id=y""#).as_deref(), Some("/a,id=y"));
        assert_eq!(path("/a[1,2]").as_deref(), Some("/a[1,2]"));
        for refused in [r#"/we"ird"#, r#"/a"b"c"#, r#""/a"b"#, r#"/a"""#] {
            assert_eq!(path(refused), None, "{refused}");
        }
    }

    #[test]
    fn choice_is_read_in_any_case() {
        #[derive(Debug, PartialEq, Deserialize)]
        enum Two {
            One,
            Two,
        }
        let list = |value: &str| OptionList::parse(OPTION, &format!("a={value}"), &["a"]).unwrap();
        assert_eq!((list("ONE").read("a"), list("two").read("a")), (Ok(Some(Two::One)), Ok(Some(Two::Two))));
        assert_eq!(list("").read::<Two>("a"), Ok(None));
        let refused = |names: &[&str]| {
            let choices: Vec<_> = names.iter().map(|name| (name.to_string(), ())).collect();
            choice(OPTION.key("a"), "x", &choices).unwrap_err().to_string()
        };
        assert_eq!(refused(&["one"]), "--device a: 'x' is not 'one'");
        assert_eq!(list("x").read::<Two>("a").unwrap_err().to_string(), "--device a: 'x' is neither 'one' nor 'two'");
        assert_eq!(refused(&["one", "two", "three"]), "--device a: 'x' is not one of 'one', 'two' or 'three'");
    }
}
