// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a VM is made of, in Cloud Hypervisor's terms, and the rules it must keep.

mod option_list;
mod parse;
mod size;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use option_list::{OptionList, OptionListError};
pub use size::parse_size;

use crate::layout::{MAX_MEMORY, MIB, WINDOW_APERTURE};

/// Most vCPUs a VM may have: what the 8-bit local APIC IDs of the MADT can name.
pub const MAX_VCPUS: u32 = 254;
/// Size of a chunk of a bounce window: one huge page.
pub const CHUNK_SIZE: u64 = 2 * MIB;
/// Budget of all bounce windows where `--iommu-bounce` names none.
pub const DEFAULT_BOUNCE_SIZE: u64 = 64 * MIB;
/// Least RAM that any kernel boots in.
const MIN_MEMORY: u64 = 32 * MIB;
/// Most devices that fit on the root bus beside the host bridge and the virtio-iommu.
const MAX_DEVICES: usize = 30;

/// A rule of the configuration that does not hold; one line, for the user.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{field}: {rule}")]
pub struct ConfigError {
    /// The option or field, such as `--memory size`.
    pub field: String,
    /// What is wrong, and what would be right.
    pub rule: String,
}

impl ConfigError {
    pub(crate) fn new(field: impl Into<String>, rule: impl Into<String>) -> Self {
        Self { field: field.into(), rule: rule.into() }
    }
}

/// What the guest boots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PayloadConfig {
    /// bzImage, or ELF image with a PVH entry point.
    pub kernel: PathBuf,
    /// Initial RAM file system.
    #[serde(default)]
    pub initramfs: Option<PathBuf>,
    /// Kernel command line.
    #[serde(default)]
    pub cmdline: String,
}

/// The guest's CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpusConfig {
    /// vCPUs at boot, 1 to 254.
    pub boot_vcpus: u32,
}

/// The guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Bytes, a multiple of 2 MiB.
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

/// A device of the host that the guest is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// Directory of the device in sysfs.
    pub path: PathBuf,
    /// Whether the device is behind the virtio-iommu.
    #[serde(default)]
    pub iommu: bool,
    /// Name in logs and the API.
    #[serde(default)]
    pub id: Option<String>,
}

/// What the VM uses of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlatformConfig {
    /// Whether devices of the host are reached by IOMMUFD rather than by VFIO's groups and containers.
    #[serde(default)]
    pub iommufd: bool,
}

/// Where a console goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file of [`ConsoleMode::File`].
    #[serde(default)]
    pub file: Option<PathBuf>,
}

fn default_bounce_size() -> u64 {
    DEFAULT_BOUNCE_SIZE
}

/// Bounce windows of the virtio-iommu.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IommuBounceConfig {
    /// Budget of all windows in bytes, a multiple of the chunk size.
    #[serde(default = "default_bounce_size")]
    pub size: u64,
    /// How far the budget can be raised while the VM runs, in bytes: the size of the shared region. 0 stands for `size`.
    #[serde(default)]
    pub max: u64,
    /// Size in bytes at or below which a DMA is bounced; `None` lets the guest's driver decide.
    #[serde(default)]
    pub threshold: Option<u32>,
    /// Whether windows are backed by huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
}

/// A whole VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmConfig {
    /// What it boots.
    pub payload: PayloadConfig,
    /// Its CPUs.
    pub cpus: CpusConfig,
    /// Its RAM.
    pub memory: MemoryConfig,
    /// Devices of the host that it is given.
    #[serde(default)]
    pub devices: Vec<DeviceConfig>,
    /// What it uses of the host.
    #[serde(default)]
    pub platform: PlatformConfig,
    /// Its first serial port.
    pub serial: ConsoleConfig,
    /// Bounce windows, if it has them.
    #[serde(default)]
    pub iommu_bounce: Option<IommuBounceConfig>,
}

impl VmConfig {
    /// Fills in what follows from the rest.
    pub fn complete(&mut self) {
        if let Some(bounce) = self.iommu_bounce.as_mut().filter(|bounce| bounce.max == 0) {
            bounce.max = bounce.size;
        }
    }

    /// Whether the VM has a virtio-iommu.
    pub fn has_iommu(&self) -> bool {
        self.devices.iter().any(|device| device.iommu)
    }

    /// Checks every rule that can be checked without touching the host.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let vcpus = self.cpus.boot_vcpus;
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(ConfigError::new("--cpus boot", format!("{vcpus} is not in 1 to {MAX_VCPUS}")));
        }
        self.validate_memory()?;
        if self.payload.cmdline.len() >= crate::layout::CMDLINE_MAX {
            let rule =
                format!("{} bytes long, must be below {}", self.payload.cmdline.len(), crate::layout::CMDLINE_MAX);
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

    fn validate_devices(&self) -> Result<(), ConfigError> {
        if self.devices.len() > MAX_DEVICES {
            return Err(ConfigError::new("--device", format!("at most {MAX_DEVICES} devices fit on the bus")));
        }
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
        Ok(())
    }

    fn validate_bounce(&self, bounce: &IommuBounceConfig) -> Result<(), ConfigError> {
        let aperture = WINDOW_APERTURE.end() - WINDOW_APERTURE.start() + 1;
        let (field, rule) = if !self.has_iommu() {
            ("--iommu-bounce", "needs a device behind the virtio-iommu: add ',iommu=on' to a --device".to_string())
        } else if bounce.size == 0 || !bounce.size.is_multiple_of(CHUNK_SIZE) {
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

#[cfg(test)]
mod tests;
