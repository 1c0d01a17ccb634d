// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Building the virtio-rng device.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::RngConfig;
use carom_api::error::FileError;
use devices::dma::{DeviceMemory, DmaTable, FaultSender, TableMapper};
use devices::pci::PciAddress;
use devices::virtio::VirtioPciDevice;
use devices::virtio::rng::{self, RngParams, VirtioRng};
use rustix::fs::{Mode, OFlags, open};

use super::device_context::DeviceContext;
use crate::machine::VmError;

/// The device, and how it is connected.
pub(super) struct Rng {
    pub(super) function: Arc<VirtioPciDevice>,
    pub(super) device: Arc<VirtioRng>,
    /// Of a device behind the virtio-iommu.
    pub(super) mapper: Option<TableMapper>,
}

impl Rng {
    /// Opens the source and makes the device. `faults` takes accesses that the virtio-iommu stops.
    pub(super) fn open(
        config: &RngConfig,
        address: PciAddress,
        faults: &FaultSender,
        context: &DeviceContext,
    ) -> Result<Self, VmError> {
        let source = open_source(&config.src).map_err(|source| FileError {
            field: RngConfig::SRC,
            path: config.src.display().to_string(),
            source,
        })?;
        let ram = context.memory.clone();
        let table = config.iommu.then(|| {
            Arc::new(DmaTable::new(RngConfig::ID, ram.clone(), Some((address.endpoint_id(), faults.clone()))))
        });
        let params = RngParams {
            id: RngConfig::ID.into(),
            source,
            memory: table.clone().map_or_else(|| DeviceMemory::all_ram(ram), DeviceMemory::mapped),
            msi: context.msi.clone(),
            doorbells: Some(context.doorbells.clone()),
            observer: Some(context.observer.clone()),
        };
        let (function, device) = rng::create(params).map_err(|error| VmError::Device {
            what: "making the virtio-rng device",
            source: io::Error::other(error),
        })?;
        Ok(Self { function, device, mapper: table.map(TableMapper::new) })
    }
}

/// Opens a source such that neither opening nor reading waits.
fn open_source(path: &Path) -> io::Result<File> {
    let file =
        File::from(open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?);
    if file.metadata()?.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(file)
}
