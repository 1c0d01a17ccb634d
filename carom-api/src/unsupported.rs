// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What Cloud Hypervisor has in its configuration and Carom has not.
//!
//! Its clients send such fields with a value that asks for nothing, which is forgotten. Any other value is refused with a
//! sentence, rather than with a field that is not known.

use serde_json::{Map, Value, json};

/// A value of a field that asks for nothing. Null does too, of every field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neutral {
    /// Nothing but null.
    Null,
    /// This one.
    Bool(bool),
    /// This one.
    Number(u64),
    /// This one.
    Text(&'static str),
    /// An empty list.
    NoElements,
    /// An object without fields.
    NoFields,
    /// A console that there is not: an object that says so.
    ModeOff,
}

impl Neutral {
    /// The value.
    pub fn value(self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(value) => value.into(),
            Self::Number(value) => value.into(),
            Self::Text(text) => text.into(),
            Self::NoElements => Value::Array(Vec::new()),
            Self::NoFields => Value::Object(Map::new()),
            Self::ModeOff => json!({"mode": "Off"}),
        }
    }
}

/// A field of Cloud Hypervisor's.
#[derive(Clone, Copy, Debug)]
pub struct Unsupported {
    /// Its path in the body. `*` is every element of a list.
    pub path: &'static str,
    /// What asks for nothing.
    pub neutral: Neutral,
    /// What there is instead, for the message.
    pub instead: &'static str,
}

const fn field(path: &'static str, neutral: Neutral) -> Unsupported {
    Unsupported { path, neutral, instead: "" }
}

const fn console(path: &'static str, neutral: Neutral) -> Unsupported {
    Unsupported { path, neutral, instead: "the guest's console is serial" }
}

const fn devices(path: &'static str) -> Unsupported {
    let instead = "the guest can have devices of the host (devices) and of other processes (user_devices)";
    Unsupported { path, neutral: Neutral::NoElements, instead }
}

/// All of them.
pub static UNSUPPORTED: &[Unsupported] = &[
    field("balloon", Neutral::Null),
    console("console", Neutral::ModeOff),
    console("console.file", Neutral::Null),
    console("console.id", Neutral::Null),
    console("console.iommu", Neutral::Bool(false)),
    console("console.pci_device_id", Neutral::Null),
    console("console.pci_segment", Neutral::Number(0)),
    console("console.socket", Neutral::Null),
    field("cpus.affinity", Neutral::Null),
    field("cpus.core_scheduling", Neutral::Text("Off")),
    field("cpus.features", Neutral::NoFields),
    field("cpus.kvm_hyperv", Neutral::Bool(false)),
    console("debug_console", Neutral::ModeOff),
    console("debug_console.file", Neutral::Null),
    console("debug_console.iobase", Neutral::Null),
    field("devices.*.pci_device_id", Neutral::Null),
    field("devices.*.pci_segment", Neutral::Number(0)),
    field("devices.*.x_exclude_mmap_bars", Neutral::NoElements),
    field("devices.*.x_nv_gpudirect_clique", Neutral::Null),
    devices("disks"),
    devices("fs"),
    devices("generic_vhost_user"),
    field("iommu", Neutral::Bool(false)),
    field("landlock_enable", Neutral::Bool(false)),
    field("landlock_rules", Neutral::NoElements),
    field("memory.hotplug_method", Neutral::Text("Acpi")),
    field("memory.hotplug_size", Neutral::Number(0)),
    field("memory.hotplugged_size", Neutral::Number(0)),
    field("memory.hugepage_size", Neutral::Null),
    field("memory.mergeable", Neutral::Bool(false)),
    field("memory.prefault", Neutral::Bool(false)),
    field("memory.reserve", Neutral::Bool(false)),
    field("memory.zones", Neutral::NoElements),
    devices("net"),
    field("numa", Neutral::NoElements),
    field("payload.firmware", Neutral::Null),
    field("payload.host_data", Neutral::Null),
    field("payload.igvm", Neutral::Null),
    field("pci_segments", Neutral::NoElements),
    field("platform.iommu_segments", Neutral::Null),
    field("platform.num_pci_segments", Neutral::Number(1)),
    field("platform.vfio_p2p_dma", Neutral::Bool(true)),
    devices("pmem"),
    field("rate_limit_groups", Neutral::NoElements),
    field("rng.pci_device_id", Neutral::Null),
    field("rng.pci_segment", Neutral::Number(0)),
    field("rtc", Neutral::Null),
    field("tpm", Neutral::Null),
    field("user_devices.*.pci_device_id", Neutral::Null),
    field("user_devices.*.pci_segment", Neutral::Number(0)),
    devices("vdpa"),
    Unsupported { neutral: Neutral::Null, ..devices("vsock") },
    field("watchdog", Neutral::Bool(false)),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn field_stands_there_once_and_an_object_before_its_fields() {
        let mut seen = BTreeSet::new();
        for Unsupported { path, .. } in UNSUPPORTED {
            assert!(seen.iter().all(|earlier: &&str| !earlier.starts_with(&format!("{path}."))), "{path}");
            assert!(seen.insert(*path), "{path}");
        }
    }
}
