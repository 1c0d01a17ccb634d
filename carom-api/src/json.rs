// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! JSON parser for request bodies. The parser rejects objects with a duplicate field, because two readers could pick different values of
//! that field.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use serde_json::{Map, Value};

use crate::error::{one_line, quotable};

/// Parses a JSON body. The error is one line: the syntax error, or the name of the duplicate field.
pub(super) fn read(body: &[u8]) -> Result<Value, String> {
    let mut place = String::new();
    let mut source = serde_json::Deserializer::from_slice(body);
    let value = Once(&mut place).deserialize(&mut source).and_then(|value| source.end().map(|()| value));
    value.map_err(|error| match error.classify() {
        Category::Data => one_line(&format!("{place}: is given twice: leave one out")),
        Category::Io | Category::Syntax | Category::Eof => format!("the text is not valid JSON: {error}"),
    })
}

/// Removes all object fields whose value is null.
pub(super) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, value| !value.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(elements) => elements.iter_mut().for_each(drop_nulls),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Parser of one value, with the value's position. On an error, the position stays at the wrong value.
struct Once<'p>(&'p mut String);

impl Once<'_> {
    /// Appends `step` to the position, and reads the value at the new position with `read`.
    fn step<T, E>(&mut self, step: fmt::Arguments<'_>, read: impl FnOnce(Once<'_>) -> Result<T, E>) -> Result<T, E> {
        let len = self.0.len();
        self.0.push_str(&step.to_string());
        let value = read(Once(self.0))?;
        self.0.truncate(len);
        Ok(value)
    }
}

impl<'de> DeserializeSeed<'de> for Once<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Once<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut source: A) -> Result<Value, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) =
            self.step(format_args!("[{}]", elements.len()), |element| source.next_element_seed(element))?
        {
            elements.push(element);
        }
        Ok(Value::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut source: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = source.next_key::<String>()? {
            let dot = if self.0.is_empty() { "" } else { "." };
            let value = self.step(format_args!("{dot}{}", quotable(&name)), |value| {
                if fields.contains_key(&name) { Err(A::Error::custom("twice")) } else { source.next_value_seed(value) }
            })?;
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_that_is_given_twice_is_refused_with_its_place() {
        for (body, place) in [
            (r#"{"a": 1, "a": 1}"#, "a"),
            (r#"{"a": {"b": 1, "c": {}, "b": null}}"#, "a.b"),
            (r#"{"z": [], "a": [{"b": 1}, {"b": {"c": 1, "d": [1], "c": 2}}], "b": 1}"#, "a[1].b.c"),
            (r#"{"a": 1, "\u0061": 1}"#, "a"),
            (r#"{"a\nb": 1, "a\nb": 1}"#, "a\\nb"),
        ] {
            assert_eq!(read(body.as_bytes()).unwrap_err(), format!("{place}: is given twice: leave one out"));
        }
    }

    #[test]
    fn body_without_duplicate_fields_is_read_unchanged() {
        for body in [
            r#"{"a": {"b": 1}, "b": {"b": -1}, "c": [{"b": 1.5e300}, {"b": 18446744073709551615}], "": "\u00e4\n"}"#,
            r#"[null, true, [], {}, "", -9223372036854775808]"#,
            " 0 ",
        ] {
            assert_eq!(read(body.as_bytes()).unwrap(), serde_json::from_str::<Value>(body).unwrap());
        }
    }

    #[test]
    fn body_that_is_not_json_is_refused() {
        let deep = "[".repeat(100_000);
        for body in ["", "{", "{} {}", "{\"a\": 1e999}", "\u{7f}", &deep] {
            assert!(read(body.as_bytes()).unwrap_err().starts_with("the text is not valid JSON: "), "{body}");
        }
    }
}
