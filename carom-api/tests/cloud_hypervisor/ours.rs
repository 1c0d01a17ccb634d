// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Types in Carom's own OpenAPI document.

use carom_api::document;
use serde_json::Value;

/// Schemas of the document.
pub(crate) struct Ours(Value);

/// Returns the schema without the alternative of null.
fn without_null(schema: &Value) -> &Value {
    let choices = schema["oneOf"].as_array();
    choices.and_then(|choices| choices.iter().find(|choice| choice["type"] != "null")).unwrap_or(schema)
}

/// Removes fields that are in the document, but are not supported.
fn remove_refused(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            members.retain(|_, member| {
                !member["description"].as_str().is_some_and(|text| text.starts_with("Not supported: "))
            });
            members.values_mut().for_each(remove_refused);
        }
        Value::Array(elements) => elements.iter_mut().for_each(remove_refused),
        _ => {}
    }
}

impl Ours {
    pub(crate) fn read() -> Self {
        let mut schemas = serde_json::to_value(document::generate()).unwrap()["components"]["schemas"].take();
        remove_refused(&mut schemas);
        Self(schemas)
    }

    /// Follows a reference to the schema that it names.
    fn resolve<'s>(&'s self, schema: &'s Value) -> &'s Value {
        let schema = without_null(schema);
        match schema["$ref"].as_str() {
            Some(name) => &self.0[name.rsplit('/').next().unwrap()],
            None => schema,
        }
    }

    fn at(&self, schema: &str, path: &str) -> Option<&Value> {
        let mut found = &self.0[schema];
        for step in path.split('.') {
            let object = self.resolve(found);
            found = if step == "*" { &object["items"] } else { &object["properties"][step] };
        }
        found.is_object().then(|| self.resolve(found))
    }

    fn plain(&self, schema: &Value) -> String {
        let schema = self.resolve(schema);
        let kind = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().find(|kind| **kind != "null").unwrap(),
            kind => kind,
        };
        match kind.as_str().unwrap() {
            "array" => format!("[{}]", self.plain(&schema["items"])),
            kind => kind.into(),
        }
    }

    /// Returns the type of the field at `path` of `schema`, in the form of [`crate::theirs::Theirs::plain`].
    pub(crate) fn type_at(&self, schema: &str, path: &str) -> Option<String> {
        self.at(schema, path).map(|schema| self.plain(schema))
    }

    /// Returns the possible values of the string at `path`, if the schema enumerates them.
    pub(crate) fn values_at(&self, schema: &str, path: &str) -> Option<Vec<&str>> {
        // If the values have descriptions, the schema has an alternative (`oneOf`) for each value instead of `enum`. This function
        // ignores such schemas.
        let schema = self.at(schema, path)?;
        let own = schema["enum"].as_array().map(|values| values.iter().filter_map(Value::as_str).collect());
        own.filter(|values: &Vec<_>| !values.is_empty())
    }

    /// Calls `visit` with the path of each field below `schema`. If `visit` returns true, the walk continues inside the field.
    pub(crate) fn walk(&self, schema: &str, visit: &mut dyn FnMut(&str) -> bool) {
        self.walk_from(&self.0[schema], "", visit);
    }

    fn walk_from(&self, schema: &Value, place: &str, visit: &mut dyn FnMut(&str) -> bool) {
        for (name, field) in self.resolve(schema)["properties"].as_object().into_iter().flatten() {
            let path = format!("{place}{name}");
            if visit(&path) {
                let field = self.resolve(field);
                match &field["items"] {
                    Value::Null => self.walk_from(field, &format!("{path}."), visit),
                    items => self.walk_from(items, &format!("{path}.*."), visit),
                }
            }
        }
    }
}
