// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Parsing of request bodies.
//!
//! Some fields of Cloud Hypervisor are unsupported. Carom drops such a field if its value is neutral: a neutral value requests no feature.
//! In a request, an unknown field may come from a newer client, so Carom logs a warning and ignores the field. In a file or option that a
//! user wrote, an unknown field is an error.

use serde::de::DeserializeOwned;
use serde_ignored::Path;
use serde_json::Value;

use crate::error::{MAX_QUOTED, one_line, quotable};
use crate::field::Field;
use crate::json;
use crate::unsupported::{Neutral, UNSUPPORTED, Unsupported};

/// Maximum bytes of the deserializer's message that an error includes. The message quotes the wrong value, which can be long.
const MAX_REASON: usize = 512;

/// Removes the field at `path` if its value is `neutral`.
fn strip(value: &mut Value, path: &str, neutral: &Value) {
    let (head, rest) = path.split_once('.').map_or((path, None), |(head, rest)| (head, Some(rest)));
    match (value, rest) {
        (Value::Array(elements), Some(rest)) if head == "*" => {
            elements.iter_mut().for_each(|element| strip(element, rest, neutral));
        }
        (Value::Object(fields), Some(rest)) => {
            if let Some(field) = fields.get_mut(head) {
                strip(field, rest, neutral);
            }
        }
        (Value::Object(fields), None) if fields.get(head) == Some(neutral) => {
            fields.remove(head);
        }
        _ => {}
    }
}

/// Removes unsupported fields whose value is neutral. Rejects `value` if another unsupported field remains, because its value requests a
/// missing feature.
fn forget_neutral(value: &mut Value, fields: &[Unsupported]) -> Result<(), String> {
    // In every field, null means that no value is given.
    json::drop_nulls(value);
    // The table lists an object before its fields. Iterate in reverse: after its neutral fields are removed, the object itself may be
    // neutral.
    for field in fields.iter().rev() {
        strip(value, field.path, &field.neutral.value());
    }
    // Check `cpus.features` (neutral value `NoFields`) after all other fields, so that an error names one feature instead of the whole
    // object. In the table, `debug_console` precedes its fields. If both its mode and its file are wrong, the error names the mode.
    let (lists, others): (Vec<&Unsupported>, Vec<_>) =
        fields.iter().partition(|field| field.neutral == Neutral::NoFields);
    others.into_iter().chain(lists).try_for_each(|field| check_absent(value, field.path, String::new(), field))
}

/// Rejects the body if `value` has a field at `path`. The caller has already removed neutral values. `place` is the position of `value` in
/// the body.
fn check_absent(value: &Value, path: &str, place: String, field: &Unsupported) -> Result<(), String> {
    let (head, rest) = path.split_once('.').map_or((path, None), |(head, rest)| (head, Some(rest)));
    match (value, rest) {
        (Value::Array(elements), Some(rest)) if head == "*" => elements
            .iter()
            .enumerate()
            .try_for_each(|(index, element)| check_absent(element, rest, format!("{place}[{index}]"), field)),
        (Value::Object(fields), rest) => {
            let Some(found) = fields.get(head) else { return Ok(()) };
            let place = if place.is_empty() { head.to_string() } else { format!("{place}.{head}") };
            match rest {
                Some(rest) => check_absent(found, rest, place, field),
                None => {
                    let what = not_supported(&place, found, &field.neutral.value());
                    Err(one_line(&format!("{what}; {}", field.instead)))
                }
            }
        }
        _ => Ok(()),
    }
}

/// Returns the message that `value` is not supported at `place`. If both values are objects and `neutral` has fields, the message names one
/// wrong field of `value`.
fn not_supported(place: &str, value: &Value, neutral: &Value) -> String {
    if let (Value::Object(fields), Value::Object(neutral)) = (value, neutral)
        && !neutral.is_empty()
        && let wrong = fields.iter().filter(|(name, field)| neutral.get(*name) != Some(field))
        && let Some((name, field)) = wrong.min_by_key(|(name, _)| !neutral.contains_key(*name))
    {
        return not_supported(&format!("{place}.{}", quotable(name)), field, neutral.get(name).unwrap_or(&Value::Null));
    }
    let what = match value {
        Value::Bool(_) | Value::Number(_) => format!("{value} "),
        Value::String(text) if text.len() <= MAX_QUOTED => format!("{value} "),
        _ => String::new(),
    };
    let right = match neutral {
        Value::Bool(_) | Value::Number(_) | Value::String(_) => format!("the only supported value is {neutral}"),
        Value::Object(fields) if !fields.is_empty() => format!("the only supported value is {neutral}"),
        _ => "leave this field out".to_string(),
    };
    format!("{place}: {what}is not supported: {right}")
}

/// Treatment of unknown fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// The field is logged and ignored.
    Ignored,
    /// The body is rejected.
    Refused,
}

/// Maximum number of unknown fields that are logged by name for one body.
const MAX_LOGGED: usize = 8;

/// Parses a request body from a client.
///
/// # Errors
/// One line that names the wrong field and the rule that it breaks.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    read(json::read(body)?, Unknown::Ignored)
}

/// Parses the configuration of a VM. Unsupported fields of Cloud Hypervisor are dropped if their value is neutral.
///
/// # Errors
/// One line that names the wrong field and the rule that it breaks.
pub fn parse_config<T: DeserializeOwned>(body: &[u8], unknown: Unknown) -> Result<T, String> {
    let mut value = json::read(body)?;
    forget_neutral(&mut value, UNSUPPORTED)?;
    read(value, unknown)
}

/// Parses the configuration of a device by the rules of [`parse_config`]. `kind` is the field of the VM configuration that holds
/// the device.
///
/// # Errors
/// One line that names the wrong field and the rule that it breaks.
pub fn parse_device<T: DeserializeOwned>(body: &[u8], kind: Field) -> Result<T, String> {
    let mut value = json::read(body)?;
    let of_device = |path: &'static str| {
        let path = path.strip_prefix(kind.json())?.strip_prefix('.')?;
        Some(path.strip_prefix("*.").unwrap_or(path))
    };
    let fields: Vec<_> =
        UNSUPPORTED.iter().filter_map(|field| Some(Unsupported { path: of_device(field.path)?, ..*field })).collect();
    forget_neutral(&mut value, &fields)?;
    read(value, Unknown::Ignored)
}

/// Parses a file in Carom's own format, which allows no unknown fields.
///
/// # Errors
/// One line that says where the mistake is and why the file is rejected.
pub fn parse_own<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    read(json::read(text)?, Unknown::Refused)
}

fn read<T: DeserializeOwned>(value: Value, unknown: Unknown) -> Result<T, String> {
    if !value.is_object() {
        return Err("the JSON text must be an object: enclose the fields in { and }".into());
    }
    let (mut names, mut count) = (Vec::new(), 0);
    let mut note = |path: Path<'_>| {
        count += 1;
        if names.len() < MAX_LOGGED {
            names.push(place_of(&path));
        }
    };
    let read = serde_path_to_error::deserialize(serde_ignored::Deserializer::new(value, &mut note));
    let read = read.map_err(|error| {
        let place = error.path().to_string();
        let reason = shortened(error.inner().to_string());
        one_line(&if place == "." { reason } else { format!("{place}: {reason}") })
    })?;
    match (unknown, names.first()) {
        (Unknown::Refused, Some(name)) => {
            return Err(one_line(&format!("{name}: unknown field; correct the name, or leave this field out")));
        }
        (Unknown::Ignored, Some(_)) => {
            let more = if count > names.len() { format!(" and {} more", count - names.len()) } else { String::new() };
            log::warn!(
                "{}",
                one_line(&format!(
                    "unknown fields of a request are ignored: {}{more}; correct the names, or leave these fields out",
                    names.join(", ")
                ))
            );
        }
        (_, None) => {}
    }
    Ok(read)
}

/// Removes the middle of a deserializer's message if the message is longer than [`MAX_REASON`]. The start of the message names the wrong
/// value, and its end names the expected values.
fn shortened(reason: String) -> String {
    if reason.len() <= MAX_REASON {
        return reason;
    }
    let head = reason.floor_char_boundary(MAX_REASON / 2);
    let tail = reason.ceil_char_boundary(reason.len() - MAX_REASON / 2);
    format!("{}…{}", &reason[..head], &reason[tail..])
}

/// Returns the position of a field in the notation of messages, such as `devices[1].x`.
fn place_of(path: &Path<'_>) -> String {
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", place_of(parent)),
        Path::Map { parent, key } => match place_of(parent) {
            parent if parent.is_empty() => quotable(key).into_owned(),
            parent => format!("{parent}.{}", quotable(key)),
        },
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => place_of(parent),
    }
}
