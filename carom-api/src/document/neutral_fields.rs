// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Neutral values in the OpenAPI document: null for every optional field, and the neutral value of each Cloud Hypervisor field that Carom
//! does not support.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use utoipa::openapi::schema::{
    ArrayBuilder, ArrayItems, Object, ObjectBuilder, OneOfBuilder, Schema, SchemaType, Type,
};
use utoipa::openapi::{Ref, RefOr};

use crate::unsupported::{Neutral, UNSUPPORTED, Unsupported};

type Schemas = BTreeMap<String, RefOr<Schema>>;

/// Prefix of references to schemas.
const PREFIX: &str = "#/components/schemas/";

/// Adds neutral values to the schema `root` of the configuration, and to all schemas that `root` refers to.
pub(super) fn complete(schemas: &mut Schemas, root: &str) {
    let mut names = BTreeSet::new();
    collect(schemas, root, &mut names);
    for name in &names {
        if let Some(object) = object(schemas, name) {
            accept_null(object);
        }
    }
    for field in UNSUPPORTED {
        add(schemas, root, field);
    }
}

/// Collects the names of all schemas that `name` refers to, directly or indirectly.
fn collect(schemas: &Schemas, name: &str, names: &mut BTreeSet<String>) {
    if let Some(RefOr::T(Schema::Object(object))) = schemas.get(name)
        && names.insert(name.into())
    {
        for part in object.properties.values().filter_map(referred) {
            collect(schemas, &part, names);
        }
    }
}

fn object<'s>(schemas: &'s mut Schemas, name: &str) -> Option<&'s mut Object> {
    match schemas.get_mut(name) {
        Some(RefOr::T(Schema::Object(object))) => Some(object),
        _ => None,
    }
}

/// Returns the name of the schema that a property refers to. The property is a reference, an optional reference or a list of references.
fn referred(property: &RefOr<Schema>) -> Option<String> {
    match property {
        RefOr::Ref(reference) => reference.ref_location.strip_prefix(PREFIX).map(String::from),
        RefOr::T(Schema::OneOf(one_of)) => one_of.items.iter().find_map(referred),
        RefOr::T(Schema::Array(array)) => match &array.items {
            ArrayItems::RefOrSchema(items) => referred(items),
            ArrayItems::False => None,
        },
        RefOr::T(_) => None,
    }
}

/// Allows null for all optional fields.
fn accept_null(object: &mut Object) {
    for (name, property) in &mut object.properties {
        if object.required.contains(name) {
            continue;
        }
        match property {
            RefOr::Ref(reference) => {
                let description = std::mem::take(&mut reference.description);
                let one_of = OneOfBuilder::new()
                    .item(Ref::new(reference.ref_location.clone()))
                    .item(ObjectBuilder::new().schema_type(Type::Null))
                    .description(Some(description));
                *property = RefOr::T(one_of.into());
            }
            RefOr::T(Schema::Object(object)) => or_null(&mut object.schema_type),
            RefOr::T(Schema::Array(array)) => or_null(&mut array.schema_type),
            RefOr::T(_) => {}
        }
    }
}

fn or_null(schema_type: &mut SchemaType) {
    if let SchemaType::Type(only) = schema_type {
        *schema_type = SchemaType::Array(vec![only.clone(), Type::Null]);
    }
}

/// Adds an unsupported field to the schema of its object.
fn add(schemas: &mut Schemas, root: &str, field: &Unsupported) {
    let mut name = root.to_string();
    let mut path = field.path;
    while let Some((head, rest)) = path.split_once('.') {
        let property = object(schemas, &name).and_then(|object| object.properties.get_mut(head));
        match property {
            // An earlier call of this function added the object, which is unsupported too.
            Some(RefOr::T(Schema::Object(within))) => {
                within.properties.entry(rest.into()).or_insert_with(|| RefOr::T(schema(field)));
                return;
            }
            Some(property) => match referred(property) {
                Some(part) => name = part,
                None => return,
            },
            None => return,
        }
        path = rest.strip_prefix("*.").unwrap_or(rest);
    }
    if let Some(object) = object(schemas, &name) {
        object.properties.entry(path.into()).or_insert_with(|| RefOr::T(schema(field)));
    }
}

/// Returns the schema of an unsupported field, which allows only null and the neutral value.
fn schema(field: &Unsupported) -> Schema {
    let description = Some(format!("Not supported: {}.", field.instead));
    let only = |of: Type, value: Value| {
        let values = [value, Value::Null];
        let types = SchemaType::Array(vec![of, Type::Null]);
        ObjectBuilder::new().schema_type(types).enum_values(Some(values)).description(description.clone()).into()
    };
    let or_null = |of: Type| SchemaType::Array(vec![of, Type::Null]);
    match field.neutral {
        Neutral::Null => ObjectBuilder::new().schema_type(Type::Null).description(description).into(),
        Neutral::Bool(_) => only(Type::Boolean, field.neutral.value()),
        Neutral::Number(_) => only(Type::Integer, field.neutral.value()),
        Neutral::Text(_) => only(Type::String, field.neutral.value()),
        Neutral::NoElements => {
            ArrayBuilder::new().schema_type(or_null(Type::Array)).max_items(Some(0)).description(description).into()
        }
        Neutral::NoFields => ObjectBuilder::new().schema_type(or_null(Type::Object)).description(description).into(),
        Neutral::ModeOff => {
            let mode = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(["Off"]));
            let object = ObjectBuilder::new().schema_type(or_null(Type::Object)).description(description);
            object.property("mode", mode).required("mode").into()
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn each_field_of_the_table_is_in_the_document_with_its_value() {
        let document = serde_json::to_value(crate::document::generate()).unwrap();
        let schemas = &document["components"]["schemas"];
        for (name, property, expected) in
            [("VmConfig", "iommu", json!([false, null])), ("CpusConfig", "core_scheduling", json!(["Off", null]))]
        {
            assert_eq!(schemas[name]["properties"][property]["enum"], expected, "{name} {property}");
        }
        let console = &schemas["VmConfig"]["properties"]["debug_console"];
        assert_eq!(console["properties"]["iobase"]["enum"], json!([0xe9, null]));
        let descriptions = document.to_string();
        let described = descriptions.matches("\"Not supported: ").count();
        assert_eq!(described, UNSUPPORTED.len());
    }

    #[test]
    fn only_optional_fields_accept_null() {
        let document = serde_json::to_value(crate::document::generate()).unwrap();
        let of = |name: &str, property: &str| document["components"]["schemas"][name]["properties"][property].clone();
        let is_null = |value: &Value| *value == json!({"type": "null"});
        assert!(of("VmConfig", "serial")["oneOf"].as_array().unwrap().iter().any(is_null));
        assert_eq!(of("VmConfig", "pvpanic")["type"], json!(["boolean", "null"]));
        assert_eq!(of("MemoryConfig", "size")["type"], "integer");
    }
}
