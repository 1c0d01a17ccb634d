// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The registry of the kinds of devices that a VM may have.
//!
//! A [`Kind`] says how a device is written on the command line and in JSON, and how one comes to a VM that runs. Command line,
//! [`VmConfig`](crate::VmConfig), operations, OpenAPI document and the client's verbs go over [`KINDS`]. A new kind is a file
//! here and a line in `for_each_kind`; the VMM has a builder for each.

mod balloon;
mod block;
mod console;
mod fs;
mod host_file;
mod iommu;
mod net;
mod pmem;
mod rng;
mod usual;
mod vfio;
mod vfio_user;
mod vhost_user;
mod vsock;

use std::ops::{Deref, DerefMut};
use std::path::Path;

use serde::Serialize;

use crate::body;
use crate::config::MemoryConfig;
use crate::error::{ConfigError, Explain, ensure};
use crate::field::{Field, Terms};
use crate::option_list::{self, FromOption};

pub use balloon::BalloonConfig;
pub use block::{DiskConfig, ImageType, LockGranularity};
pub use console::ConsoleConfig;
pub use fs::FsConfig;
pub use host_file::HostFile;
pub use iommu::{Aperture, IommuBounceConfig};
pub use net::{NetConfig, VhostMode};
pub use pmem::PmemConfig;
pub use rng::RngConfig;
use usual::{device_config, usual_methods};
pub use vfio::DeviceConfig;
pub use vfio_user::UserDeviceConfig;
pub use vsock::VsockConfig;

/// The registry. `lists` are fields of the configuration that hold any number of devices, `singles` those that hold one; each
/// names the variant of [`PartConfig`] and the type.
macro_rules! for_each_kind {
    ($define:ident) => {
        $define! {
            lists {
                /// Devices of the host that it is given.
                devices: Vfio(DeviceConfig),
                /// Devices that other processes of the host emulate.
                user_devices: VfioUser(UserDeviceConfig),
                /// Its disks.
                disks: Disk(DiskConfig),
                /// Its network devices.
                net: Net(NetConfig),
                /// File systems of the host.
                fs: Fs(FsConfig),
                /// Its files of the host that are memory which keeps what is written.
                pmem: Pmem(PmemConfig),
            }
            singles {
                /// Bounce windows, if it has them.
                iommu_bounce: Iommu(IommuBounceConfig),
                /// Its source of random bytes, if it has one.
                rng: Rng(RngConfig),
                /// Its sockets to the host, if it has them.
                vsock: Vsock(VsockConfig),
                /// Its balloon, if it has one.
                balloon: Balloon(BalloonConfig),
                /// Its paravirtual console. One with mode Tty where nothing is said, none with mode Off.
                console: Console(ConsoleConfig),
            }
        }
    };
}
pub(crate) use for_each_kind;

/// How many devices of a kind a VM may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// As many as there are slots.
    Many,
    /// One.
    One,
}

/// A kind of device.
pub struct Kind {
    /// Its name in saved states, metrics and messages, such as `vfio`.
    pub name: &'static str,
    /// Its option, and its field of the configuration.
    pub field: Field,
    /// How many of it a VM may have.
    pub number: Number,
    /// The value of its option in a few words, for the help.
    pub value: &'static str,
    /// What its option does, for the help.
    help: &'static str,
    /// The keys of its option, for the help, except those that every device has.
    keys: &'static str,
    /// The keys that the help of the client's verb shows, if there are too many to show all.
    few_keys: Option<&'static str>,
    /// What the option stands for without a value, where it may have none.
    pub bare: Option<&'static str>,
    /// What IDs begin with that are made up. Where there is one device, this is its ID.
    pub id: &'static str,
    /// Whether a device of it takes one of the slots for devices; otherwise it has a place of its own.
    pub takes_slot: bool,
    /// Whether its devices do DMA of the host's or of another process: those that bounce windows are for.
    pub passed_through: bool,
    /// The key that puts a device behind the virtio-iommu, where that is possible.
    pub iommu: Option<Field>,
    /// Whether the option, beside `--api-socket`, is what VMs of clients have that say nothing of it ([`VmDefaults`](crate::VmDefaults)).
    pub default_for_clients: bool,
    /// How one comes to a VM that is created, and to one that runs; `None` where they are there from the start.
    pub add: Option<Add>,
    /// Reads the value of its option.
    parse: fn(&str) -> Result<PartConfig, ConfigError>,
    /// Reads the body of its operation.
    read: fn(&[u8]) -> Result<PartConfig, String>,
}

/// The operation that adds a device.
pub struct Add {
    /// Its name in the path.
    pub operation: &'static str,
    /// Its name in the document and in clients generated from it.
    pub id: &'static str,
    /// What it does, for the document.
    pub summary: &'static str,
    /// Schema of the body.
    pub schema: &'static str,
    /// Help of the client's verb, without the keys.
    about: &'static str,
}

impl Add {
    /// The client's verb.
    pub fn verb(&self) -> &'static str {
        self.operation.trim_start_matches("vm.")
    }
}

impl Kind {
    /// The key that says which slot a device is in.
    pub const fn slot_field(&self) -> Field {
        self.field.key("pci_device_id")
    }

    /// Returns a kind that has the usual values: no help yet, behind the virtio-iommu if wanted, and not to be added later.
    const fn of<T: FromOption + Into<PartConfig>>(name: &'static str, id: &'static str, number: Number) -> Self {
        Self {
            name,
            field: T::OPTION,
            number,
            value: "",
            help: "",
            keys: "",
            few_keys: None,
            bare: None,
            id,
            takes_slot: true,
            passed_through: false,
            iommu: Some(T::OPTION.key("iommu")),
            default_for_clients: false,
            add: None,
            parse: |text| option_list::read::<T>(text).map(Into::into),
            read: |bytes| body::parse_device::<T>(bytes, T::OPTION).map(Into::into),
        }
    }

    /// The help of its option.
    pub(crate) fn help(&self) -> String {
        self.with_keys(self.help, self.keys)
    }

    /// The help of the client's verb that adds one.
    pub fn help_of_verb(&self, add: &Add) -> String {
        self.with_keys(add.about, self.few_keys.unwrap_or(self.keys))
    }

    fn with_keys(&self, help: &str, keys: &str) -> String {
        let of_all = if self.takes_slot { "[,pci_segment=N][,pci_device_id=N][,id=NAME]" } else { "" };
        format!("{help}: {keys}{of_all}")
    }

    /// Reads the value of its option.
    ///
    /// # Errors
    /// A rule that can be checked without the rest of the configuration does not hold.
    pub fn parse(&self, text: &str) -> Result<PartConfig, ConfigError> {
        let part = (self.parse)(text)?;
        part.check_id()?;
        Ok(part)
    }

    /// Reads the body of its operation.
    ///
    /// # Errors
    /// One line in the words of JSON: it is none of this kind, or breaks a rule.
    pub fn read(&self, body: &[u8]) -> Result<PartConfig, String> {
        let part = (self.read)(body)?;
        part.check_id().map_err(|error| error.explain(Terms::Json))?;
        Ok(part)
    }
}

/// What the configurations of all kinds have in common.
pub trait KindConfig {
    /// The kind.
    fn kind(&self) -> &'static Kind;

    /// Whether there is such a device. Otherwise this says that there is none.
    fn is_there(&self) -> bool {
        true
    }

    /// Its name in logs and the API, once it has one.
    fn id(&self) -> Option<&str>;

    /// Gives it a name. Kinds whose one device has a fixed name take none.
    fn set_id(&mut self, id: String);

    /// Whether it is behind the virtio-iommu.
    fn is_behind_iommu(&self) -> bool {
        false
    }

    /// Puts it behind the virtio-iommu, if its kind can be.
    fn put_behind_iommu(&mut self) {}

    /// The PCI segment that it is on.
    fn pci_segment(&self) -> u16 {
        0
    }

    /// The slot that it is to be in there, if that is said.
    fn pci_device_id(&self) -> Option<u8> {
        None
    }

    /// What it is made of on the host.
    fn source(&self) -> Option<&Path> {
        None
    }

    /// The files of the host that it is made of.
    fn files(&self) -> Vec<HostFile<'_>> {
        self.source().map(HostFile::ReadWrite).into_iter().collect()
    }

    /// Numbers of the descriptors that it is made of, which the program was started with.
    fn inherited(&self) -> &[i32] {
        &[]
    }

    /// The field of [`Self::source`] where two devices cannot share it.
    fn exclusive(&self) -> Option<Field> {
        None
    }

    /// Fills in what follows from the rest.
    fn complete(&mut self) {}

    /// Checks it beside the VM's RAM, without touching the host.
    ///
    /// # Errors
    /// A rule does not hold.
    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let _ = memory;
        Ok(())
    }

    /// The same as one of all kinds.
    fn to_part(&self) -> PartConfig;
}

impl dyn KindConfig + '_ {
    /// Checks a name that the user gave.
    ///
    /// # Errors
    /// It is empty, or one of those that are made up; or as for [`Self::check_characters`].
    pub fn check_id(&self) -> Result<(), ConfigError> {
        let may_be_given = self.id().is_none_or(|id| !id.is_empty() && !id.starts_with('_'));
        ensure(may_be_given, self.kind().field.key("id"), || "must not be empty or start with '_'")?;
        self.check_characters()
    }

    /// Checks the name, whoever gave it: threads are named by it, and lines of the log have it.
    ///
    /// # Errors
    /// It has a control character.
    pub(crate) fn check_characters(&self) -> Result<(), ConfigError> {
        let is_plain = self.id().is_none_or(|id| !id.contains(char::is_control));
        ensure(is_plain, self.kind().field.key("id"), || "must not have control characters")
    }

    /// What of this device and `other` must not be the same but is: the field, and its value for a message.
    pub fn same_as(&self, other: &dyn KindConfig) -> Option<(Field, String)> {
        if let (Some(field), Some(source)) = (self.exclusive(), self.source())
            && other.exclusive() == Some(field)
            && other.source() == Some(source)
        {
            return Some((field, source.display().to_string()));
        }
        if let Some(slot) = self.pci_device_id()
            && (other.pci_segment(), other.pci_device_id()) == (self.pci_segment(), Some(slot))
        {
            return Some((self.kind().slot_field(), slot.to_string()));
        }
        let id = self.id().filter(|id| other.id() == Some(id))?;
        Some((self.kind().field.key("id"), format!("'{id}'")))
    }
}

macro_rules! define_part_config {
    (
        lists { $($(#[$list_doc:meta])* $list:ident: $list_variant:ident($list_config:ident),)* }
        singles { $($(#[$single_doc:meta])* $single:ident: $single_variant:ident($single_config:ident),)* }
    ) => {
        /// The kinds, in the order in which their devices get slots.
        pub static KINDS: &[&Kind] = &[$(&$list_config::KIND,)* $(&$single_config::KIND,)*];

        /// The configuration of a device of any kind.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        #[serde(untagged)]
        pub enum PartConfig {
            $($(#[$list_doc])* $list_variant($list_config),)*
            $($(#[$single_doc])* $single_variant($single_config),)*
        }

        $(
            impl From<$list_config> for PartConfig {
                fn from(config: $list_config) -> Self {
                    Self::$list_variant(config)
                }
            }
        )*

        $(
            impl From<$single_config> for PartConfig {
                fn from(config: $single_config) -> Self {
                    Self::$single_variant(config)
                }
            }
        )*

        impl Deref for PartConfig {
            type Target = dyn KindConfig;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(Self::$list_variant(config) => config,)*
                    $(Self::$single_variant(config) => config,)*
                }
            }
        }

        impl DerefMut for PartConfig {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $(Self::$list_variant(config) => config,)*
                    $(Self::$single_variant(config) => config,)*
                }
            }
        }
    };
}
for_each_kind!(define_part_config);

#[cfg(test)]
mod tests;
