// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Virtio: the PCI transport (virtio 1.x, modern only) and the devices.

pub mod balloon;
pub mod block;
#[cfg(any(test, feature = "fuzzing"))]
mod byte_driver;
mod chain;
pub mod console;
mod device;
pub mod iommu;
mod last_requests;
pub mod net;
mod notification;
pub mod pmem;
mod queue;
#[cfg(feature = "fuzzing")]
mod queue_load;
mod queue_table;
mod queue_worker;
pub mod rng;
#[cfg(test)]
mod test_driver;
#[cfg(test)]
pub(crate) mod test_support;
mod transport;
mod used_batch;
pub mod vhost_user;
pub mod vsock;

pub use self::device::{
    DeviceError, DeviceProperties, DeviceQueues, Driver, Interrupt, QueueState, SharedRegion, VirtioDevice,
};
pub use self::last_requests::LastRequests;
#[cfg(feature = "fuzzing")]
pub use self::queue_load::QueueLoad;
pub use self::transport::{TransportError, VirtioPciDevice, VirtioPciParams};
