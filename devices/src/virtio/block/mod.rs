// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-blk: disks whose content is an image on the host (virtio 1.4, section 5.2).
//!
//! `device` is what the transport sees. A thread for each `queue` serves the guest's requests as operations on an `image`, which the host's
//! kernel does (`io`).
//!
//! The kernel reads and writes the guest's buffers themselves ([`HostIo`](crate::dma::HostIo)). Where direct I/O does not take them as they
//! lie, they are copied.

mod config_space;
mod counters;
mod device;
mod disk;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod image;
mod io;
#[cfg(feature = "fuzzing")]
mod load;
mod queue;
pub mod spec;
mod state;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use self::counters::BlockCounters;
use self::counters::Counts;
pub use self::device::{ROLE, VirtioBlock};
use self::disk::Disk;
pub use self::image::disk_image::{Image, ImageFormat, ImageOptions};
pub use self::image::error::{ImageError, ResizeError};
pub use self::image::host_file::is_read_only_device;
pub use self::io::engine::IoMode;
#[cfg(feature = "fuzzing")]
pub use self::load::ReadLoad;
use self::spec::ID_BYTES;
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};
use crate::rate_limit::RateLimiter;
use crate::sandbox::HostCpus;

/// What a disk is made of.
pub struct BlockParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// Its content.
    pub image: Image,
    /// What the guest is told of it as its name: 20 bytes of it at most.
    pub serial: String,
    /// Queues, 1 at least.
    pub queues: u16,
    /// Size of each queue, a power of two and 4 at least.
    pub queue_size: u16,
    /// How I/O is done.
    pub mode: IoMode,
    /// What holds requests back; other disks may have the same.
    pub limiter: Option<Arc<RateLimiter>>,
    /// CPUs of the host that queues' threads run on, by queue; any for those that are not there.
    pub affinity: BTreeMap<u16, HostCpus>,
    /// What the device sees of memory.
    pub memory: DeviceMemory,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Makes a disk: the PCI function, and the device by which its counters are read.
///
/// # Errors
/// The process can have no more descriptors, or the platform has no interrupt vectors.
pub fn create(params: BlockParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioBlock>), TransportError> {
    let mut serial = [0; ID_BYTES];
    for (byte, of_serial) in serial.iter_mut().zip(params.serial.bytes()) {
        *byte = of_serial;
    }
    let disk = Disk {
        id: params.id.clone(),
        image: Arc::new(params.image),
        serial,
        counts: Counts::default(),
        mode: params.mode,
        limiter: params.limiter,
        affinity: params.affinity,
    };
    let device = VirtioBlock::new(disk, params.queues, params.queue_size).map_err(TransportError::Descriptors)?;
    let device = Arc::new(device);
    let BlockParams { id, memory, msi, doorbells, observer, .. } = params;
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}
