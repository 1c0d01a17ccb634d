// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Request bodies that are accepted or rejected, and the messages of rejections.

use carom_api::body::{Unknown, parse, parse_config, parse_device};
use carom_api::kinds::KINDS;
use carom_api::types::VmResize;
use carom_api::unsupported::UNSUPPORTED;
use carom_api::{DeviceConfig, Explain, Terms, VmConfig};
use proptest::prelude::*;
use serde_json::{Value, json};

fn config(body: &Value) -> Result<VmConfig, String> {
    parse_config(body.to_string().as_bytes(), Unknown::Refused)
}

#[test]
fn unknown_fields_are_refused_with_their_name_and_place() {
    for (body, words) in [
        (json!({"payload": {"kernel": "/k"}, "colour": 1}), ["colour", "unknown field"]),
        (json!({"payload": {"kernel": "/k", "flavour": 1}}), ["payload", "flavour"]),
        (
            json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}, {"path": "/e", "x": 1}]}),
            ["devices[1].x", "unknown field"],
        ),
        (json!({"payload": {"kernel": "/k"}, "memory": {"size": "2G"}}), ["memory.size", "2G"]),
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
fn unknown_fields_change_nothing_where_they_are_ignored() {
    let known = json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}]});
    let more = json!({"payload": {"kernel": "/k", "b": {}}, "devices": [{"path": "/d", "c": [1]}], "a\nb": 1});
    let read = |body: &Value| parse_config::<VmConfig>(body.to_string().as_bytes(), Unknown::Ignored);
    assert_eq!(read(&more), read(&known));
    assert_eq!(parse::<VmResize>(br#"{"desired_disk": 1}"#), Ok(VmResize::default()));
}

#[test]
fn unsupported_fields_are_refused_with_an_alternative() {
    let devices = "leave this field out; use disks, network devices, file systems, host devices (devices) or devices of other processes (user_devices)";
    for (field, message) in [
        (
            json!({"debug_console": {"mode": "Tty"}}),
            r#"debug_console.mode: "Tty" is not supported: the only supported value is "Off"; use the serial port (serial) or the paravirtual console (console)"#,
        ),
        (
            json!({"debug_console": {"mode": "File", "file": "/f"}}),
            r#"debug_console.mode: "File" is not supported: the only supported value is "Off"; use the serial port (serial) or the paravirtual console (console)"#,
        ),
        (
            json!({"debug_console": {"mode": "Off", "file": "/f"}}),
            r#"debug_console.file: "/f" is not supported: leave this field out; use the serial port (serial) or the paravirtual console (console)"#,
        ),
        (
            json!({"debug_console": {}}),
            r#"debug_console: is not supported: the only supported value is {"mode":"Off"}; use the serial port (serial) or the paravirtual console (console)"#,
        ),
        (json!({"console": {}}), "console: missing field `mode`"),
        (json!({"vdpa": [{"path": "/x"}]}), &format!("vdpa: is not supported: {devices}")),
        (
            json!({"disks": [{"path": "/x"}, {"path": "/y", "disable_aio": true}]}),
            "disks[1].disable_aio: true is not supported: the only supported value is false; disks use io_uring, or plain \
             system calls if the host kernel has no io_uring",
        ),
        (json!({"net": [[null, null]]}), "net[0]: invalid type: sequence, expected an object"),
        (json!({"disks": [["/x"]]}), "disks[0]: invalid type: sequence, expected an object"),
        (
            json!({"disks": [{"path": "/x", "image_type": "Vhdx"}]}),
            "disks[0].image_type: unknown variant `Vhdx`, expected one of `Raw`, `Unknown`, `Qcow2`, `FixedVhd`",
        ),
        (
            json!({"iommu": true}),
            "iommu: true is not supported: the only supported value is false; the VM has a virtio-iommu if a device has iommu on, or if iommu_bounce is given",
        ),
        (
            json!({"cpus": {"boot_vcpus": 1, "features": {"amx": true}}}),
            "cpus.features.amx: true is not supported: the only supported value is false; the guest has all features of the host's CPU except AMX",
        ),
        (
            json!({"memory": {"size": 1 << 30, "hotplugged_size": 5}}),
            "memory.hotplugged_size: 5 is not supported: the only supported value is 0; the VM boots with memory.size, and vm.resize adds RAM",
        ),
        (
            json!({"payload": {"igvm": "/a\nb"}}),
            r#"payload.igvm: "/a\nb" is not supported: leave this field out; the guest boots payload.kernel or payload.firmware"#,
        ),
        (
            json!({"payload": {"igvm": "x".repeat(65)}}),
            "payload.igvm: is not supported: leave this field out; the guest boots payload.kernel or payload.firmware",
        ),
        (
            json!({"devices": [{"path": "/d"}, {"path": "/e", "fd": 3}]}),
            "devices[1].fd: 3 is not supported: leave this field out; give the path of the device",
        ),
    ] {
        let mut body = json!({"payload": {"kernel": "/k"}});
        body.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
        assert_eq!(config(&body).unwrap_err(), message, "{body}");
    }
    let error = parse_device::<DeviceConfig>(br#"{"path": "/d", "fd": 3}"#, DeviceConfig::OPTION).unwrap_err();
    assert_eq!(error, "fd: 3 is not supported: leave this field out; give the path of the device");
}

#[test]
fn field_that_is_given_twice_is_refused() {
    let twice = |body: &[u8]| {
        for error in [
            parse_config::<VmConfig>(body, Unknown::Ignored).unwrap_err(),
            parse_device::<DeviceConfig>(body, DeviceConfig::OPTION).unwrap_err(),
            parse::<VmResize>(body).unwrap_err(),
        ] {
            assert_eq!(error, "memory.size: is given twice: leave one out");
        }
    };
    twice(br#"{"payload": {"kernel": "/k"}, "memory": {"size": 1073741824, "size": 67108864}}"#);
}

#[test]
fn unsupported_fields_with_neutral_values_are_ignored() {
    for field in UNSUPPORTED {
        let path = field.path;
        let mut body = json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}], "user_devices": [{"socket": "/s"}], "disks": [{"path": "/i"}], "net": [{}], "pmem": [{"file": "/f"}], "fs": [{"tag": "t", "socket": "/f"}], "rng": {}, "vsock": {"cid": 3, "socket": "/v"}, "balloon": {"size": 0},
            "memory": {"size": 0, "zones": [{"id": "z", "size": 1 << 30}]}, "numa": [{"guest_numa_id": 0}],
            "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "features": {}}, "serial": {"mode": "Null"}, "platform": {}, "console": {"mode": "Off"},
            "debug_console": {"mode": "Off"}});
        let pointer = format!("/{}", path.replace('*', "0").replace('.', "/"));
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        body.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(name.into(), field.neutral.value());
        config(&body).unwrap_or_else(|error| panic!("{body}: {error}"));
    }
}

/// Generates arbitrary JSON whose field names are sometimes valid.
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
            let config = parse_config::<VmConfig>(body, Unknown::Ignored)
                .and_then(|config| config.check().map(drop).map_err(|error| error.explain(Terms::Json)));
            let devices = KINDS.iter().map(|kind| kind.read(body).map(drop));
            for outcome in devices.chain([config, parse::<VmResize>(body).map(drop)]) {
                prop_assert!(outcome.is_ok() || outcome.is_err_and(|error| error.lines().count() == 1));
            }
        }
    }
}

#[test]
fn bodies_that_are_not_json_are_refused() {
    for body in [&b""[..], b"{", b"\xff\xfe", b"{\"payload\":}", &[b'['; 100_000]] {
        assert!(parse_config::<VmConfig>(body, Unknown::Ignored).unwrap_err().contains("JSON"));
    }
}
