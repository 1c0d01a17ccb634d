// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What Cloud Hypervisor has in its configuration and Carom has not.
//!
//! Its clients send such fields with a value that asks for nothing, which is forgotten. Any other value is refused with a
//! sentence, rather than with a field that is not known. `vm.info` tells the value that asks for nothing (`told.rs`), since
//! clients may need it.
//!
//! A field that gets built leaves this table. `tests/cloud_hypervisor` holds it against all of Cloud Hypervisor's fields.

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
    /// What `vm.info` says of a field that asks for nothing, where a client may need to be told.
    pub fn told(self) -> Option<Value> {
        match self {
            Self::Null | Self::NoElements => None,
            neutral => Some(neutral.value()),
        }
    }

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

const fn field(path: &'static str, neutral: Neutral, instead: &'static str) -> Unsupported {
    Unsupported { path, neutral, instead }
}

const fn console(path: &'static str, neutral: Neutral) -> Unsupported {
    field(path, neutral, "the guest has a serial port and a paravirtual console (console)")
}

const fn devices(path: &'static str) -> Unsupported {
    let instead = "the guest can have disks, network devices, file systems, devices of the host (devices) and of other processes (user_devices)";
    field(path, Neutral::NoElements, instead)
}

const fn encrypted(path: &'static str, neutral: Neutral) -> Unsupported {
    field(path, neutral, "the guest's memory is not encrypted")
}

const IO: &str = "disks are read and written by io_uring, or by plain system calls where the host's kernel has none";

/// All of them: those of the document, and others that clients send.
pub static UNSUPPORTED: &[Unsupported] = &[
    field("cpus.core_scheduling", Neutral::Text("Off"), "the host schedules the threads of vCPUs as all others"),
    field("cpus.features", Neutral::NoFields, "the guest has the features of the host's CPU but AMX"),
    field("cpus.features.amx", Neutral::Bool(false), "the guest has the features of the host's CPU but AMX"),
    field("cpus.kvm_hyperv", Neutral::Bool(false), "the guest is offered KVM's paravirtual features, not Hyper-V's"),
    field("cpus.profile", Neutral::Text("Host"), "the guest has the host's CPU"),
    console("debug_console", Neutral::ModeOff),
    console("debug_console.file", Neutral::Null),
    console("debug_console.iobase", Neutral::Number(0xe9)),
    field("devices.*.fd", Neutral::Null, "devices are opened by their path"),
    field("devices.*.x_exclude_mmap_bars", Neutral::NoElements, "all BARs are mapped that can be"),
    field("devices.*.x_nv_gpudirect_clique", Neutral::Null, "the guest sees the device's own capabilities"),
    field("disks.*.disable_aio", Neutral::Bool(false), IO),
    field("disks.*.disable_io_uring", Neutral::Bool(false), IO),
    field("gdb", Neutral::Bool(false), "there is no debugger's port"),
    devices("generic_vhost_user"),
    field("iommu", Neutral::Bool(false), "there is a virtio-iommu where a device has iommu on, or the VM iommu_bounce"),
    field("ivshmem", Neutral::Null, "there is no memory that is shared with other VMs"),
    field("memory.hotplug_method", Neutral::Text("Acpi"), "RAM comes while the VM runs by ACPI (vm.resize)"),
    field("memory.hotplugged_size", Neutral::Number(0), "the VM boots with memory.size, and vm.resize adds to it"),
    field("memory.zones.*.hotplug_size", Neutral::Number(0), "RAM comes to a VM without zones (memory.hotplug_size)"),
    field(
        "memory.zones.*.hotplugged_size",
        Neutral::Number(0),
        "RAM comes to a VM without zones (memory.hotplug_size)",
    ),
    field("numa.*.device_id", Neutral::Null, "a node has vCPUs, RAM and PCI segments"),
    field(
        "payload.fw_cfg_config",
        Neutral::Null,
        "kernel, initramfs and command line are in the guest's memory when it starts",
    ),
    encrypted("payload.host_data", Neutral::Null),
    field("payload.igvm", Neutral::Null, "the guest boots payload.kernel or payload.firmware"),
    encrypted("payload.mrconfigid", Neutral::Null),
    field("platform.iommufd_fd", Neutral::Null, "the program opens IOMMUFD itself (platform.iommufd)"),
    encrypted("platform.sev_snp", Neutral::Bool(false)),
    encrypted("platform.tdx", Neutral::Bool(false)),
    field(
        "platform.vfio_p2p_dma",
        Neutral::Bool(true),
        "a device behind the virtio-iommu reaches another's memory where the guest maps it",
    ),
    field("pvmemcontrol", Neutral::Null, "the host gives RAM when the guest touches it"),
    field("rtc", Neutral::Null, "the guest has KVM's clock"),
    field("serial.iommu", Neutral::Bool(false), "the serial port does no DMA"),
    field("tpm", Neutral::Null, "there is no TPM"),
    devices("vdpa"),
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

    #[test]
    fn field_says_what_there_is_instead() {
        for Unsupported { path, instead, .. } in UNSUPPORTED {
            assert!(!instead.is_empty() && !instead.ends_with('.'), "{path}");
        }
    }
}
