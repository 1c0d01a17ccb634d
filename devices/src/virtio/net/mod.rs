// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-net: network devices backed by a host interface (virtio 1.4, section 5.1).
//!
//! `device` is the interface to the transport. Each `pair` of queues has a thread. The thread alternates (`turn`) between `receive` and
//! `transmit`. `receive` passes packets from the host to the guest, and `transmit` passes packets from the guest to the host. `control`
//! runs in a separate thread. It executes the driver's commands, which set the number of pairs. The host interface is a [`Carrier`] with a
//! file for each pair. A packet is copied only once, between the pair's file and the guest's `buffers`.

mod buffers;
mod carrier;
mod control;
mod counters;
mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod link;
mod pair;
mod receive;
pub mod spec;
mod state;
mod threads;
mod transmit;
mod turn;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

pub use self::carrier::{Carrier, Offloads};
pub(super) use self::control::{CONTROL_QUEUE_SIZE, Control, Pairs, control_queue};
use self::counters::Counts;
pub use self::counters::NetCounters;
pub use self::device::{NetTraits, VirtioNet};
use self::link::Link;
pub use self::threads::{CONTROL_ROLE, ROLE};
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};
use crate::rate_limit::{RateLimiter, RateLimits};

/// Parameters of a network device.
pub struct NetParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// Host interface.
    pub carrier: Box<dyn Carrier>,
    /// Properties of the device that the driver sees.
    pub traits: NetTraits,
    /// Rate limit of each direction.
    pub limits: Option<RateLimits>,
    /// Guest memory that the device can access.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that connects the doorbells of queues. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Creates a network device. Returns the PCI function and the device. The caller uses the device to read the counters.
///
/// # Errors
/// The process has no free file descriptor, or the platform has no free interrupt vector.
pub fn create(params: NetParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioNet>), TransportError> {
    let NetParams { id, carrier, traits, limits, memory, msi, doorbells, observer } = params;
    let limiter = || limits.map(|limits| RateLimiter::new(limits, Instant::now()));
    let (receive_limiter, transmit_limiter) = (limiter(), limiter());
    let link = Link {
        id: id.clone(),
        carrier,
        counts: Counts::default(),
        receive_limiter,
        transmit_limiter,
        gone: AtomicBool::default(),
    };
    let device = Arc::new(VirtioNet::new(link, traits).map_err(TransportError::Descriptors)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}
