// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Names, types and defaults from Cloud Hypervisor's OpenAPI document, read from `document.json`. If the OpenAPI document lacks the default
//! of a field that always has a value, `document.json` has the default that the program uses.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Content of `document.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Theirs {
    /// Last release before this version of the document.
    pub(crate) release: String,
    /// Version of the document.
    pub(crate) document: String,
    pub(crate) operations: BTreeMap<String, Operation>,
    pub(crate) schemas: BTreeMap<String, Schema>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Operation {
    pub(crate) method: String,
    pub(crate) body: Option<String>,
    pub(crate) answer: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Schema {
    /// Object with these fields.
    Fields(BTreeMap<String, Field>),
    /// String with one of these values.
    Values(Vec<String>),
    /// Object with arbitrary names, whose values have this type.
    Map(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Field {
    /// `integer`, `string`, `boolean`, `object`, or the name of a schema. `[type]` is a list, `{type}` a map.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) default: Option<Value>,
    #[serde(default)]
    pub(crate) required: bool,
}

/// Returns the type of the elements of a list or map.
pub(crate) fn type_of_element(kind: &str) -> Option<&str> {
    let inner = kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']'));
    inner.or_else(|| kind.strip_prefix('{').and_then(|kind| kind.strip_suffix('}')))
}

impl Theirs {
    pub(crate) fn read() -> Self {
        serde_json::from_str(include_str!("document.json")).unwrap()
    }

    /// Returns the fields of an object schema.
    pub(crate) fn fields(&self, schema: &str) -> Option<&BTreeMap<String, Field>> {
        match self.schemas.get(schema)? {
            Schema::Fields(fields) => Some(fields),
            Schema::Values(_) | Schema::Map(_) => None,
        }
    }

    /// Returns the possible values of a string schema that enumerates them.
    pub(crate) fn values(&self, schema: &str) -> Option<&[String]> {
        match self.schemas.get(schema)? {
            Schema::Values(values) => Some(values),
            Schema::Fields(_) | Schema::Map(_) => None,
        }
    }

    /// Returns a type without schema names, for comparison: objects become `object`, and enumerated strings become `string`.
    pub(crate) fn plain(&self, kind: &str) -> String {
        if let Some(inner) = kind.strip_prefix('[').and_then(|kind| kind.strip_suffix(']')) {
            return format!("[{}]", self.plain(inner));
        }
        match self.schemas.get(kind) {
            Some(Schema::Values(_)) => "string".into(),
            Some(_) => "object".into(),
            None if kind.starts_with('{') => "object".into(),
            None => kind.into(),
        }
    }

    /// Calls `visit` with the path of each field below `schema`. If `visit` returns true, the walk continues inside the field.
    pub(crate) fn walk(&self, schema: &str, visit: &mut dyn FnMut(&str, &Field) -> bool) {
        self.walk_from(schema, "", visit);
    }

    fn walk_from(&self, schema: &str, place: &str, visit: &mut dyn FnMut(&str, &Field) -> bool) {
        for (name, field) in self.fields(schema).into_iter().flatten() {
            let path = format!("{place}{name}");
            if visit(&path, field) {
                let element = type_of_element(&field.kind);
                let inner = if element.is_some() { format!("{path}.*.") } else { format!("{path}.") };
                self.walk_from(element.unwrap_or(&field.kind), &inner, visit);
            }
        }
    }

    /// Checks an answer as a typed client reads it. All required fields and all fields with a default must exist, and every field
    /// must have its type.
    pub(crate) fn check(&self, value: &Value, kind: &str, place: &str) {
        match (self.plain(kind).as_str(), value) {
            ("integer", Value::Number(_)) | ("boolean", Value::Bool(_)) => {}
            ("string", Value::String(text)) => {
                assert!(self.values(kind).is_none_or(|values| values.contains(text)), "{place}: {text}");
            }
            (_, Value::Array(elements)) if kind.starts_with('[') => {
                for element in elements {
                    self.check(element, type_of_element(kind).unwrap(), &format!("{place}[]"));
                }
            }
            ("object", Value::Object(values)) => match self.schemas.get(kind) {
                Some(Schema::Fields(fields)) => {
                    for (name, field) in fields {
                        let place = format!("{place}.{name}");
                        match values.get(name) {
                            Some(value) => self.check(value, &field.kind, &place),
                            None => assert!(!field.required && field.default.is_none(), "{place} is missing"),
                        }
                    }
                }
                Some(Schema::Map(element)) => values.values().for_each(|value| self.check(value, element, place)),
                _ => {
                    let element = type_of_element(kind).into_iter();
                    element.for_each(|element| values.values().for_each(|value| self.check(value, element, place)));
                }
            },
            (kind, value) => panic!("{place}: {value} is not a {kind}"),
        }
    }
}
