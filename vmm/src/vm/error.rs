// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a VM could not be built or go on.

use std::io;

use devices::pci::PciError;
use devices::vfio::VfioPciError;
use thiserror::Error;

use crate::boot::BootError;
use crate::config::ConfigError;
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
    /// A file that the command line names.
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
}
