// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Deserializer for option values. The fields of a type are the keys of its option. The type of a field determines the form of
//! its value:
//!
//! | type | value |
//! | --- | --- |
//! | `bool` | `on` or `off` |
//! | `u64` | a size, such as `64M` |
//! | other integers | a number |
//! | enum without data | the name of a variant in any case |
//! | sequence of integers | `2` or `[0,2-4]` |
//! | sequence of texts | `one` or `[one,"two, or more"]` |
//! | sequence of structs with two fields | `[0@[2,3],1@4]` |
//!
//! A key with an empty value counts as missing.

use std::marker::PhantomData;
use std::str::FromStr;
use std::{slice, vec};

use serde::de::value::MapDeserializer;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use super::grammar;
use super::{OptionList, Value, choice, on_or_off, parse_numbers};
use crate::error::ConfigError;
use crate::field::Field;
use crate::size::parse_size;

/// Type that can be parsed from an option value.
pub(crate) trait FromOption: DeserializeOwned {
    /// Option from whose value the type is parsed.
    const OPTION: Field;
    /// Words that may appear among the keys, without a value.
    const WORDS: &'static [&'static str] = &[];
    /// Differences between the option and the fields of the type.
    const SPECIAL: &'static [Special] = &[];

    /// Adds defaults to `list` before the fields are read. `list` is the parsed `text`.
    ///
    /// # Errors
    /// A rule does not hold.
    fn prepare(list: &mut OptionList, text: &str) -> Result<(), ConfigError> {
        let _ = (list, text);
        Ok(())
    }

    /// Reads the keys named by [`Special::By`].
    ///
    /// # Errors
    /// A rule does not hold.
    fn finish(&mut self, list: &OptionList) -> Result<(), ConfigError> {
        let _ = list;
        Ok(())
    }
}

/// Difference between the keys of an option and the fields of its type. Fields have their JSON names.
pub(crate) enum Special {
    /// The key has a different name than the field.
    Name(Field),
    /// [`FromOption::finish`] reads the field from these keys.
    By(&'static str, &'static [&'static str]),
    /// The field is a number without a size suffix.
    Number(&'static str),
    /// Words of the option that stand for variants of the field's enum.
    Words(&'static str, &'static [(&'static str, &'static str)]),
    /// Function that returns the error text for a malformed value.
    Rule(&'static str, fn(&str) -> String),
}

/// Parses the value of an option.
///
/// # Errors
/// The value is malformed, or breaks a rule.
pub(crate) fn read<T: FromOption>(text: &str) -> Result<T, ConfigError> {
    let mut list = OptionList { option: T::OPTION, values: Vec::new() };
    let argument = Argument { text, list: &mut list, of: PhantomData::<T> };
    let mut read = T::deserialize(argument).map_err(|error| located(error, T::OPTION))?;
    read.finish(&list)?;
    Ok(read)
}

/// Returns the result of parsing an empty option value.
pub(crate) fn defaults<T: FromOption>() -> T {
    read("").expect("no key of this option is required")
}

/// Implements [`FromStr`] for types that implement [`FromOption`].
macro_rules! from_str {
    ($config:ty) => {
        impl std::str::FromStr for $config {
            type Err = $crate::error::ConfigError;

            fn from_str(text: &str) -> Result<Self, $crate::error::ConfigError> {
                $crate::option_list::read(text)
            }
        }
    };
}
pub(crate) use from_str;

/// Implements [`FromOption`] and [`FromStr`] for a type whose fields are exactly the keys of its option.
macro_rules! from_option {
    ($config:ty) => {
        impl $crate::option_list::FromOption for $config {
            const OPTION: $crate::field::Field = Self::OPTION;
        }
        $crate::option_list::from_str!($config);
    };
}
pub(crate) use from_option;

/// Placeholder for the field of an error whose key is not known yet.
const NOWHERE: Field = Field::only("");

/// Replaces the placeholder field of an error.
fn located(mut error: ConfigError, field: Field) -> ConfigError {
    if error.field == NOWHERE {
        error.field = field;
    }
    error
}

impl Error for ConfigError {
    fn custom<T: std::fmt::Display>(rule: T) -> Self {
        Self::new(NOWHERE, rule.to_string())
    }

    fn missing_field(key: &'static str) -> Self {
        Self::custom(format_args!("'{key}=' is required"))
    }
}

/// Complete value of an option.
struct Argument<'a, T> {
    text: &'a str,
    list: &'a mut OptionList,
    of: PhantomData<T>,
}

impl<'de, T: FromOption> Deserializer<'de> for Argument<'_, T> {
    type Error = ConfigError;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        let keys: Vec<&str> =
            fields.iter().flat_map(|field| Spelling::of(T::OPTION, T::SPECIAL, field).keys()).collect();
        *self.list = OptionList::parse_with_words(T::OPTION, self.text, T::WORDS, &keys)?;
        T::prepare(self.list, self.text)?;
        visitor.visit_map(Fields { list: self.list, special: T::SPECIAL, fields: fields.iter(), next: None })
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, ConfigError> {
        Err(ConfigError::custom("is not the value of an option"))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}

/// Field with its entries in [`FromOption::SPECIAL`].
struct Spelling {
    name: Field,
    by: Option<&'static [&'static str]>,
    form: Form,
    rule: Option<fn(&str) -> String>,
}

impl Spelling {
    fn of(option: Field, special: &'static [Special], field: &'static str) -> Self {
        let mut spelling = Self { name: option.key(field), by: None, form: Form::Usual, rule: None };
        for special in special {
            match special {
                Special::Name(name) if name.json_key() == field => spelling.name = *name,
                Special::By(of, keys) if *of == field => spelling.by = Some(keys),
                Special::Number(of) if *of == field => spelling.form = Form::Number,
                Special::Words(of, words) if *of == field => spelling.form = Form::Words(words),
                Special::Rule(of, rule) if *of == field => spelling.rule = Some(*rule),
                _ => {}
            }
        }
        spelling
    }

    /// Returns the keys of the field.
    fn keys(&self) -> Vec<&'static str> {
        self.by.map_or_else(|| vec![self.name.option_key()], <[_]>::to_vec)
    }
}

/// Iterator over the fields that were given.
struct Fields<'a> {
    list: &'a OptionList,
    special: &'static [Special],
    fields: slice::Iter<'static, &'static str>,
    next: Option<(Spelling, Reader<'a>)>,
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = ConfigError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ConfigError> {
        for field in self.fields.by_ref() {
            let spelling = Spelling::of(self.list.option, self.special, field);
            let is_read_by_hand = spelling.by.is_some_and(|keys| keys.contains(field));
            let value = self.list.value(spelling.name.option_key()).filter(|value| !value.text.is_empty());
            if let Some(value) = value.filter(|_| !is_read_by_hand) {
                let reader = Reader { field: spelling.name, raw: &value.raw, form: spelling.form };
                self.next = Some((spelling, reader));
                return seed.deserialize(field.into_deserializer()).map(Some);
            }
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ConfigError> {
        let (spelling, reader) = self.next.take().ok_or_else(|| ConfigError::custom("has no value"))?;
        seed.deserialize(reader).map_err(|error| match spelling.rule {
            Some(rule) => reader.text().map_or_else(|error| error, |text| reader.error(rule(&text))),
            None => located(error, reader.field),
        })
    }
}

/// Syntax of a value.
#[derive(Clone, Copy)]
enum Form {
    /// Syntax that follows from the type.
    Usual,
    /// Number without a size suffix.
    Number,
    /// Words that stand for variants.
    Words(&'static [(&'static str, &'static str)]),
}

/// Reader for the value of one key.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    field: Field,
    raw: &'a str,
    form: Form,
}

impl<'a> Reader<'a> {
    /// Creates a reader for `field`. The type that is read determines the form of the value.
    pub(super) fn new(field: Field, value: &'a Value) -> Self {
        Self { field, raw: &value.raw, form: Form::Usual }
    }

    fn error(&self, rule: impl AsRef<str>) -> ConfigError {
        ConfigError::new(self.field, rule)
    }

    fn text(&self) -> Result<String, ConfigError> {
        grammar::unquoted(self.raw).map_err(|error| self.error(error.to_string()))
    }

    pub(super) fn number<T: FromStr>(self) -> Result<T, ConfigError> {
        let text = self.text()?;
        // All callers read unsigned integers.
        let most = u64::MAX >> (64 - 8 * size_of::<T>());
        text.parse().map_err(|_| self.error(format!("'{text}' is not a whole number from 0 to {most}")))
    }
}

/// Implements the deserialization of integers with [`Reader::number`].
macro_rules! numbers {
    ($($deserialize:ident $visit:ident,)*) => {
        $(
            fn $deserialize<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
                visitor.$visit(self.number()?)
            }
        )*
    };
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = ConfigError;

    numbers! { deserialize_u8 visit_u8, deserialize_u16 visit_u16, deserialize_u32 visit_u32, }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        visitor.visit_bool(on_or_off(self.field, &self.text()?)?)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        visitor.visit_u64(match self.form {
            Form::Number => self.number()?,
            _ => parse_size(&self.text()?).map_err(|rule| self.error(rule))?,
        })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ConfigError> {
        let choices: Vec<(String, &str)> = match self.form {
            Form::Words(words) => words.iter().map(|(word, variant)| (word.to_string(), *variant)).collect(),
            _ => variants.iter().map(|variant| (variant.to_lowercase(), *variant)).collect(),
        };
        let variant: &str = choice(self.field, &self.text()?, &choices)?;
        visitor.visit_enum(variant.into_deserializer())
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        visitor.visit_some(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        let elements = grammar::elements(self.raw).transpose().map_err(|error| self.error(error.to_string()))?;
        let (is_list, rest) = (elements.is_some(), elements.unwrap_or_else(|| vec![self.raw]).into_iter());
        visitor.visit_seq(Elements { list: self, is_list, rest, numbers: None })
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        visitor.visit_string(self.text()?)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 f32 f64 char str string bytes byte_buf unit unit_struct newtype_struct tuple tuple_struct map struct
        identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, ConfigError> for Reader<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Reader for the elements of a list. If the elements are numbers, the reader parses the whole list with the first element, because `2-4`
/// stands for three numbers.
struct Elements<'a> {
    list: Reader<'a>,
    /// True if the value is in brackets.
    is_list: bool,
    rest: vec::IntoIter<&'a str>,
    numbers: Option<vec::IntoIter<u16>>,
}

impl<'de> SeqAccess<'de> for Elements<'_> {
    type Error = ConfigError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ConfigError> {
        if let Some(numbers) = &mut self.numbers {
            return numbers.next().map(|number| seed.deserialize(number.into_deserializer())).transpose();
        }
        let element = self.rest.next();
        element.map(|raw| seed.deserialize(Element { raw, of: self })).transpose()
    }
}

/// Reader for one element of a list.
struct Element<'e, 'a> {
    raw: &'a str,
    of: &'e mut Elements<'a>,
}

impl<'de> Deserializer<'de> for Element<'_, '_> {
    type Error = ConfigError;

    fn deserialize_u16<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        let list = self.of.list;
        let mut numbers = parse_numbers(&list.text()?).map_err(|rule| list.error(rule))?.into_iter();
        let first = numbers
            .next()
            .ok_or_else(|| list.error("is an empty list in double quotes: write the list without double quotes"))?;
        self.of.numbers = Some(numbers);
        visitor.visit_u16(first)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        self.deserialize_u16(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        let list = self.of.list;
        let wrong =
            || list.error(format!("'{}' is not a list of pairs NUMBER@VALUE, such as [0@[2,3],1@[4]]", list.raw));
        let halves = grammar::split_at_sign(self.raw.trim()).filter(|_| self.of.is_list).ok_or_else(wrong)?;
        let halves = [halves.0, halves.1].map(|raw| Reader { raw, form: Form::Usual, ..list });
        if halves.iter().any(|half| half.raw.is_empty() || half.raw == "\"\"") {
            return Err(wrong());
        }
        // The halves are the fields 0 and 1 of the struct. Serde accepts the index of a field in place of its name.
        visitor.visit_map(MapDeserializer::new((0u64..).zip(halves)))
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ConfigError> {
        Reader { raw: self.raw, ..self.of.list }.deserialize_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq tuple
        tuple_struct struct enum identifier ignored_any
    }
}
