// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Why a host device could not be passed through, and what the user can do about it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;
use vfio_ioctls::VfioError;

/// A function of the host and the driver that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Address of the function, such as `0000:00:05.0`.
    pub name: String,
    /// Name of its driver.
    pub driver: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (driver {})", self.name, self.driver)
    }
}

fn list(holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "functions that drivers of the host hold".to_string();
    }
    holders.iter().map(Holder::to_string).collect::<Vec<_>>().join(", ")
}

fn held_by(driver: &Option<String>) -> String {
    driver.as_ref().map_or_else(|| "bound to no driver".to_string(), |name| format!("bound to driver {name}"))
}

/// Why a host device could not be passed through.
#[derive(Debug, Error)]
pub enum VfioPciError {
    /// The path leads nowhere.
    #[error("{}: {source}; give the sysfs path of a PCI function, such as /sys/bus/pci/devices/0000:00:05.0", path.display())]
    NoSuchDevice {
        /// The path given.
        path: PathBuf,
        /// What the host said.
        source: io::Error,
    },
    /// The path leads to something else.
    #[error("{} is no PCI function; give the sysfs path of one, such as /sys/bus/pci/devices/0000:00:05.0", path.display())]
    NotPci {
        /// The path given.
        path: PathBuf,
    },
    /// No vfio-user server listens.
    #[error("{}: {source}; start the vfio-user server first, and give the socket that it listens on", path.display())]
    NoServer {
        /// The socket.
        path: PathBuf,
        /// What the host said.
        source: io::Error,
    },
    /// The function is a bridge.
    #[error(
        "{name} is a PCI bridge (header type {header_type}), and only endpoints (header type 0) can be passed through"
    )]
    Bridge {
        /// Address of the function.
        name: String,
        /// Its header type.
        header_type: u8,
    },
    /// A driver of the host, or none, holds the function.
    #[error(
        "{name} is {}, not to vfio-pci; bind it to vfio-pci: write vfio-pci to /sys/bus/pci/devices/{name}/driver_override, \
         {name} to /sys/bus/pci/devices/{name}/driver/unbind if it has a driver, and {name} to /sys/bus/pci/drivers_probe",
        held_by(driver)
    )]
    NotBound {
        /// Address of the function.
        name: String,
        /// The driver that holds it, if any.
        driver: Option<String>,
    },
    /// The host has no IOMMU for it.
    #[error(
        "{name} is in no IOMMU group: turn the host's IOMMU on in its firmware and by intel_iommu=on or amd_iommu=on on the host's \
         kernel command line"
    )]
    NoGroup {
        /// Address of the function.
        name: String,
    },
    /// Its only interrupt cannot be passed on.
    #[error(
        "{name} has INTx alone, no MSI or MSI-X, and the host cannot pass that on: {source}; where its line is shared with another \
         device of the host and it cannot mask its interrupt (PCI 2.3), give the other one to vfio-pci or to no driver"
    )]
    OnlyIntx {
        /// Address of the function.
        name: String,
        /// What the host said.
        source: io::Error,
    },
    /// Other functions of its group are in use by the host.
    #[error(
        "IOMMU group {group} of {name} is not viable: it also holds {}; bind them to vfio-pci or to no driver",
        list(others)
    )]
    NotViable {
        /// Address of the function.
        name: String,
        /// Its IOMMU group.
        group: u32,
        /// The other functions in the way.
        others: Vec<Holder>,
    },
    /// Another process or device uses the group.
    #[error(
        "IOMMU group {group} of {name} is in use: by another process, or by another device of this VM; devices of one group \
         can be passed through together only with iommu off"
    )]
    Busy {
        /// Address of the function.
        name: String,
        /// Its IOMMU group.
        group: u32,
    },
    /// The VM has the function already, by another path to it.
    #[error("{name} is a device of this VM already, by another path")]
    Twice {
        /// Address of the function.
        name: String,
    },
    /// A device file of VFIO is not there.
    #[error("{}: no such file: load VFIO on the host (modprobe vfio-pci vfio_iommu_type1)", path.display())]
    NoVfio {
        /// The device file.
        path: PathBuf,
    },
    /// A device file of VFIO cannot be opened.
    #[error("{}: {source}; run as root, or give your user read and write access to it", path.display())]
    NoAccess {
        /// The device file.
        path: PathBuf,
        /// What the host said.
        source: io::Error,
    },
    /// The host's VFIO lacks the type 1 IOMMU back end.
    #[error("the host's VFIO has no type 1 (version 2) IOMMU: load it (modprobe vfio_iommu_type1)")]
    NoType1,
    /// The host has no IOMMUFD.
    #[error(
        "/dev/iommu: no such file: load IOMMUFD on the host (modprobe iommufd) if its kernel has it (CONFIG_IOMMUFD), \
         or turn iommufd of the platform off"
    )]
    NoIommufd,
    /// VFIO has no character device for the function.
    #[error(
        "{name} has no character device in /dev/vfio/devices: the host's kernel is built without \
         CONFIG_VFIO_DEVICE_CDEV; turn iommufd of the platform off"
    )]
    NoCdev {
        /// Address of the function.
        name: String,
    },
    /// IOMMUFD does not hand the group out.
    #[error(
        "IOMMU group {group} of {name} cannot be taken: another process owns a device of it, or the host cannot keep its \
         interrupts apart (interrupt remapping is off; parameter allow_unsafe_interrupts of module iommufd)"
    )]
    NotOurs {
        /// Address of the function.
        name: String,
        /// Its IOMMU group.
        group: u32,
    },
    /// The device, or VFIO, reports something impossible.
    #[error("{name}: {what}")]
    Nonsense {
        /// Address of the function.
        name: String,
        /// What is impossible.
        what: String,
    },
    /// A request to VFIO failed.
    #[error("{what}: {source}")]
    Host {
        /// What was being done, to what.
        what: String,
        /// What the host said.
        source: io::Error,
    },
    /// A request to VFIO failed.
    #[error("{what}: {source}")]
    Vfio {
        /// What was being done, to what.
        what: String,
        /// What the library said.
        source: VfioError,
    },
}

impl VfioPciError {
    /// Whether the user can mend it: a wrong path, a device that is not bound to VFIO, missing rights. All else is a
    /// failure of the host or the device.
    pub fn is_user_error(&self) -> bool {
        !matches!(self, Self::Nonsense { .. } | Self::Host { .. } | Self::Vfio { .. })
    }
}

/// Why a device file of VFIO could not be opened.
pub(in crate::vfio) fn file_error(path: PathBuf, source: io::Error) -> VfioPciError {
    match source.kind() {
        io::ErrorKind::NotFound => VfioPciError::NoVfio { path },
        io::ErrorKind::PermissionDenied => VfioPciError::NoAccess { path, source },
        // The file exists although the module behind it is not loaded.
        _ if matches!(source.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => VfioPciError::NoVfio { path },
        _ => VfioPciError::Host { what: format!("opening {}", path.display()), source },
    }
}
