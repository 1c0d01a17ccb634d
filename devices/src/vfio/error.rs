// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reasons why a host device cannot be passed through, with a remedy where the user has one.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;
use vfio_ioctls::VfioError;

/// Host function and the driver that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Address of the function, such as `0000:00:05.0`.
    pub name: String,
    /// Name of the driver.
    pub driver: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (driver {})", self.name, self.driver)
    }
}

fn list(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "functions that host drivers hold".to_string();
    }
    holders.iter().map(Holder::to_string).collect::<Vec<_>>().join(", ")
}

fn held_by(driver: &Option<String>) -> String {
    driver.as_ref().map_or_else(|| "bound to no driver".to_string(), |name| format!("bound to driver {name}"))
}

/// Reason why a host device cannot be passed through.
#[derive(Debug, Error)]
pub enum VfioPciError {
    /// The path does not exist.
    #[error("{}: {source}; give the sysfs path of a PCI function, such as /sys/bus/pci/devices/0000:00:05.0", path.display())]
    NoSuchDevice {
        /// Path that the user gave.
        path: PathBuf,
        /// Error from the host's kernel.
        source: io::Error,
    },
    /// The path does not name a PCI function.
    #[error("{} is not a PCI function; give the sysfs path of a PCI function, such as /sys/bus/pci/devices/0000:00:05.0", path.display())]
    NotPci {
        /// Path that the user gave.
        path: PathBuf,
    },
    /// No vfio-user server listens on the socket.
    #[error(
        "{}: {source}; start the vfio-user server first, name the server's socket, and give carom access to this socket",
        path.display()
    )]
    NoServer {
        /// Path of the socket.
        path: PathBuf,
        /// Error from the host's kernel.
        source: io::Error,
    },
    /// The function is a bridge.
    #[error(
        "{name} is a PCI bridge (header type {header_type}), and only endpoints (header type 0) can be passed through: name the devices behind the bridge instead"
    )]
    Bridge {
        /// Address of the function.
        name: String,
        /// Header type of the function.
        header_type: u8,
    },
    /// The function is bound to a host driver other than vfio-pci, or to no driver.
    #[error(
        "{name} is {}, not to vfio-pci; bind it to vfio-pci: write vfio-pci to /sys/bus/pci/devices/{name}/driver_override, \
         {name} to /sys/bus/pci/devices/{name}/driver/unbind if the function has a driver, and {name} to /sys/bus/pci/drivers_probe",
        held_by(driver)
    )]
    NotBound {
        /// Address of the function.
        name: String,
        /// Driver that holds the function, if any.
        driver: Option<String>,
    },
    /// The function is in no IOMMU group.
    #[error(
        "{name} is in no IOMMU group: enable the host's IOMMU in its firmware and with intel_iommu=on or amd_iommu=on on the host's \
         kernel command line"
    )]
    NoGroup {
        /// Address of the function.
        name: String,
    },
    /// INTx is the only interrupt of the function, and the host cannot forward it.
    #[error(
        "{name} has only INTx (no MSI or MSI-X), and the host cannot forward INTx: {source}; if the line is busy, \
         bind the other host devices on the interrupt line of {name} to vfio-pci or to no driver"
    )]
    OnlyIntx {
        /// Address of the function.
        name: String,
        /// Error from the host's kernel.
        source: io::Error,
    },
    /// Host drivers hold other functions of the IOMMU group.
    #[error(
        "IOMMU group {group} of {name} is not viable: the group also holds {}; bind these functions to vfio-pci or to no driver",
        list(others)
    )]
    NotViable {
        /// Address of the function.
        name: String,
        /// Number of the function's IOMMU group.
        group: u32,
        /// Other functions of the group that host drivers hold.
        others: Vec<Holder>,
    },
    /// Another process or device uses the IOMMU group.
    #[error(
        "IOMMU group {group} of {name} is already in use: only one process can use the devices of a group, and one VM can \
         have several devices of a group only with iommu=off"
    )]
    Busy {
        /// Address of the function.
        name: String,
        /// Number of the function's IOMMU group.
        group: u32,
    },
    /// The function is already a device of this VM, under another path.
    #[error("{name} is already a device of this VM, by another path; give each host function only once")]
    Twice {
        /// Address of the function.
        name: String,
    },
    /// A VFIO device file is missing.
    #[error("{}: does not exist, or has no driver: load VFIO on the host (modprobe -a vfio-pci vfio_iommu_type1)", path.display())]
    NoVfio {
        /// Path of the device file.
        path: PathBuf,
    },
    /// A VFIO device file cannot be opened.
    #[error("{}: {source}; run as root, or give your user read and write access to this file", path.display())]
    NoAccess {
        /// Path of the device file.
        path: PathBuf,
        /// Error from the host's kernel.
        source: io::Error,
    },
    /// The host's VFIO lacks the type 1 IOMMU back end.
    #[error("the host's VFIO has no type 1 (version 2) IOMMU: load its module (modprobe vfio_iommu_type1)")]
    NoType1,
    /// The host has no IOMMUFD.
    #[error(
        "/dev/iommu: does not exist, or has no driver: load IOMMUFD on the host (modprobe iommufd) if the host's kernel has it \
         (CONFIG_IOMMUFD), or turn platform.iommufd off"
    )]
    NoIommufd,
    /// VFIO has no character device for the function.
    #[error(
        "{name} has no character device in /dev/vfio/devices: the host's kernel is built without \
         CONFIG_VFIO_DEVICE_CDEV; turn platform.iommufd off"
    )]
    NoCdev {
        /// Address of the function.
        name: String,
    },
    /// IOMMUFD denies access to the IOMMU group.
    #[error(
        "IOMMUFD denies access to IOMMU group {group} of {name}: end other processes that use a device of the group, and turn on \
         interrupt remapping on the host (or set parameter allow_unsafe_interrupts of module iommufd)"
    )]
    NotOurs {
        /// Address of the function.
        name: String,
        /// Number of the function's IOMMU group.
        group: u32,
    },
    /// The device or VFIO reports an impossible value.
    #[error("{name}: {what}")]
    Nonsense {
        /// Address of the function.
        name: String,
        /// Description of the impossible value.
        what: String,
    },
    /// An operation failed with an error from the host's kernel.
    #[error("{what}: {source}")]
    Host {
        /// Operation that failed, and its object.
        what: String,
        /// Error from the host's kernel.
        source: io::Error,
    },
    /// An operation failed with an error from the `vfio-ioctls` crate.
    #[error("{what}: {source}")]
    Vfio {
        /// Operation that failed, and its object.
        what: String,
        /// Error from the `vfio-ioctls` crate.
        source: VfioError,
    },
}

impl VfioPciError {
    /// True if the user can fix the error, such as a wrong path, a device that is not bound to VFIO, or missing rights. All other
    /// errors are failures of the host or the device.
    pub fn is_user_error(&self) -> bool {
        !matches!(self, Self::Nonsense { .. } | Self::Host { .. } | Self::Vfio { .. })
    }
}

/// Converts a failure to open a VFIO device file to an error with a remedy.
pub(in crate::vfio) fn file_error(path: PathBuf, source: io::Error) -> VfioPciError {
    match source.kind() {
        io::ErrorKind::NotFound => VfioPciError::NoVfio { path },
        io::ErrorKind::PermissionDenied => VfioPciError::NoAccess { path, source },
        // The device file exists, but its kernel module is not loaded.
        _ if matches!(source.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => VfioPciError::NoVfio { path },
        _ => VfioPciError::Host { what: format!("cannot open {}", path.display()), source },
    }
}
