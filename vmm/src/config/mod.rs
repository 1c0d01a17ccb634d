// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a VM is made of, in Cloud Hypervisor's terms, and the rules it must keep.

mod names;
mod option_list;
mod parse;
mod size;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

pub(crate) use names::field_of;
pub use option_list::{OptionList, OptionListError};
pub use size::parse_size;

use crate::arch::layout::{
    MAX_MEMORY, MIB, PCI_SLOTS, PCI_SLOTS_BEHIND_IOMMU, PCI_SLOTS_BESIDE_IOMMU, WINDOW_APERTURE,
};

/// Most vCPUs a VM may have: what the 8-bit local APIC IDs of the MADT can name.
pub const MAX_VCPUS: u32 = 254;
/// Size of a chunk of a bounce window: one huge page.
pub const CHUNK_SIZE: u64 = 2 * MIB;
/// Budget of all bounce windows where `--iommu-bounce` names none.
pub const DEFAULT_BOUNCE_SIZE: u64 = 64 * MIB;
/// Least RAM that any kernel boots in.
const MIN_MEMORY: u64 = 32 * MIB;

/// A message may quote what the user gave: what would end its line is escaped.
pub(crate) fn one_line(message: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().collect() } else { c.to_string() };
    message.chars().map(escape).collect()
}

/// A rule of the configuration that does not hold; one line, for the user.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{field}: {rule}")]
pub struct ConfigError {
    /// The option or field, such as `--memory size`.
    pub field: String,
    /// What is wrong, and what would be right.
    pub rule: String,
    /// The same for those who wrote JSON, where it names other parts of the configuration.
    rule_in_json: Option<String>,
}

impl ConfigError {
    pub(crate) fn new(field: impl Into<String>, rule: impl Into<String>) -> Self {
        Self { field: field.into(), rule: one_line(&rule.into()), rule_in_json: None }
    }

    /// A rule that names options, and the same in the terms of JSON.
    fn in_both_terms(field: &str, rule: &str, rule_in_json: &str) -> Self {
        Self { rule_in_json: Some(one_line(rule_in_json)), ..Self::new(field, rule) }
    }

    /// The same in the terms of JSON: `--memory size` is `memory.size` there.
    pub fn in_json(&self) -> String {
        format!("{}: {}", field_of(&self.field), self.rule_in_json.as_ref().unwrap_or(&self.rule))
    }
}

/// What the guest boots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PayloadConfig {
    /// bzImage, or ELF image with a PVH entry point.
    #[schema(value_type = String)]
    pub kernel: PathBuf,
    /// Initial RAM file system.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// Kernel command line.
    #[serde(default, deserialize_with = "null_is_default")]
    #[schema(value_type = Option<String>, max_length = 65535)]
    pub cmdline: String,
}

/// The guest's CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CpusConfig {
    /// vCPUs at boot, 1 to 254.
    #[schema(minimum = 1, maximum = 254)]
    pub boot_vcpus: u32,
    /// As many as `boot_vcpus`, which 0 stands for: vCPUs cannot be added to a running VM.
    #[serde(default)]
    #[schema(maximum = 254)]
    pub max_vcpus: u32,
}

impl Default for CpusConfig {
    fn default() -> Self {
        Self { boot_vcpus: 1, max_vcpus: 1 }
    }
}

/// The guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Bytes, a multiple of 2 MiB.
    #[schema(minimum = 33_554_432, maximum = 549_755_813_888_u64, multiple_of = 2_097_152)]
    pub size: u64,
    /// Other processes can map it (a memfd), as opposed to memory of this process alone.
    #[serde(default)]
    pub shared: bool,
    /// It is made of the host's reserved huge pages of 2 MiB (always as a memfd).
    #[serde(default)]
    pub hugepages: bool,
    /// The host is asked for transparent huge pages. Of no meaning with `hugepages`.
    #[serde(default = "default_thp")]
    pub thp: bool,
}

impl MemoryConfig {
    /// `size` bytes and nothing special.
    pub fn with_size(size: u64) -> Self {
        Self { size, shared: false, hugepages: false, thp: true }
    }
}

fn default_thp() -> bool {
    true
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self::with_size(512 * MIB)
    }
}

/// A device of the host that the guest is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// Directory of the device in sysfs.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Whether the device is behind the virtio-iommu.
    #[serde(default)]
    pub iommu: bool,
    /// Name in logs and the API, not empty and without `_` at its start. Names that are not given are made up.
    #[serde(default)]
    pub id: Option<String>,
}

impl DeviceConfig {
    /// Checks a name that the user gave.
    pub fn check_id(&self) -> Result<(), ConfigError> {
        check_id("--device id", self.id.as_deref())
    }
}

fn check_id(field: &str, id: Option<&str>) -> Result<(), ConfigError> {
    match id {
        Some(id) if id.is_empty() || id.starts_with('_') => {
            Err(ConfigError::new(field, "must not be empty or start with '_'"))
        }
        _ => Ok(()),
    }
}

/// A device that another process of the host emulates, a vfio-user server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UserDeviceConfig {
    /// Socket that the server listens on.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// Whether the device is behind the virtio-iommu. Otherwise the server is given all guest RAM, which must be shared.
    #[serde(default)]
    pub iommu: bool,
    /// Name in logs and the API, as that of other devices.
    #[serde(default)]
    pub id: Option<String>,
}

impl UserDeviceConfig {
    /// Checks a name that the user gave.
    pub fn check_id(&self) -> Result<(), ConfigError> {
        check_id("--user-device id", self.id.as_deref())
    }
}

/// What the VM uses of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlatformConfig {
    /// Whether devices of the host are reached by IOMMUFD rather than by VFIO's groups and containers.
    #[serde(default)]
    pub iommufd: bool,
    /// Whether a thread polls for requests of the virtio-iommu while they come fast.
    #[serde(default)]
    pub iommu_poll: IommuPoll,
}

/// Whether a thread polls for requests of the virtio-iommu while they come fast, rather than have vCPUs leave the guest for
/// each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IommuPoll {
    /// If the host has more CPUs for this process than the VM has vCPUs.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Where a console goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ConsoleMode {
    /// There is none.
    Off,
    /// What the guest writes is dropped.
    Null,
    /// Standard input and output.
    Tty,
    /// A file.
    File,
}

/// A console.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConsoleConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file of [`ConsoleMode::File`].
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
}

impl Default for ConsoleConfig {
    /// What a VM gets that says nothing of its console.
    fn default() -> Self {
        Self { mode: ConsoleMode::Null, file: None }
    }
}

/// For fields that Cloud Hypervisor's clients may send as null.
fn null_is_default<'de, D: serde::Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

fn default_bounce_size() -> u64 {
    DEFAULT_BOUNCE_SIZE
}

/// Bounce windows of the virtio-iommu.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IommuBounceConfig {
    /// Budget of all windows in bytes, a multiple of the chunk size.
    #[serde(default = "default_bounce_size")]
    #[schema(minimum = 2_097_152, multiple_of = 2_097_152)]
    pub size: u64,
    /// How far the budget can be raised while the VM runs, in bytes: the size of the shared region. 0 stands for `size`.
    #[serde(default)]
    #[schema(multiple_of = 2_097_152)]
    pub max: u64,
    /// Size in bytes at or below which a DMA is bounced; `None` lets the guest's driver decide.
    #[serde(default)]
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold: Option<u32>,
    /// Whether windows are backed by huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
}

/// A whole VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// What it boots.
    pub payload: PayloadConfig,
    /// Its CPUs.
    #[serde(default)]
    pub cpus: CpusConfig,
    /// Its RAM.
    #[serde(default)]
    pub memory: MemoryConfig,
    /// Devices of the host that it is given.
    #[serde(default, deserialize_with = "null_is_default")]
    #[schema(value_type = Option<Vec<DeviceConfig>>)]
    pub devices: Vec<DeviceConfig>,
    /// Devices that other processes of the host emulate.
    #[serde(default, deserialize_with = "null_is_default")]
    #[schema(value_type = Option<Vec<UserDeviceConfig>>)]
    pub user_devices: Vec<UserDeviceConfig>,
    /// What it uses of the host.
    #[serde(default)]
    pub platform: PlatformConfig,
    /// Its first serial port.
    #[serde(default)]
    pub serial: ConsoleConfig,
    /// Whether it has a pvpanic device, by which the guest's kernel tells of a panic.
    #[serde(default)]
    pub pvpanic: bool,
    /// Bounce windows, if it has them.
    #[serde(default)]
    pub iommu_bounce: Option<IommuBounceConfig>,
}

impl VmConfig {
    /// Checks what the user gave, and fills in what follows from it.
    pub fn prepare(&mut self) -> Result<(), ConfigError> {
        // Before anything else: a client may send thousands, and each is compared with all others.
        self.check_device_count()?;
        self.devices.iter().try_for_each(DeviceConfig::check_id)?;
        self.user_devices.iter().try_for_each(UserDeviceConfig::check_id)?;
        self.complete();
        let (behind, beside) = self.count_devices();
        if self.iommu_bounce.is_some() && behind == 0 && beside != 0 {
            // Not a rule that always holds: devices come and go while the VM runs.
            let rule = "needs a device behind the virtio-iommu: add ',iommu=on' to a --device or --user-device";
            let in_json = "needs a device behind the virtio-iommu: set iommu of one of devices or user_devices to true";
            return Err(ConfigError::in_both_terms("--iommu-bounce", rule, in_json));
        }
        self.validate()
    }

    /// Fills in what follows from the rest.
    pub fn complete(&mut self) {
        if let Some(bounce) = self.iommu_bounce.as_mut().filter(|bounce| bounce.max == 0) {
            bounce.max = bounce.size;
        }
        if self.cpus.max_vcpus == 0 {
            self.cpus.max_vcpus = self.cpus.boot_vcpus;
        }
        let taken: Vec<String> = self.ids().map(String::from).collect();
        make_up_ids(self.devices.iter_mut().map(|device| &mut device.id), "_vfio", &taken);
        make_up_ids(self.user_devices.iter_mut().map(|device| &mut device.id), "_vfio_user", &taken);
    }

    /// The names of all devices that have one.
    fn ids(&self) -> impl Iterator<Item = &str> {
        let user = self.user_devices.iter().filter_map(|device| device.id.as_deref());
        self.devices.iter().filter_map(|device| device.id.as_deref()).chain(user)
    }

    /// How many devices are behind the virtio-iommu, and how many are not.
    fn count_devices(&self) -> (usize, usize) {
        let user = self.user_devices.iter().map(|device| device.iommu);
        let behind = self.devices.iter().map(|device| device.iommu).chain(user).filter(|behind| *behind).count();
        (behind, self.devices.len() + self.user_devices.len() - behind)
    }

    /// Whether a device is configured, of whatever kind.
    pub fn has_devices(&self) -> bool {
        !self.devices.is_empty() || !self.user_devices.is_empty()
    }

    /// Whether the VM has a virtio-iommu: for a device behind it, or for one that will come to it while the VM runs.
    pub fn has_iommu(&self) -> bool {
        self.iommu_bounce.is_some() || self.count_devices().0 != 0
    }

    /// Checks every rule that can be checked without touching the host.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let vcpus = self.cpus.boot_vcpus;
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(ConfigError::new("--cpus boot", format!("{vcpus} is not in 1 to {MAX_VCPUS}")));
        }
        if self.cpus.max_vcpus != vcpus {
            let rule = format!("{} is not {vcpus}: vCPUs cannot be added while the VM runs", self.cpus.max_vcpus);
            return Err(ConfigError::new("--cpus max", rule));
        }
        if self.serial.mode == ConsoleMode::File && self.serial.file.is_none() {
            return Err(ConfigError::new("--serial file", "is needed with mode File"));
        }
        self.validate_memory()?;
        if self.payload.cmdline.len() >= crate::arch::layout::CMDLINE_MAX {
            let rule = format!(
                "{} bytes long, must be below {}",
                self.payload.cmdline.len(),
                crate::arch::layout::CMDLINE_MAX
            );
            return Err(ConfigError::new("--cmdline", rule));
        }
        self.validate_devices()?;
        self.iommu_bounce.as_ref().map_or(Ok(()), |bounce| self.validate_bounce(bounce))
    }

    fn validate_memory(&self) -> Result<(), ConfigError> {
        let size = self.memory.size;
        let rule = if size < MIN_MEMORY {
            format!("{size} bytes are too little, the least is {}M", MIN_MEMORY / MIB)
        } else if size > MAX_MEMORY {
            format!("{size} bytes are too much, the most is {}G", MAX_MEMORY >> 30)
        } else if !size.is_multiple_of(2 * MIB) {
            format!("{size} bytes are no multiple of 2M")
        } else {
            return Ok(());
        };
        Err(ConfigError::new("--memory size", rule))
    }

    fn check_device_count(&self) -> Result<(), ConfigError> {
        let (behind, beside) = self.count_devices();
        // pvpanic takes a slot from those.
        let most_beside = |slots: RangeInclusive<u8>| slots.len() - usize::from(self.pvpanic);
        let rule = if !self.has_iommu() {
            let most = most_beside(PCI_SLOTS);
            (beside > most).then(|| format!("at most {most} devices fit on the bus"))
        } else if behind > PCI_SLOTS_BEHIND_IOMMU.len() {
            Some(format!("at most {} devices fit behind the virtio-iommu", PCI_SLOTS_BEHIND_IOMMU.len()))
        } else {
            let most = most_beside(PCI_SLOTS_BESIDE_IOMMU);
            (beside > most).then(|| format!("at most {most} devices with iommu off fit beside the virtio-iommu"))
        };
        if let Some(rule) = rule {
            return Err(ConfigError::new("--device", rule));
        }
        Ok(())
    }

    fn validate_devices(&self) -> Result<(), ConfigError> {
        self.check_device_count()?;
        for (index, device) in self.devices.iter().enumerate() {
            let earlier = &self.devices[..index];
            if earlier.iter().any(|other| other.path == device.path) {
                return Err(ConfigError::new("--device path", format!("{} is given twice", device.path.display())));
            }
            if device.id.is_some() && earlier.iter().any(|other| other.id == device.id) {
                let id = device.id.as_deref().unwrap_or_default();
                return Err(ConfigError::new("--device id", format!("'{id}' is given twice")));
            }
        }
        self.user_devices.iter().enumerate().try_for_each(|(index, device)| self.validate_user_device(index, device))
    }

    fn validate_user_device(&self, index: usize, device: &UserDeviceConfig) -> Result<(), ConfigError> {
        if self.user_devices[..index].iter().any(|other| other.socket == device.socket) {
            let rule = format!("{} is given twice", device.socket.display());
            return Err(ConfigError::new("--user-device socket", rule));
        }
        if let Some(id) = device.id.as_deref()
            && self.ids().filter(|other| *other == id).count() > 1
        {
            return Err(ConfigError::new("--user-device id", format!("'{id}' is given twice")));
        }
        if !device.iommu && !self.memory.shared && !self.memory.hugepages {
            let rule = |shared| {
                format!(
                    "is off, so that the server is given all guest RAM, which needs {shared}; or turn it on, and the server \
                     reaches what the guest maps"
                )
            };
            let (rule, in_json) = (rule("--memory shared=on"), rule("memory.shared to be true"));
            return Err(ConfigError::in_both_terms("--user-device iommu", &rule, &in_json));
        }
        Ok(())
    }

    fn validate_bounce(&self, bounce: &IommuBounceConfig) -> Result<(), ConfigError> {
        let aperture = WINDOW_APERTURE.end() - WINDOW_APERTURE.start() + 1;
        let (field, rule) = if bounce.size == 0 || !bounce.size.is_multiple_of(CHUNK_SIZE) {
            ("--iommu-bounce size", format!("{} bytes are no positive multiple of {}M", bounce.size, CHUNK_SIZE / MIB))
        } else if !bounce.max.is_multiple_of(CHUNK_SIZE) {
            ("--iommu-bounce max", format!("{} bytes are no multiple of {}M", bounce.max, CHUNK_SIZE / MIB))
        } else if bounce.max < bounce.size {
            ("--iommu-bounce max", format!("{} bytes are less than size ({} bytes)", bounce.max, bounce.size))
        } else if bounce.max > 32 * aperture {
            ("--iommu-bounce max", format!("{} bytes are too much, the most is {}G", bounce.max, (32 * aperture) >> 30))
        } else {
            return Ok(());
        };
        Err(ConfigError::new(field, rule))
    }
}

/// Names what has no name, with numbers that make names that are not `taken`.
fn make_up_ids<'id>(ids: impl Iterator<Item = &'id mut Option<String>>, prefix: &str, taken: &[String]) {
    let mut names = (0u32..).map(|number| format!("{prefix}{number}")).filter(|name| !taken.contains(name));
    ids.filter(|id| id.is_none()).for_each(|id| *id = names.next());
}

#[cfg(test)]
mod tests;
