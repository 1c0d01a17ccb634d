// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Errors of building and running a VM.

use std::io;
use std::path::Path;

use carom_api::config::LandlockConfig;
use carom_api::error::FileError;
use carom_api::{ConfigError, Explain, Field, Terms};
use devices::pci::PciError;
use devices::vfio::VfioPciError;
use thiserror::Error;

use crate::arch::board::BoardError;
use crate::arch::boot::BootError;
use crate::kvm::KvmError;
use crate::memory::MemoryError;
use crate::vm_state::VmStateError;

/// Error of building or running a VM, as one line for the user.
#[derive(Debug, Error)]
pub enum VmError {
    /// Error of the kernel, firmware or initramfs.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Error of KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// Error of creating RAM.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// RAM could not be added to a running guest.
    #[error("cannot add RAM: {0}")]
    MoreRam(String),
    /// The guest has not released this vCPU yet.
    #[error("vCPU {0} is about to be removed, and the guest has not released it yet: try again later")]
    VcpuLeaving(u32),
    /// ACPI tables, SMBIOS tables, or the VM Generation ID could not be written.
    #[error("cannot write the ACPI tables, the SMBIOS tables or the VM Generation ID to guest memory: {0}")]
    Tables(vm_memory::GuestMemoryError),
    /// Error of the PCI root bus.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// A client's request to a running VM breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A host device or a vfio-user device failed, or its path is wrong.
    #[error("{}", explain_vfio(*field, path.as_deref(), source, Terms::Options))]
    Vfio {
        /// Option that caused the error.
        field: Field,
        /// Directory of the device. `None` if the text of `source` needs no directory.
        path: Option<String>,
        /// Cause.
        source: Box<VfioPciError>,
    },
    /// Error of the virtio-iommu.
    #[error("virtio-iommu: {0}")]
    Iommu(String),
    /// A file that the command line or an API client names cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The VM could not be saved or restored.
    #[error(transparent)]
    State(#[from] VmStateError),
    /// Any other operation that failed.
    #[error("cannot {what}: {source}")]
    Device {
        /// Operation that failed, as a verb: "resize a disk".
        what: &'static str,
        /// Error from the kernel.
        source: io::Error,
    },
    /// A file could not be opened while the program is restricted to some files.
    #[error("{0}; {hint}", hint = beyond_limits(Terms::Options))]
    BeyondLimits(Box<VmError>),
    /// The guest failed, or KVM failed while it ran the guest.
    #[error("{0}")]
    Guest(String),
}

impl From<BoardError> for VmError {
    fn from(BoardError { what, source }: BoardError) -> Self {
        Self::Device { what, source }
    }
}

impl VmError {
    /// Returns a function that turns an I/O error into the error of the file at `path`, which `field` names.
    pub fn of_file(field: Field, path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| FileError { field, path: path.display().to_string(), source }.into()
    }

    /// Adds the name of a device to the error of an operation on the device.
    #[must_use]
    pub fn of_device(self, id: &str) -> Self {
        match self {
            Self::Device { what, source } => {
                Self::Device { what, source: io::Error::new(source.kind(), format!("{id}: {source}")) }
            }
            other => other,
        }
    }

    /// True if the user can fix the cause. The exit status is then 2 instead of 1.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Boot(error) => error.is_user_error(),
            Self::Memory(error) => error.is_user_error(),
            Self::Kvm(error) => error.is_user_error(),
            Self::Vfio { source, .. } => source.is_user_error(),
            Self::State(error) => error.is_user_error(),
            Self::File(_) | Self::Config(_) | Self::BeyondLimits(_) => true,
            _ => false,
        }
    }
}

impl Explain for VmError {
    fn explain(&self, terms: Terms) -> String {
        match self {
            Self::Boot(error) => error.explain(terms),
            Self::Memory(error) | Self::State(VmStateError::Memory(error)) => error.explain(terms),
            Self::Config(error) => error.explain(terms),
            Self::State(VmStateError::Config(error)) => error.explain(terms),
            Self::BeyondLimits(error) => format!("{}; {}", error.explain(terms), beyond_limits(terms)),
            Self::File(error) => error.explain(terms),
            Self::Vfio { field, path, source } => explain_vfio(*field, path.as_deref(), source, terms),
            Self::Kvm(_)
            | Self::Tables(_)
            | Self::Pci(_)
            | Self::Iommu(_)
            | Self::State(_)
            | Self::Device { .. }
            | Self::MoreRam(_)
            | Self::VcpuLeaving(_)
            | Self::Guest(_) => self.to_string(),
        }
    }
}

fn beyond_limits(terms: Terms) -> String {
    let rules = LandlockConfig::OPTION.name(terms);
    format!(
        "Landlock may be the cause: it allows only files named in {rules} or in the VM's configuration when Landlock was turned on"
    )
}

fn explain_vfio(field: Field, path: Option<&str>, source: &VfioPciError, terms: Terms) -> String {
    // The texts of these errors already name the path.
    let named = matches!(source, VfioPciError::NoSuchDevice { .. } | VfioPciError::NotPci { .. });
    match (path, terms) {
        (Some(path), Terms::Options) => format!("{}: {source}", field.with_value(path, terms)),
        (Some(path), Terms::Json) if !named => format!("{}: {source}", field.with_value(path, terms)),
        (None, Terms::Options) => format!("{}: {source}", field.option()),
        (_, Terms::Json) => format!("{}: {source}", field.name(terms)),
    }
}

#[cfg(test)]
mod tests {
    use carom_api::config::{MemoryConfig, PayloadConfig, PlatformConfig, SerialConfig};
    use carom_api::{DeviceConfig, UserDeviceConfig};

    use super::*;

    #[test]
    fn failed_operation_on_a_device_names_the_device() {
        let failed = VmError::Device { what: "resize a disk", source: io::ErrorKind::NotFound.into() };
        assert_eq!(failed.of_device("_disk0").to_string(), "cannot resize a disk: _disk0: entity not found");
        let other = VmError::VcpuLeaving(1).of_device("_disk0").to_string();
        assert!(!other.contains("_disk0"), "{other}");
    }

    #[test]
    fn errors_for_api_clients_name_fields_instead_of_options() {
        let io = || io::Error::from_raw_os_error(libc::ENOENT);
        let no_kernel = PayloadConfig::of_kernel("/no/kernel");
        let no_initramfs =
            PayloadConfig { initramfs: Some("/no/initramfs".into()), ..PayloadConfig::of_kernel("/proc/self/exe") };
        let no_firmware = PayloadConfig::of_firmware("/no/firmware");
        let no_image = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(no_image.path(), "text").unwrap();
        let text = PayloadConfig::of_kernel(no_image.path());
        let boot = |config| VmError::Boot(crate::arch::boot::Payload::open(config).err().unwrap());
        let (path, name) = ("/sys/d".to_string(), "0000:00:05.0".to_string());
        for (error, option, field) in [
            (boot(&no_kernel), "--kernel /no/kernel: ", "payload.kernel: /no/kernel: No such file"),
            (boot(&no_initramfs), "--initramfs /no/initramfs: ", "payload.initramfs: /no/initramfs: No such file"),
            (boot(&no_firmware), "--firmware /no/firmware: ", "payload.firmware: /no/firmware: No such file"),
            (boot(&text), "--kernel /", "payload.kernel: /"),
            (BootError::NoRoom(ConfigError::new(MemoryConfig::SIZE, "x")).into(), "--memory size: x", "memory.size: x"),
            (ConfigError::new(DeviceConfig::PATH, "x").into(), "--device path: x", "devices.path: x"),
            (
                VmError::Vfio { field: PlatformConfig::IOMMUFD, path: None, source: VfioPciError::NoIommufd.into() },
                "--platform: /dev/iommu",
                "platform.iommufd: /dev/iommu",
            ),
            (
                VmError::Vfio {
                    field: DeviceConfig::PATH,
                    path: Some(path.clone()),
                    source: Box::new(VfioPciError::NoSuchDevice { path: "/sys/d".into(), source: io() }),
                },
                "--device /sys/d: ",
                "devices.path: /sys/d: No such file",
            ),
            (
                VmError::Vfio {
                    field: DeviceConfig::PATH,
                    path: Some(path),
                    source: VfioPciError::NoGroup { name }.into(),
                },
                "--device /sys/d: 0000:00:05.0 is in no",
                "devices.path: /sys/d: 0000:00:05.0 is in no",
            ),
            (
                VmError::Vfio {
                    field: UserDeviceConfig::SOCKET,
                    path: None,
                    source: Box::new(VfioPciError::NoServer { path: "/s".into(), source: io() }),
                },
                "--user-device: /s: ",
                "user_devices.socket: /s: No such file",
            ),
            (
                FileError { field: SerialConfig::OPTION.key("file"), path: "/f".into(), source: io() }.into(),
                "--serial /f: ",
                "serial.file: /f: No such file",
            ),
        ] {
            let in_json = error.explain(Terms::Json);
            assert!(error.to_string().starts_with(option), "{error}");
            assert!(in_json.starts_with(field) && !in_json.contains("--"), "{in_json}");
            assert!(error.is_user_error(), "{error}");
        }
    }
}
