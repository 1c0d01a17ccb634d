// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-net: network devices whose packets an interface of the host takes and gives (virtio 1.4, section 5.1).
//!
//! `device` is what the transport sees. Each `pair` of queues has a thread: `receive` gives the guest what the host's interface gives,
//! `transmit` the other way round, a `turn` each. `control` has another one, and does what the driver says of pairs. The interface is a
//! [`Carrier`], which has a file for each pair. Packets are copied once, between that file and the guest's `buffers`.

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

/// What a network device is made of.
pub struct NetParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// The host's interface.
    pub carrier: Box<dyn Carrier>,
    /// What the driver is told of it.
    pub traits: NetTraits,
    /// How much may pass in each direction.
    pub limits: Option<RateLimits>,
    /// What the device sees of memory.
    pub memory: DeviceMemory,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Makes a network device: the PCI function, and the device by which its counters are read.
///
/// # Errors
/// The process can have no more descriptors, or the platform has no interrupt vectors.
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
