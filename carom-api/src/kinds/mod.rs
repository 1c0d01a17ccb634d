// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registry of the kinds of devices that a VM may have.
//!
//! A [`Kind`] describes the option and the JSON field of a device, and how a device is added to a running VM. The command line,
//! [`VmConfig`](crate::VmConfig), operations, OpenAPI document and client verbs are all generated from [`KINDS`]. A new kind needs a file
//! in this directory, a line in `for_each_kind`, and a builder in the VMM.

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

/// The registry. `lists` are configuration fields that hold any number of devices. `singles` are fields that hold at most one
/// device. Each entry names the variant of [`PartConfig`] and the type.
macro_rules! for_each_kind {
    ($define:ident) => {
        $define! {
            lists {
                /// Host devices passed through to the VM.
                devices: Vfio(DeviceConfig),
                /// Devices that other host processes emulate (vfio-user).
                user_devices: VfioUser(UserDeviceConfig),
                /// Disks of the VM.
                disks: Disk(DiskConfig),
                /// Network devices of the VM.
                net: Net(NetConfig),
                /// File systems of the host that are shared with the VM.
                fs: Fs(FsConfig),
                /// Host files that the guest sees as persistent memory.
                pmem: Pmem(PmemConfig),
            }
            singles {
                /// Bounce windows, if the VM has any.
                iommu_bounce: Iommu(IommuBounceConfig),
                /// Source of random bytes, if the VM has one.
                rng: Rng(RngConfig),
                /// Sockets between guest and host, if the VM has them.
                vsock: Vsock(VsockConfig),
                /// Balloon, if the VM has one.
                balloon: Balloon(BalloonConfig),
                /// Paravirtual console. By default, a VM of an API client has a console with mode Tty. With mode Off, the VM has no
                /// console.
                console: Console(ConsoleConfig),
            }
        }
    };
}
pub(crate) use for_each_kind;

/// Maximum number of devices of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// Limited only by the number of PCI slots.
    Many,
    /// At most one.
    One,
}

/// Kind of device.
pub struct Kind {
    /// Name in saved states, metrics and messages, such as `vfio`.
    pub name: &'static str,
    /// Option and configuration field of the kind.
    pub field: Field,
    /// Maximum number of such devices in a VM.
    pub number: Number,
    /// Short form of the option's value, for the help.
    pub value: &'static str,
    /// Purpose of the option, for the help.
    help: &'static str,
    /// Keys of the option, for the help, without the keys that all devices have.
    keys: &'static str,
    /// Keys that the help of carom-remote's verb shows, if the option has too many keys to show all.
    few_keys: Option<&'static str>,
    /// Value that is used if the user gives the option without a value. `None` if a value is required.
    pub bare: Option<&'static str>,
    /// Prefix of generated IDs. If a VM can have at most one such device, this is the complete ID.
    pub id: &'static str,
    /// True if a device takes one of the PCI slots for devices. Otherwise the device has a fixed slot.
    pub takes_slot: bool,
    /// True if the devices' DMA is done by host hardware or by another process. Bounce windows are meant for such devices.
    pub passed_through: bool,
    /// Key that puts a device behind the virtio-iommu. `None` if such devices cannot be behind the virtio-iommu.
    pub iommu: Option<Field>,
    /// True if the option, together with `--api-socket`, sets a default for VMs of API clients
    /// ([`VmDefaults`](crate::VmDefaults)).
    pub default_for_clients: bool,
    /// Operation that adds a device to a created or running VM. `None` if such devices cannot be added.
    pub add: Option<Add>,
    /// Parses the value of the option.
    parse: fn(&str) -> Result<PartConfig, ConfigError>,
    /// Parses the body of the operation.
    read: fn(&[u8]) -> Result<PartConfig, String>,
}

/// Operation that adds a device.
pub struct Add {
    /// Name of the operation in the request's path, such as `vm.add-disk`.
    pub operation: &'static str,
    /// Operation ID in the document, which generated clients use.
    pub id: &'static str,
    /// Summary in the document.
    pub summary: &'static str,
    /// Schema of the request body.
    pub schema: &'static str,
    /// Help of carom-remote's verb that adds a device, without the keys.
    about: &'static str,
}

impl Add {
    /// Returns the verb of carom-remote that adds a device.
    pub fn verb(&self) -> &'static str {
        self.operation.trim_start_matches("vm.")
    }
}

impl Kind {
    /// Returns the key for the slot of a device.
    pub const fn slot_field(&self) -> Field {
        self.field.key("pci_device_id")
    }

    /// Returns a kind with the usual values: the kind has no help and no operation to add devices, and its devices can be behind the
    /// virtio-iommu.
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

    /// Returns the help of the option.
    pub(crate) fn help(&self) -> String {
        self.with_keys(self.help, self.keys)
    }

    /// Returns the help of carom-remote's verb that adds a device.
    pub fn help_of_verb(&self, add: &Add) -> String {
        self.with_keys(add.about, self.few_keys.unwrap_or(self.keys))
    }

    fn with_keys(&self, help: &str, keys: &str) -> String {
        let of_all = if self.takes_slot { "[,pci_segment=N][,pci_device_id=N][,id=NAME]" } else { "" };
        format!("{help}: {}", with_breaks(&format!("{keys}{of_all}")))
    }

    /// Parses the value of the option.
    ///
    /// # Errors
    /// The value is malformed, or breaks a rule that can be checked without the rest of the configuration.
    pub fn parse(&self, text: &str) -> Result<PartConfig, ConfigError> {
        let part = (self.parse)(text)?;
        part.check_id()?;
        Ok(part)
    }

    /// Parses the body of the operation that adds a device.
    ///
    /// # Errors
    /// One line, which names fields as in JSON: the body does not describe a device of this kind, or breaks a rule.
    pub fn read(&self, body: &[u8]) -> Result<PartConfig, String> {
        let part = (self.read)(body)?;
        part.check_id().map_err(|error| error.explain(Terms::Json))?;
        Ok(part)
    }
}

/// Inserts spaces before optional keys, so that man pages and terminals of 80 columns can break the lines.
fn with_breaks(keys: &str) -> String {
    const MAX_COLUMNS: usize = 64;
    let (mut text, mut columns) = (String::new(), 0);
    for (number, key) in keys.split("[,").enumerate() {
        let key = if number > 0 { format!("[,{key}") } else { key.into() };
        let width = key.chars().count();
        if columns > 0 && columns + width > MAX_COLUMNS {
            text.push(' ');
            columns = 0;
        }
        text.push_str(&key);
        columns += width;
    }
    text
}

/// Methods that the configurations of all kinds have in common.
pub trait KindConfig {
    /// Returns the kind.
    fn kind(&self) -> &'static Kind;

    /// True if the configuration stands for a device. False if the configuration only states that the VM has no such device.
    fn is_there(&self) -> bool {
        true
    }

    /// Returns the device's name in logs and the API. `None` until a name is assigned.
    fn id(&self) -> Option<&str>;

    /// Assigns a name. A kind with a fixed name ignores the call.
    fn set_id(&mut self, id: String);

    /// True if the device is behind the virtio-iommu.
    fn is_behind_iommu(&self) -> bool {
        false
    }

    /// Puts the device behind the virtio-iommu, if its kind supports that.
    fn put_behind_iommu(&mut self) {}

    /// Returns the PCI segment of the device.
    fn pci_segment(&self) -> u16 {
        0
    }

    /// Returns the requested PCI slot on the segment, if the configuration names one.
    fn pci_device_id(&self) -> Option<u8> {
        None
    }

    /// Returns the host file or socket that backs the device.
    fn source(&self) -> Option<&Path> {
        None
    }

    /// Returns the host files that the device uses.
    fn files(&self) -> Vec<HostFile<'_>> {
        self.source().map(HostFile::ReadWrite).into_iter().collect()
    }

    /// Returns the numbers of the inherited descriptors that the device uses.
    fn inherited(&self) -> &[i32] {
        &[]
    }

    /// Returns the field of [`Self::source`] if two devices cannot share the source.
    fn exclusive(&self) -> Option<Field> {
        None
    }

    /// Fills in missing values that the VMM derives or generates.
    fn complete(&mut self) {}

    /// Checks the rules for the configuration's fields. Some rules depend on `memory`, the VM's RAM. Does not access the host.
    ///
    /// # Errors
    /// A rule does not hold.
    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let _ = memory;
        Ok(())
    }

    /// Returns a copy as a [`PartConfig`].
    fn to_part(&self) -> PartConfig;
}

impl dyn KindConfig + '_ {
    /// Checks a name that the user gave.
    ///
    /// # Errors
    /// The name is empty or has the form of a generated name, or [`Self::check_characters`] fails.
    pub fn check_id(&self) -> Result<(), ConfigError> {
        let may_be_given = self.id().is_none_or(|id| !id.is_empty() && !id.starts_with('_'));
        ensure(may_be_given, self.kind().field.key("id"), || "must not be empty or start with '_'")?;
        self.check_characters()
    }

    /// Checks the characters of the name, given or generated. The name appears in thread names and log lines.
    ///
    /// # Errors
    /// The name has a control character.
    pub(crate) fn check_characters(&self) -> Result<(), ConfigError> {
        let is_plain = self.id().is_none_or(|id| !id.contains(char::is_control));
        ensure(is_plain, self.kind().field.key("id"), || "must not have control characters")
    }

    /// Returns a field that has the same value in both devices although the values must differ. Also returns this value, for an error
    /// message.
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
        /// All kinds, in the order in which their devices get slots.
        pub static KINDS: &[&Kind] = &[$(&$list_config::KIND,)* $(&$single_config::KIND,)*];

        /// Configuration of a device of any kind.
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
