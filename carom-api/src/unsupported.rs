// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration fields of Cloud Hypervisor that Carom does not support.
//!
//! Clients of Cloud Hypervisor send these fields with their neutral value, which requests no feature. Carom drops such a field. Carom
//! rejects any other value with an error that names the alternative, instead of reporting an unknown field. `vm.info` reports the neutral
//! value (`info_form.rs`), because clients may need the field.
//!
//! When Carom supports a field, remove it from this table. `tests/cloud_hypervisor` compares the table with all fields of Cloud
//! Hypervisor.

use serde_json::{Map, Value, json};

/// Neutral value of an unsupported field, which requests no feature. In every field, null is neutral too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neutral {
    /// Only null.
    Null,
    /// This boolean.
    Bool(bool),
    /// This number.
    Number(u64),
    /// This string.
    Text(&'static str),
    /// An empty list.
    NoElements,
    /// An object without fields.
    NoFields,
    /// A console object with mode `Off`.
    ModeOff,
}

impl Neutral {
    /// Returns the value that `vm.info` reports for the field, if clients may need this value.
    pub fn in_answers(self) -> Option<Value> {
        match self {
            Self::Null | Self::NoElements => None,
            neutral => Some(neutral.value()),
        }
    }

    /// Returns the value as JSON.
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

/// Unsupported field of Cloud Hypervisor.
#[derive(Clone, Copy, Debug)]
pub struct Unsupported {
    /// Path in the body. `*` stands for every element of a list.
    pub path: &'static str,
    /// Value that requests no feature.
    pub neutral: Neutral,
    /// Alternative, for the error message.
    pub instead: &'static str,
}

const fn field(path: &'static str, neutral: Neutral, instead: &'static str) -> Unsupported {
    Unsupported { path, neutral, instead }
}

const fn console(path: &'static str, neutral: Neutral) -> Unsupported {
    field(path, neutral, "use the serial port (serial) or the paravirtual console (console)")
}

const fn devices(path: &'static str) -> Unsupported {
    let instead =
        "use disks, network devices, file systems, host devices (devices) or devices of other processes (user_devices)";
    field(path, Neutral::NoElements, instead)
}

const fn encrypted(path: &'static str, neutral: Neutral) -> Unsupported {
    field(path, neutral, "Carom does not support encrypted guest memory")
}

const IO: &str = "disks use io_uring, or plain system calls if the host kernel has no io_uring";

/// All unsupported fields: fields of Cloud Hypervisor's OpenAPI document, and other fields that its clients send.
pub static UNSUPPORTED: &[Unsupported] = &[
    field("cpus.core_scheduling", Neutral::Text("Off"), "the host schedules vCPU threads like all other threads"),
    field("cpus.features", Neutral::NoFields, "the guest has all features of the host's CPU except AMX"),
    field("cpus.features.amx", Neutral::Bool(false), "the guest has all features of the host's CPU except AMX"),
    field("cpus.kvm_hyperv", Neutral::Bool(false), "the guest gets KVM's paravirtual features, not Hyper-V's"),
    field("cpus.profile", Neutral::Text("Host"), "the guest always has the CPU model of the host"),
    console("debug_console", Neutral::ModeOff),
    console("debug_console.file", Neutral::Null),
    console("debug_console.iobase", Neutral::Number(0xe9)),
    field("devices.*.fd", Neutral::Null, "give the path of the device"),
    field("devices.*.x_exclude_mmap_bars", Neutral::NoElements, "Carom maps every BAR that can be mapped"),
    field("devices.*.x_nv_gpudirect_clique", Neutral::Null, "the guest sees the device's own capabilities"),
    field("disks.*.disable_aio", Neutral::Bool(false), IO),
    field("disks.*.disable_io_uring", Neutral::Bool(false), IO),
    field("gdb", Neutral::Bool(false), "Carom has no GDB server"),
    devices("generic_vhost_user"),
    field(
        "iommu",
        Neutral::Bool(false),
        "the VM has a virtio-iommu if a device has iommu on, or if iommu_bounce is given",
    ),
    field("ivshmem", Neutral::Null, "VMs cannot share memory with each other"),
    field("memory.hotplug_method", Neutral::Text("Acpi"), "RAM is hot-plugged by ACPI (vm.resize)"),
    field("memory.hotplugged_size", Neutral::Number(0), "the VM boots with memory.size, and vm.resize adds RAM"),
    field(
        "memory.zones.*.hotplug_size",
        Neutral::Number(0),
        "only a VM without zones can hot-plug RAM (memory.hotplug_size)",
    ),
    field(
        "memory.zones.*.hotplugged_size",
        Neutral::Number(0),
        "only a VM without zones can hot-plug RAM (memory.hotplug_size)",
    ),
    field("numa.*.device_id", Neutral::Null, "a node consists of vCPUs, RAM and PCI segments"),
    field(
        "payload.fw_cfg_config",
        Neutral::Null,
        "Carom loads kernel, initramfs and command line into guest memory itself",
    ),
    encrypted("payload.host_data", Neutral::Null),
    field("payload.igvm", Neutral::Null, "the guest boots payload.kernel or payload.firmware"),
    encrypted("payload.mrconfigid", Neutral::Null),
    field("platform.iommufd_fd", Neutral::Null, "Carom opens IOMMUFD itself (platform.iommufd)"),
    encrypted("platform.sev_snp", Neutral::Bool(false)),
    encrypted("platform.tdx", Neutral::Bool(false)),
    field(
        "platform.vfio_p2p_dma",
        Neutral::Bool(true),
        "a device behind the virtio-iommu accesses BARs of other devices if the guest maps them",
    ),
    field("pvmemcontrol", Neutral::Null, "the host allocates RAM when the guest first accesses it"),
    field("rtc", Neutral::Null, "the guest has the KVM clock"),
    field("serial.iommu", Neutral::Bool(false), "the serial port does no DMA"),
    field("tpm", Neutral::Null, "Carom emulates no TPM"),
    devices("vdpa"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn fields_are_unique_and_objects_precede_their_fields() {
        let mut seen = BTreeSet::new();
        for Unsupported { path, .. } in UNSUPPORTED {
            assert!(seen.iter().all(|earlier: &&str| !earlier.starts_with(&format!("{path}."))), "{path}");
            assert!(seen.insert(*path), "{path}");
        }
    }

    #[test]
    fn every_field_names_an_alternative() {
        for Unsupported { path, instead, .. } in UNSUPPORTED {
            assert!(!instead.is_empty() && !instead.ends_with('.'), "{path}");
        }
    }
}
