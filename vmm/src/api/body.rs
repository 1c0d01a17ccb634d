// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reading request bodies: strictly, but for what Cloud Hypervisor's clients say that asks for nothing.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::json;
use crate::config::one_line;

/// Longest text in bytes that a refusal quotes.
const MAX_QUOTED: usize = 64;

/// Fields of Cloud Hypervisor that Carom has no use for, as path in the body and the value that asks for nothing: with
/// that value, or null, they are accepted and forgotten. `*` is every element of a list.
fn neutral() -> Vec<(&'static str, Value)> {
    vec![
        ("balloon", Value::Null),
        ("console.file", Value::Null),
        ("console.id", Value::Null),
        ("console.iommu", json!(false)),
        ("console.pci_device_id", Value::Null),
        ("console.pci_segment", json!(0)),
        ("console.socket", Value::Null),
        ("console", json!({"mode": "Off"})),
        ("cpus.affinity", Value::Null),
        ("cpus.core_scheduling", json!("Off")),
        ("cpus.features", json!({})),
        ("cpus.kvm_hyperv", json!(false)),
        ("cpus.topology", Value::Null),
        ("debug_console.file", Value::Null),
        ("debug_console.iobase", Value::Null),
        ("debug_console", json!({"mode": "Off"})),
        ("devices.*.pci_device_id", Value::Null),
        ("devices.*.pci_segment", json!(0)),
        ("devices.*.x_exclude_mmap_bars", json!([])),
        ("devices.*.x_nv_gpudirect_clique", Value::Null),
        ("disks", json!([])),
        ("fs", json!([])),
        ("generic_vhost_user", json!([])),
        ("iommu", json!(false)),
        ("landlock_enable", json!(false)),
        ("landlock_rules", json!([])),
        ("memory.hotplug_method", json!("Acpi")),
        ("memory.hotplug_size", json!(0)),
        ("memory.hotplugged_size", json!(0)),
        ("memory.hugepage_size", Value::Null),
        ("memory.mergeable", json!(false)),
        ("memory.prefault", json!(false)),
        ("memory.reserve", json!(false)),
        ("memory.zones", json!([])),
        ("net", json!([])),
        ("numa", json!([])),
        ("payload.firmware", Value::Null),
        ("payload.host_data", Value::Null),
        ("payload.igvm", Value::Null),
        ("pci_segments", json!([])),
        ("platform.iommu_segments", Value::Null),
        ("platform.num_pci_segments", json!(1)),
        ("platform.vfio_p2p_dma", json!(true)),
        ("pmem", json!([])),
        ("rate_limit_groups", json!([])),
        ("rng", Value::Null),
        ("rtc", Value::Null),
        ("serial.socket", Value::Null),
        ("tpm", Value::Null),
        ("user_devices.*.pci_device_id", Value::Null),
        ("user_devices.*.pci_segment", json!(0)),
        ("vdpa", json!([])),
        ("vsock", Value::Null),
        ("watchdog", json!(false)),
    ]
}

/// Takes out the field at `path` if its value is `neutral` or null.
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
        (Value::Object(fields), None) if fields.get(head).is_some_and(|field| field.is_null() || field == neutral) => {
            fields.remove(head);
        }
        _ => {}
    }
}

/// Takes out what asks for nothing, and refuses what asks for something that Carom does not have.
fn forget_neutral(value: &mut Value, neutral: &[(&str, Value)]) -> Result<(), String> {
    for (path, neutral) in neutral {
        strip(value, path, neutral);
    }
    // A console that is not off tells more than that it has a file.
    let mut left: Vec<_> = neutral.iter().collect();
    left.sort_by_key(|(path, _)| path.matches('.').count());
    left.into_iter().try_for_each(|(path, neutral)| check_absent(value, path, String::new(), neutral))
}

/// Refuses what is left at `path`. `place` is where `value` is in the body.
fn check_absent(value: &Value, path: &str, place: String, neutral: &Value) -> Result<(), String> {
    let (head, rest) = path.split_once('.').map_or((path, None), |(head, rest)| (head, Some(rest)));
    match (value, rest) {
        (Value::Array(elements), Some(rest)) if head == "*" => elements
            .iter()
            .enumerate()
            .try_for_each(|(index, element)| check_absent(element, rest, format!("{place}[{index}]"), neutral)),
        (Value::Object(fields), rest) => {
            let Some(field) = fields.get(head) else { return Ok(()) };
            let place = if place.is_empty() { head.to_string() } else { format!("{place}.{head}") };
            match rest {
                Some(rest) => check_absent(field, rest, place, neutral),
                None => Err(one_line(&not_supported(&place, field, neutral))),
            }
        }
        _ => Ok(()),
    }
}

/// Says that `value` is not supported at `place`, or which field of it is not.
fn not_supported(place: &str, value: &Value, neutral: &Value) -> String {
    if let (Value::Object(fields), Value::Object(neutral)) = (value, neutral)
        && !neutral.is_empty()
        && let wrong = fields.iter().filter(|(name, field)| neutral.get(*name) != Some(field))
        && let Some((name, field)) = wrong.min_by_key(|(name, _)| !neutral.contains_key(*name))
    {
        return not_supported(&format!("{place}.{name}"), field, neutral.get(name).unwrap_or(&Value::Null));
    }
    let what = match value {
        Value::Bool(_) | Value::Number(_) => format!("{value} "),
        Value::String(text) if text.len() <= MAX_QUOTED => format!("{value} "),
        _ => String::new(),
    };
    let right = match neutral {
        Value::Bool(_) | Value::Number(_) | Value::String(_) => format!("only {neutral} is"),
        Value::Object(fields) if !fields.is_empty() => format!("only {neutral} is"),
        _ => "leave it out".to_string(),
    };
    let instead = match place.split('.').next().unwrap_or_default() {
        "console" | "debug_console" => "; the guest's console is serial",
        "disks" | "fs" | "generic_vhost_user" | "net" | "pmem" | "vdpa" | "vsock" => {
            "; the guest can have devices of the host (devices) and of other processes (user_devices)"
        }
        _ => "",
    };
    format!("{place}: {what}is not supported: {right}{instead}")
}

/// Reads a body. The error is one line that names the field and the rule.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    read(json::read(body)?)
}

/// Reads the configuration of a VM, in which fields of Cloud Hypervisor's that ask for nothing are forgotten.
pub fn parse_config<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    let mut value = json::read(body)?;
    forget_neutral(&mut value, &neutral())?;
    read(value)
}

/// Reads the configuration of a device, likewise; `list` is the field that has those of its kind.
pub fn parse_device<T: DeserializeOwned>(body: &[u8], list: &str) -> Result<T, String> {
    let mut value = json::read(body)?;
    let of_list = |path: &'static str| path.strip_prefix(list)?.strip_prefix(".*.");
    let fields: Vec<_> = neutral().into_iter().filter_map(|(path, neutral)| Some((of_list(path)?, neutral))).collect();
    forget_neutral(&mut value, &fields)?;
    read(value)
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    if !value.is_object() {
        return Err("the body must be a JSON object".into());
    }
    serde_path_to_error::deserialize(value).map_err(|error| {
        let place = error.path().to_string();
        one_line(&if place == "." { error.inner().to_string() } else { format!("{place}: {}", error.inner()) })
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::api::types::VmResize;
    use crate::config::{DeviceConfig, UserDeviceConfig, VmConfig};

    fn config(body: &Value) -> Result<VmConfig, String> {
        parse_config(body.to_string().as_bytes())
    }

    #[test]
    fn kernel_alone_makes_a_configuration_with_cloud_hypervisors_defaults() {
        let mut config = config(&json!({"payload": {"kernel": "/k"}})).unwrap();
        config.complete();
        assert_eq!((config.cpus.boot_vcpus, config.cpus.max_vcpus), (1, 1));
        assert_eq!(config.memory.size, 512 << 20);
        config.validate().unwrap();
    }

    #[test]
    fn unknown_fields_are_refused_with_their_name_and_place() {
        for (body, words) in [
            (json!({"payload": {"kernel": "/k"}, "colour": 1}), ["colour", "unknown field"]),
            (json!({"payload": {"kernel": "/k", "flavour": 1}}), ["payload", "flavour"]),
            (
                json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}, {"path": "/e", "x": 1}]}),
                ["devices[1]", "`x`"],
            ),
            (json!({"payload": {"kernel": "/k"}, "memory": {"size": "2G"}}), ["memory.size", "2G"]),
            (json!({"payload": {}}), ["payload", "kernel"]),
            (json!({"payload": {"kernel": "/k"}, "a\nb": 1}), ["a\\nb", "unknown field"]),
            (json!({}), ["payload", "missing"]),
            (json!([{"kernel": "/k"}]), ["JSON", "object"]),
        ] {
            let error = config(&body).unwrap_err();
            assert!(words.iter().all(|word| error.contains(word)), "{body}: {error}");
            assert_eq!(error.lines().count(), 1);
        }
    }

    #[test]
    fn fields_that_ask_for_what_there_is_not_are_refused_as_that() {
        let devices =
            "leave it out; the guest can have devices of the host (devices) and of other processes (user_devices)";
        for (field, message) in [
            (
                json!({"console": {"mode": "Tty"}}),
                r#"console.mode: "Tty" is not supported: only "Off" is; the guest's console is serial"#,
            ),
            (
                json!({"console": {"mode": "File", "file": "/f"}}),
                r#"console.mode: "File" is not supported: only "Off" is; the guest's console is serial"#,
            ),
            (
                json!({"console": {"mode": "Off", "file": "/f"}}),
                r#"console.file: "/f" is not supported: leave it out; the guest's console is serial"#,
            ),
            (
                json!({"console": {}}),
                r#"console: is not supported: only {"mode":"Off"} is; the guest's console is serial"#,
            ),
            (json!({"disks": [{"path": "/x"}]}), &format!("disks: is not supported: {devices}")),
            (json!({"rng": {"src": "/dev/urandom"}}), "rng: is not supported: leave it out"),
            (json!({"watchdog": true}), "watchdog: true is not supported: only false is"),
            (
                json!({"cpus": {"boot_vcpus": 1, "features": {"amx": true}}}),
                "cpus.features: is not supported: leave it out",
            ),
            (
                json!({"memory": {"size": 1 << 30, "hotplug_size": 5}}),
                "memory.hotplug_size: 5 is not supported: only 0 is",
            ),
            (json!({"payload": {"firmware": "/a\nb"}}), r#"payload.firmware: "/a\nb" is not supported: leave it out"#),
            (json!({"payload": {"firmware": "x".repeat(65)}}), "payload.firmware: is not supported: leave it out"),
            (
                json!({"devices": [{"path": "/d"}, {"path": "/e", "pci_segment": 1}]}),
                "devices[1].pci_segment: 1 is not supported: only 0 is",
            ),
        ] {
            let mut body = json!({"payload": {"kernel": "/k"}});
            body.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
            assert_eq!(config(&body).unwrap_err(), message, "{body}");
        }
        let error = parse_device::<DeviceConfig>(br#"{"path": "/d", "pci_segment": 1}"#, "devices").unwrap_err();
        assert_eq!(error, "pci_segment: 1 is not supported: only 0 is");
    }

    #[test]
    fn field_that_is_given_twice_is_refused() {
        let twice = |body: &[u8]| {
            for error in [
                parse_config::<VmConfig>(body).unwrap_err(),
                parse_device::<DeviceConfig>(body, "devices").unwrap_err(),
                parse::<VmResize>(body).unwrap_err(),
            ] {
                assert_eq!(error, "memory.size: is given twice");
            }
        };
        twice(br#"{"payload": {"kernel": "/k"}, "memory": {"size": 1073741824, "size": 67108864}}"#);
    }

    #[test]
    fn fields_that_ask_for_nothing_are_forgotten() {
        for (path, value) in neutral() {
            let mut body = json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}], "user_devices": [{"socket": "/s"}],
                "memory": {"size": 1 << 30}, "cpus": {"boot_vcpus": 1, "max_vcpus": 1}, "serial": {"mode": "Null"}, "platform": {}, "console": {"mode": "Off"},
                "debug_console": {"mode": "Off"}});
            let pointer = format!("/{}", path.replace('*', "0").replace('.', "/"));
            let (parent, name) = pointer.rsplit_once('/').unwrap();
            body.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(name.into(), value);
            config(&body).unwrap_or_else(|error| panic!("{body}: {error}"));
        }
    }

    /// Any JSON, with names that mean something now and then.
    fn any_json() -> impl Strategy<Value = Value> {
        let names = [
            "payload",
            "kernel",
            "cpus",
            "boot_vcpus",
            "memory",
            "size",
            "devices",
            "path",
            "user_devices",
            "socket",
            "iommu",
            "id",
            "max",
            "console",
            "x",
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(5, 64, 8, move |inner| {
            let name = prop_oneof![prop::sample::select(names.to_vec()).prop_map(String::from), "(?s).{0,4}"];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                prop::collection::btree_map(name, inner, 0..8)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_body_is_read_or_refused_in_one_line(value in any_json(), cut in 0usize..64, noise in any::<Vec<u8>>()) {
            let text = value.to_string();
            let mut broken = text.as_bytes()[..text.len().saturating_sub(cut)].to_vec();
            broken.extend(&noise);
            for body in [text.as_bytes(), &broken, &noise] {
                for outcome in [
                    parse_config::<VmConfig>(body).and_then(|mut config| config.prepare().map_err(|error| error.in_json())),
                    parse_device::<DeviceConfig>(body, "devices").map(drop),
                    parse_device::<UserDeviceConfig>(body, "user_devices").map(drop),
                    parse::<VmResize>(body).map(drop),
                ] {
                    prop_assert!(outcome.is_ok() || outcome.is_err_and(|error| error.lines().count() == 1));
                }
            }
        }
    }

    #[test]
    fn bodies_that_are_no_json_are_refused() {
        for body in [&b""[..], b"{", b"\xff\xfe", b"{\"payload\":}", &[b'['; 100_000]] {
            assert!(parse_config::<VmConfig>(body).unwrap_err().contains("JSON"));
        }
    }
}
