// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `key=value,key=value` arguments, in Cloud Hypervisor's syntax.

mod grammar;
mod unsupported_keys;

use std::str::FromStr;

use crate::error::ConfigError;
use crate::field::Field;
use crate::size::parse_size;
use grammar::Malformed;

/// The parsed parts of one argument. A value may stand in double quotes to hold commas; an empty value counts as not given.
#[derive(Debug)]
pub struct OptionList {
    option: Field,
    values: Vec<(&'static str, Value)>,
}

/// The value of a key.
#[derive(Debug)]
struct Value {
    /// As it was written.
    raw: String,
    /// Without double quotes.
    text: String,
}

impl OptionList {
    /// Parses `text`, the argument of `option`, with `keys` as `key=value`, each at most once. The text may be empty. Keys that
    /// Cloud Hypervisor has for this option and Carom does not have may occur with a value that asks for nothing.
    ///
    /// # Errors
    /// The text is none of these.
    pub fn parse(option: Field, text: &str, keys: &[&'static str]) -> Result<Self, ConfigError> {
        Self::parse_with_words(option, text, &[], keys)
    }

    /// The same where `words` may stand among the parts, each without a value.
    ///
    /// # Errors
    /// The text is none of these.
    pub fn parse_with_words(
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

    /// The value of `key`, if it was given and is not empty.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.value(key).map(|value| value.text.as_str()).filter(|text| !text.is_empty())
    }

    /// True if the word or key was given, even without a value.
    pub fn has(&self, word: &str) -> bool {
        self.value(word).is_some()
    }

    /// The value of `key`, which must be given.
    ///
    /// # Errors
    /// It is not, or is empty.
    pub fn required(&self, key: &str) -> Result<&str, ConfigError> {
        self.get(key).ok_or_else(|| ConfigError::new(self.option, format!("'{key}=' is needed")))
    }

    /// Whether `key` is on; `default` where it was not given.
    ///
    /// # Errors
    /// It is neither on nor off.
    pub fn toggle(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        self.get(key).map_or(Ok(default), |value| on_or_off(self.option.key(key), value))
    }

    /// The one of `choices` that `key` names in upper or lower case, if it was given.
    ///
    /// # Errors
    /// It names none of them.
    pub fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let lower = value.to_lowercase();
        if let Some((_, chosen)) = choices.iter().find(|(name, _)| *name == lower) {
            return Ok(Some(*chosen));
        }
        let names: Vec<String> = choices.iter().map(|(name, _)| format!("'{name}'")).collect();
        let rule = match names.as_slice() {
            [one] => format!("'{value}' is not {one}"),
            [one, other] => format!("'{value}' is neither {one} nor {other}"),
            [first @ .., last] => format!("'{value}' is none of {} and {last}", first.join(", ")),
            [] => format!("'{value}' is not known"),
        };
        Err(ConfigError::new(self.option.key(key), rule))
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

    /// The pairs that `key` lists, if it was given: `[0@[2,3],1@4]` is `0` with `[2,3]` and `1` with `4`. The first of a pair may
    /// stand in double quotes.
    ///
    /// # Errors
    /// It is no such list.
    pub fn pairs(&self, key: &'static str) -> Result<Option<Vec<(String, &str)>>, ConfigError> {
        let Some(Value { raw, .. }) = self.value(key).filter(|value| !value.raw.is_empty()) else { return Ok(None) };
        let wrong = || {
            let rule = format!("'{raw}' is no list of pairs, such as [0@[2,3],1@[4]]");
            ConfigError::new(self.option.key(key), rule)
        };
        let mut pairs = Vec::new();
        for element in grammar::elements(raw).and_then(Result::ok).ok_or_else(wrong)? {
            let (first, second) = grammar::split_at_sign(element.trim()).ok_or_else(wrong)?;
            let first = grammar::unquoted(first).map_err(|_| wrong())?;
            if first.is_empty() || second.is_empty() {
                return Err(wrong());
            }
            pairs.push((first, second));
        }
        Ok(Some(pairs))
    }

    /// The texts that `key` says: `one`, or `[one,"two, or more"]`. None where it was not given.
    ///
    /// # Errors
    /// A double quote encloses only a part of a text.
    pub fn texts(&self, key: &'static str) -> Result<Vec<String>, ConfigError> {
        let Some(Value { raw, text }) = self.value(key).filter(|value| !value.text.is_empty()) else {
            return Ok(Vec::new());
        };
        let elements = match grammar::elements(raw) {
            None => return Ok(vec![text.clone()]),
            Some(elements) => elements,
        };
        let texts = elements.and_then(|elements| elements.into_iter().map(grammar::unquoted).collect());
        texts.map_err(|error: Malformed| ConfigError::new(self.option.key(key), error.to_string()))
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
        if first > last {
            return Err(format!("'{part}' ends before it begins"));
        }
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

/// Reads `value` of `field`, in upper or lower case.
///
/// # Errors
/// It is neither on nor off.
pub(crate) fn on_or_off(field: Field, value: &str) -> Result<bool, ConfigError> {
    match value.to_lowercase().as_str() {
        "off" | "false" => Ok(false),
        "on" | "true" => Ok(true),
        _ => Err(ConfigError::new(field, format!("'{value}' is neither 'on' nor 'off'"))),
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
        assert_eq!(numbers("a=[1,5-3]").unwrap_err(), "--device a: '5-3' ends before it begins");
    }

    #[test]
    fn list_may_hold_pairs_whose_second_is_a_list() {
        let parse = |text: &str| OptionList::parse(OPTION, text, &["a", "b"]);
        let list = parse("a=[0@[2,3],x@4],b=on").unwrap();
        assert_eq!(list.pairs("a"), Ok(Some(vec![("0".into(), "[2,3]"), ("x".into(), "4")])));
        assert_eq!(list.toggle("b", false), Ok(true));
        assert_eq!(parse("a=[]").unwrap().pairs("a"), Ok(Some(Vec::new())));
        assert_eq!(parse("b=on").unwrap().pairs("a"), Ok(None));
        let spaced = parse(r#"a=["x@y"@1, z@[2,3]]"#).unwrap();
        assert_eq!(spaced.pairs("a"), Ok(Some(vec![("x@y".into(), "1"), ("z".into(), "[2,3]")])));
        assert!(parse("a=[0@[1,2]").unwrap_err().to_string().contains("not closed"));
        for wrong in ["a=0@[1,2]", "a=0@1", "a=[1]", "a=[@1]", "a=[1@]", "a=[1@2,]", "a=[1@2,,1@3]"] {
            let refused = parse(wrong).unwrap().pairs("a").unwrap_err().to_string();
            assert!(refused.starts_with("--device a: '") && refused.contains("no list of pairs"), "{refused}");
        }
    }

    #[test]
    fn mistakes_name_the_part() {
        let mistake = |text| OptionList::parse(OPTION, text, &["path", "id"]).unwrap_err().to_string();
        assert_eq!(mistake("pth=/a"), "--device: unknown key 'pth', known are: path, id");
        assert_eq!(mistake("path"), "--device: 'path' is no key=value");
        assert_eq!(mistake("path=/a,path=/b"), "--device: 'path' is given twice");
        assert_eq!(mistake("path=\"/a"), "--device: a double quote is not closed");
        assert_eq!(mistake("path=/a,"), "--device: empty part in 'path=/a,'");
        assert!(mistake("path=/a\"b\"c").contains("has a double quote in the middle"));
    }

    #[test]
    fn empty_value_counts_as_not_given() {
        let keys = ["path", "size", "on", "list", "pairs"];
        for text in ["path=,size=,on=,list=,pairs=", "path= ,size= ", "", "  ", "path=\"\""] {
            let list = OptionList::parse(OPTION, text, &keys).unwrap();
            assert_eq!((list.get("path"), list.size("size"), list.number::<u8>("size")), (None, Ok(None), Ok(None)));
            assert_eq!((list.toggle("on", true), list.toggle("on", false)), (Ok(true), Ok(false)));
            assert_eq!(
                (list.numbers("list"), list.pairs("pairs"), list.texts("list")),
                (Ok(None), Ok(None), Ok(vec![]))
            );
            assert_eq!(list.required("path").unwrap_err().to_string(), "--device: 'path=' is needed");
        }
    }

    #[test]
    fn toggle_takes_four_words_in_any_case() {
        let toggle = |value: &str| OptionList::parse(OPTION, &format!("a={value}"), &["a"]).unwrap().toggle("a", false);
        for (value, on) in [("on", true), ("TRUE", true), ("True", true), ("Off", false), ("false", false)] {
            assert_eq!(toggle(value), Ok(on), "{value}");
        }
        assert_eq!(toggle("yes").unwrap_err().to_string(), "--device a: 'yes' is neither 'on' nor 'off'");
    }

    #[test]
    fn quoted_element_with_a_comma_is_one_text() {
        let texts =
            |value: &str| OptionList::parse(OPTION, &format!("a={value}"), &["a"]).and_then(|list| list.texts("a"));
        assert_eq!(texts(r#"["a,b",c]"#), Ok(vec!["a,b".into(), "c".into()]));
        assert_eq!(texts(r#"["say ""hi""",[x]]"#), Ok(vec!["say \"hi\"".into(), "[x]".into()]));
        assert_eq!(texts(r#""a,b""#), Ok(vec!["a,b".into()]));
        assert_eq!(texts("one"), Ok(vec!["one".into()]));
        assert_eq!(texts("[]"), Ok(vec![]));
    }

    #[test]
    fn quote_never_names_another_file() {
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
        let choice = |value: &str, choices: &[(&str, u8)]| {
            OptionList::parse(OPTION, &format!("a={value}"), &["a"])
                .unwrap()
                .choice("a", choices)
                .map_err(|e| e.to_string())
        };
        assert_eq!(choice("ONE", &[("one", 1), ("two", 2)]), Ok(Some(1)));
        assert_eq!(choice("", &[("one", 1)]), Ok(None));
        assert_eq!(choice("x", &[("one", 1)]).unwrap_err(), "--device a: 'x' is not 'one'");
        assert_eq!(choice("x", &[("one", 1), ("two", 2)]).unwrap_err(), "--device a: 'x' is neither 'one' nor 'two'");
        let three = [("one", 1), ("two", 2), ("three", 3)];
        assert_eq!(choice("x", &three).unwrap_err(), "--device a: 'x' is none of 'one', 'two' and 'three'");
    }
}
