// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Form of a configuration in answers of `vm.info`.
//!
//! Some clients deserialize the answer into their own types. These clients need each field that Cloud Hypervisor always reports, and they
//! cannot read null for an optional field. So the answer omits missing values, and contains the neutral values of unsupported fields.

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::json;
use crate::unsupported::UNSUPPORTED;
use crate::vm_config::VmConfig;

/// Serializes the configuration in this form.
pub(crate) fn serialize<S: Serializer>(config: &VmConfig, serializer: S) -> Result<S::Ok, S::Error> {
    let mut answer = serde_json::to_value(config).map_err(serde::ser::Error::custom)?;
    json::drop_nulls(&mut answer);
    for field in UNSUPPORTED {
        if let Some(value) = field.neutral.in_answers() {
            add(&mut answer, field.path, value);
        }
    }
    answer.serialize(serializer)
}

/// Adds a field if its object exists and lacks the field.
fn add(answer: &mut Value, path: &str, value: Value) {
    let (head, rest) = path.split_once('.').map_or((path, None), |(head, rest)| (head, Some(rest)));
    match (answer, rest) {
        (Value::Array(elements), Some(rest)) if head == "*" => {
            elements.iter_mut().for_each(|element| add(element, rest, value.clone()));
        }
        (Value::Object(fields), Some(rest)) => {
            if let Some(field) = fields.get_mut(head) {
                add(field, rest, value);
            }
        }
        (Value::Object(fields), None) => {
            fields.entry(head).or_insert(value);
        }
        _ => {}
    }
}
