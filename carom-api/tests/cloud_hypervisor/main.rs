// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Compares Carom's API with Cloud Hypervisor's API by names and types: fields that Carom supports, rejects and reports. Generates
//! `docs/cloud-hypervisor.md`.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod list;
mod options;
mod ours;
mod theirs;

use std::collections::BTreeSet;

use carom_api::body::{Unknown, parse_config};
use carom_api::types::{PciDeviceInfo, VmCounters, VmInfo, VmmPing};
use carom_api::unsupported::{Neutral, UNSUPPORTED};
use carom_api::{Explain, Terms, VmConfig};
use serde_json::{Value, json};

use crate::ours::Ours;
use crate::theirs::{Theirs, type_of_element};

/// Fields that answers must always contain, because Cloud Hypervisor's Rust clients require them. Cloud Hypervisor's document has
/// no default for these fields.
const NEEDED: &[&str] = &["config.console", "config.cpus", "config.memory", "config.platform", "config.serial"];

/// Fields whose neutral value in Carom is not Cloud Hypervisor's default, with the reason.
const OTHER_DEFAULTS: &[(&str, &str)] = &[
    ("cpus.core_scheduling", "Cloud Hypervisor's default keeps other threads off the cores of vCPUs, Carom does not"),
    ("memory.hotplug_size", "there is no default"),
    ("memory.hotplugged_size", "there is no default"),
    ("debug_console.iobase", "there is no default in the document"),
];

/// Returns a VM with every kind of device.
fn full() -> Value {
    json!({
        "payload": {"kernel": "/k", "initramfs": "/i", "cmdline": "console=ttyS0"},
        "devices": [{"path": "/d", "iommu": true}],
        "user_devices": [{"socket": "/s", "iommu": true, "id": "u"}],
        "disks": [{"path": "/i"}],
        // Cloud Hypervisor's document has defaults for these addresses, but neither Cloud Hypervisor nor Carom applies the defaults.
        "net": [{"tap": "tap0", "mac": "02:00:00:00:00:01", "ip": "192.168.249.1", "mask": "255.255.255.0"}],
        "fs": [{"tag": "t", "socket": "/f"}],
        "memory": {"size": 1 << 30, "shared": true},
        "pmem": [{"file": "/f", "size": 2097152}],
        "rng": {"src": "/dev/urandom"},
        "vsock": {"cid": 3, "socket": "/v"},
        "balloon": {"size": 4096},
        "console": {"mode": "Pty", "file": "/dev/pts/5", "iommu": true},
        "iommu_bounce": {},
    })
}

fn read(body: &Value) -> Result<VmConfig, String> {
    parse_config(body.to_string().as_bytes(), Unknown::Refused)
}

/// Returns the answer of `vm.info` for a VM that was created from this body.
fn answer(body: &Value) -> Value {
    let config = VmConfig::clone(&read(body).unwrap().check().unwrap());
    let size = config.memory.size;
    let info: VmInfo = serde_json::from_value(json!({"config": config, "state": "Created", "memory_actual_size": size,
        "device_tree": {"_vfio0": {"id": "_vfio0", "resources": [], "children": [], "pci_bdf": "0000:00:02.0"}}}))
    .unwrap();
    serde_json::to_value(info).unwrap()
}

#[test]
fn every_vm_config_field_is_supported_or_listed_as_refused() {
    let (theirs, ours) = (Theirs::read(), Ours::read());
    let mut seen = BTreeSet::new();
    theirs.walk("VmConfig", &mut |path, field| {
        seen.insert(path.to_string());
        if UNSUPPORTED.iter().any(|refused| refused.path == path) {
            // Fields of an unsupported object have no counterpart to compare with.
            return UNSUPPORTED.iter().any(|inner| inner.path.starts_with(&format!("{path}.")));
        }
        if let Some(object) = path.strip_suffix(".mode")
            && UNSUPPORTED.iter().any(|refused| refused.path == object && refused.neutral == Neutral::ModeOff)
        {
            return false;
        }
        let ours = ours.type_at("VmConfig", path);
        let ours = ours.unwrap_or_else(|| panic!("{path} is neither in VmConfig nor in UNSUPPORTED"));
        assert_eq!(ours, theirs.plain(&field.kind), "the type of {path}");
        true
    });
    assert!(seen.len() > 100, "{}", seen.len());
}

#[test]
fn field_is_either_supported_or_refused() {
    let ours = Ours::read();
    for refused in UNSUPPORTED {
        assert_eq!(ours.type_at("VmConfig", refused.path), None, "{} is both supported and refused", refused.path);
    }
}

#[test]
fn neutral_value_is_the_default_of_cloud_hypervisor() {
    let theirs = Theirs::read();
    theirs.walk("VmConfig", &mut |path, field| {
        if let (Some(default), Some(refused)) =
            (&field.default, UNSUPPORTED.iter().find(|refused| refused.path == path))
            && !matches!(refused.neutral, Neutral::Null)
            && !OTHER_DEFAULTS.iter().any(|(other, _)| *other == path)
        {
            assert_eq!(&refused.neutral.value(), default, "{path}");
        }
        true
    });
}

#[test]
fn answer_has_every_field_that_typed_clients_need_and_no_null() {
    let theirs = Theirs::read();
    for body in [full(), json!({"payload": {"kernel": "/k"}})] {
        let answer = answer(&body);
        theirs.check(&answer, "VmInfo", "");
        for path in NEEDED {
            assert!(answer.pointer(&format!("/{}", path.replace('.', "/"))).is_some_and(Value::is_object), "{path}");
        }
    }
    let config = &answer(&full())["config"];
    for (pointer, value) in [
        ("/console/mode", json!("Pty")),
        ("/cpus/nested", json!(true)),
        ("/cpus/features/amx", json!(false)),
        ("/memory/hotplug_size", json!(0)),
        ("/platform/num_pci_segments", json!(1)),
        ("/devices/0/pci_segment", json!(0)),
        ("/user_devices/0/id", json!("u")),
        ("/watchdog", json!(false)),
        ("/landlock_enable", json!(false)),
    ] {
        assert_eq!(config.pointer(pointer), Some(&value), "{pointer}");
    }
}

#[test]
fn other_answers_have_every_field_that_typed_clients_need() {
    let theirs = Theirs::read();
    let ping = VmmPing { build_version: "1".into(), version: "1".into(), pid: 1, features: vec!["kvm".into()] };
    theirs.check(&serde_json::to_value(ping).unwrap(), "VmmPingResponse", "ping");
    let added = PciDeviceInfo { id: "x".into(), bdf: "0000:00:02.0".into() };
    theirs.check(&serde_json::to_value(added).unwrap(), "PciDeviceInfo", "added");
    let counters = VmCounters::from([("_rng".into(), [("bytes".into(), 1)].into())]);
    theirs.check(&serde_json::to_value(counters).unwrap(), "VmCounters", "counters");
}

#[test]
fn reported_configuration_can_be_sent_again() {
    // A client must not send a generated name.
    let without_names = |mut config: Value| {
        for list in ["devices", "disks", "net", "fs", "pmem"] {
            config[list][0].as_object_mut().unwrap().remove("id");
        }
        for single in ["rng", "vsock", "balloon", "console"] {
            config[single].as_object_mut().unwrap().remove("id");
        }
        config
    };
    let again = read(&without_names(answer(&full())["config"].clone())).unwrap();
    let checked = read(&full()).unwrap().check().unwrap();
    let [again, checked] = [&again, &*checked].map(|config| without_names(serde_json::to_value(config).unwrap()));
    assert_eq!(again, checked);
}

#[test]
fn neutral_values_of_kata_and_libvirt_are_accepted() {
    let kata = json!({
        "payload": {"kernel": "/k", "cmdline": "c", "initramfs": "/i", "firmware": null, "mrconfigid": null, "host_data": null},
        "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "nested": true, "max_phys_bits": 46,
            "topology": {"threads_per_core": 1, "cores_per_die": 1, "dies_per_package": 1, "packages": 1}, "kvm_hyperv": false, "features": {"amx": false}, "affinity": null},
        "memory": {"size": 1 << 30, "shared": true, "hotplug_method": "Acpi", "hotplug_size": 0, "mergeable": false, "prefault": false,
            "hugepages": false, "thp": true, "reserve": false, "zones": null},
        "platform": {"num_pci_segments": 2, "iommu_segments": [], "tdx": false, "sev_snp": false},
        "serial": {"mode": "Off", "iommu": false}, "console": {"mode": "Off", "iommu": false, "file": null},
        "rng": {"src": "/dev/urandom", "iommu": false}, "iommu": false, "watchdog": false, "pvpanic": false, "landlock_enable": false,
        "disks": [{"path": "/root.img", "readonly": true, "direct": false, "num_queues": 1, "queue_size": 128, "vhost_user": false,
            "rate_limiter_config": null, "pci_segment": 0, "image_type": "Raw"}], "net": [], "fs": null, "vsock": {"cid": 3, "socket": "/run/vc/vm/x/clh.sock", "iommu": false, "pci_segment": 0, "id": null}, "balloon": null, "pmem": null, "vdpa": null, "numa": null, "tpm": null,
    });
    let libvirt = json!({
        "payload": {"kernel": "/k", "cmdline": "c"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}, "memory": {"size": 1 << 30},
        "console": {"mode": "Off"}, "serial": {"mode": "Null"}, "rng": {"src": "/dev/random"}, "devices": [{"path": "/d/"}],
    });
    let consoles = json!({
        "payload": {"kernel": "/k"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}, "memory": {"size": 1 << 30},
        "console": {"mode": "Pty"}, "serial": {"mode": "Socket", "socket": "/run/serial.sock"},
    });
    let kata_in_debug = json!({
        "payload": {"kernel": "/k"}, "serial": {"mode": "Tty", "iommu": false}, "console": {"mode": "Off", "iommu": false},
    });
    for body in [kata, libvirt, consoles, kata_in_debug] {
        let checked = read(&body).and_then(|config| config.check().map_err(|error| error.explain(Terms::Json)));
        checked.unwrap_or_else(|error| panic!("{body}: {error}"));
    }
}

#[test]
fn null_is_neutral_for_every_field() {
    let mut body = serde_json::Map::new();
    Theirs::read().walk("VmConfig", &mut |path, _| {
        if !path.contains('.') {
            body.insert(path.into(), Value::Null);
        }
        false
    });
    body.insert("payload".into(), json!({"kernel": "/k", "initramfs": null, "cmdline": null}));
    assert_eq!(read(&Value::Object(body)), read(&json!({"payload": {"kernel": "/k"}})));
}

/// `CAROM_BLESS=1 cargo test -p carom-api comparison_page` rewrites the page.
#[test]
fn comparison_page_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cloud-hypervisor.md");
    let text = list::text(&Theirs::read(), &Ours::read());
    if std::env::var_os("CAROM_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert!(
        std::fs::read_to_string(path).unwrap_or_default() == text,
        "docs/cloud-hypervisor.md is stale: run CAROM_BLESS=1 cargo test -p carom-api comparison_page"
    );
}

#[test]
fn lists_and_maps_are_recognised_by_their_brackets() {
    assert_eq!((type_of_element("[integer]"), type_of_element("{DeviceNode}")), (Some("integer"), Some("DeviceNode")));
    assert_eq!(type_of_element("string"), None);
}
