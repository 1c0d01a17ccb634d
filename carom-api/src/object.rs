// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Deserializer for JSON objects. Without this deserializer, serde also accepts an array of the field values in place of an object.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads a required object.
pub(crate) fn required<'de, D: Deserializer<'de>, T: Deserialize<'de>>(object: D) -> Result<T, D::Error> {
    Object::deserialize(object).map(|Object(value)| value)
}

/// Reads an object, or `None` for null.
pub(crate) fn or_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(object: D) -> Result<Option<T>, D::Error> {
    let object: Option<Object<T>> = Option::deserialize(object)?;
    Ok(object.map(|Object(value)| value))
}

/// Reads a list of objects. Clients of Cloud Hypervisor may send null for an empty list.
pub(crate) fn list_or_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(list: D) -> Result<Vec<T>, D::Error> {
    let list: Option<Vec<Object<T>>> = Option::deserialize(list)?;
    Ok(list.unwrap_or_default().into_iter().map(|Object(element)| element).collect())
}

/// Value that can be read only from a JSON object.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(object: D) -> Result<Self, D::Error> {
        object.deserialize_map(ObjectVisitor(PhantomData))
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, fields: M) -> Result<Object<T>, M::Error> {
        T::deserialize(MapAccessDeserializer::new(fields)).map(Object)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::body::{Unknown, parse_config};
    use crate::kinds::{KINDS, Number};
    use crate::vm_config::VmConfig;

    #[test]
    fn array_is_refused_in_place_of_an_object() {
        let mut fields: Vec<&str> = KINDS.iter().map(|kind| kind.field.json()).collect();
        fields.extend(["payload", "cpus", "memory", "platform", "serial"]);
        for field in fields {
            for array in [json!([]), json!(["/x", true]), json!([1, 2, null, 46, true])] {
                let many = KINDS.iter().any(|kind| kind.field.json() == field && kind.number == Number::Many);
                let (value, place) = if many { (json!([array]), format!("{field}[0]")) } else { (array, field.into()) };
                let mut body = json!({"payload": {"kernel": "/k"}});
                body[field] = value;
                let refused = parse_config::<VmConfig>(body.to_string().as_bytes(), Unknown::Refused).unwrap_err();
                assert_eq!(refused, format!("{place}: invalid type: sequence, expected an object"));
            }
        }
        let body = br#"{"payload": {"kernel": "/k"}, "cpus": {"boot_vcpus": 1, "topology": [1, 1, 1, 1]}}"#;
        let refused = parse_config::<VmConfig>(body, Unknown::Refused).unwrap_err();
        assert_eq!(refused, "cpus.topology: invalid type: sequence, expected an object");
    }
}
