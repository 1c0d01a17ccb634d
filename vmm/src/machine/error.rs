// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a VM could not be built or go on.

use std::io;

use devices::pci::PciError;
use devices::vfio::VfioPciError;
use thiserror::Error;

use crate::arch::boot::BootError;
use crate::config::{ConfigError, field_of};
use crate::kvm::KvmError;
use crate::memory::MemoryError;

/// Why a VM could not be built or go on; one line for the user.
#[derive(Debug, Error)]
pub enum VmError {
    /// Kernel or initramfs.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// KVM.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// RAM.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// ACPI tables.
    #[error("writing the ACPI tables: {0}")]
    Tables(vm_memory::GuestMemoryError),
    /// The root bus.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// What a client asked of a running VM breaks a rule.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The way to the host's IOMMU.
    #[error("--platform: {source}")]
    Platform {
        /// What is wrong.
        source: VfioPciError,
    },
    /// A device that is to be passed through.
    #[error("--device {path}: {source}")]
    Passthrough {
        /// The device's directory.
        path: String,
        /// What is wrong.
        source: VfioPciError,
    },
    /// A device that another process emulates.
    #[error("--user-device: {source}")]
    UserDevice {
        /// What is wrong.
        source: VfioPciError,
    },
    /// The virtio-iommu.
    #[error("virtio-iommu: {0}")]
    Iommu(String),
    /// A file that the command line names, or a client of the API.
    #[error("{option} {path}: {source}")]
    File {
        /// The option.
        option: &'static str,
        /// The file.
        path: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Anything else of a device.
    #[error("{what}: {source}")]
    Device {
        /// What was being done.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The guest, or KVM on its behalf, gave up.
    #[error("{0}")]
    Guest(String),
}

impl VmError {
    /// Whether the user can mend it: exit status 2 rather than 1.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Boot(error) => error.is_user_error(),
            Self::Kvm(error) => error.is_user_error(),
            Self::Passthrough { source, .. } | Self::UserDevice { source } | Self::Platform { source } => {
                source.is_user_error()
            }
            Self::File { .. } | Self::Config(_) => true,
            _ => false,
        }
    }

    /// The same in the terms of JSON, for clients of the API.
    pub fn in_json(&self) -> String {
        match self {
            Self::Boot(error) => error.in_json(),
            Self::Config(error) => error.in_json(),
            Self::Platform { source } => format!("platform.iommufd: {source}"),
            // These name the path themselves.
            Self::Passthrough {
                source: source @ (VfioPciError::NoSuchDevice { .. } | VfioPciError::NotPci { .. }),
                ..
            } => format!("devices.path: {source}"),
            Self::Passthrough { path, source } => format!("devices.path: {path}: {source}"),
            Self::UserDevice { source } => format!("user_devices.socket: {source}"),
            // The file is a value of its own there.
            Self::File { option: "--serial", path, source } => format!("serial.file: {path}: {source}"),
            Self::File { option, path, source } => format!("{}: {path}: {source}", field_of(option)),
            Self::Kvm(_)
            | Self::Memory(_)
            | Self::Tables(_)
            | Self::Pci(_)
            | Self::Iommu(_)
            | Self::Device { .. }
            | Self::Guest(_) => self.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::PayloadConfig;

    #[test]
    fn clients_of_the_api_are_told_of_fields_rather_than_of_options() {
        let io = || io::Error::from_raw_os_error(libc::ENOENT);
        let no_kernel = PayloadConfig { kernel: "/no/kernel".into(), ..Default::default() };
        let no_initramfs = PayloadConfig {
            kernel: "/proc/self/exe".into(),
            initramfs: Some("/no/initramfs".into()),
            ..no_kernel.clone()
        };
        let no_image = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(no_image.path(), "text").unwrap();
        let text = PayloadConfig { kernel: no_image.path().into(), ..Default::default() };
        let boot = |config| VmError::Boot(crate::arch::boot::Payload::open(config).err().unwrap());
        let (path, name) = ("/sys/d".to_string(), "0000:00:05.0".to_string());
        for (error, option, field) in [
            (boot(&no_kernel), "--kernel /no/kernel: ", "payload.kernel: /no/kernel: No such file"),
            (boot(&no_initramfs), "--initramfs /no/initramfs: ", "payload.initramfs: /no/initramfs: No such file"),
            (boot(&text), "--kernel /", "payload.kernel: /"),
            (BootError::NoRoom("x".into()).into(), "--memory size: x", "memory.size: x"),
            (ConfigError::new("--device path", "x").into(), "--device path: x", "devices.path: x"),
            (
                VmError::Platform { source: VfioPciError::NoIommufd },
                "--platform: /dev/iommu",
                "platform.iommufd: /dev/iommu",
            ),
            (
                VmError::Passthrough {
                    path: path.clone(),
                    source: VfioPciError::NoSuchDevice { path: "/sys/d".into(), source: io() },
                },
                "--device /sys/d: ",
                "devices.path: /sys/d: No such file",
            ),
            (
                VmError::Passthrough { path, source: VfioPciError::NoGroup { name } },
                "--device /sys/d: 0000:00:05.0 is in no",
                "devices.path: /sys/d: 0000:00:05.0 is in no",
            ),
            (
                VmError::UserDevice { source: VfioPciError::NoServer { path: "/s".into(), source: io() } },
                "--user-device: /s: ",
                "user_devices.socket: /s: No such file",
            ),
            (
                VmError::File { option: "--serial", path: "/f".into(), source: io() },
                "--serial /f: ",
                "serial.file: /f: No such file",
            ),
        ] {
            let in_json = error.in_json();
            assert!(error.to_string().starts_with(option), "{error}");
            assert!(in_json.starts_with(field) && !in_json.contains("--"), "{in_json}");
            assert!(error.is_user_error(), "{error}");
        }
    }
}
