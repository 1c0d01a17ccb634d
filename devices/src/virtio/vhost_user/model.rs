// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Description of a device that a server can serve.

use std::ops::Range;

use crate::virtio::net::CONTROL_QUEUE_SIZE;

/// Source of the device configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConfigSource {
    /// The front end provides the configuration.
    Own(Vec<u8>),
    /// The server provides the configuration.
    Server {
        /// Size of the configuration in bytes.
        len: usize,
        /// Values that replace the server's values: offset and bytes.
        over: Vec<(usize, Vec<u8>)>,
        /// Bytes that the driver may write.
        writable: Range<usize>,
    },
}

/// Reaction of a device to the loss of its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLoss {
    /// The device fails until its driver resets it, because the lost server had state that the next server does not have.
    Fail,
    /// The device continues with the next server. If requests were in flight, the device continues only if the servers record these
    /// requests (`VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`). Otherwise the device fails.
    GoOn,
    /// The device continues with the next server. Packets in flight are lost, as on a wire.
    Lose,
}

/// Description of a device that a server serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    pub(super) device_type: u16,
    pub(super) pci_class: u32,
    /// Features of the device type that a server may offer.
    pub(super) server_features: u64,
    /// Features that the front end itself offers.
    pub(super) own_features: u64,
    /// Size of each queue that the server serves.
    pub(super) queues: Vec<u16>,
    /// Number of queue pairs, if the device is a network card with more than one pair. The card then has a control queue after the pairs.
    /// The front end serves the control queue.
    pub(super) pairs: Option<u16>,
    pub(super) config: ConfigSource,
    pub(super) on_loss: OnLoss,
}

impl Model {
    /// Returns the size of the device configuration in bytes.
    pub(super) fn config_len(&self) -> usize {
        match &self.config {
            ConfigSource::Own(bytes) => bytes.len(),
            ConfigSource::Server { len, .. } => *len,
        }
    }

    /// Returns the size of each queue that the driver sees.
    pub(super) fn queue_sizes(&self) -> Vec<u16> {
        let control = self.pairs.map(|_| CONTROL_QUEUE_SIZE);
        self.queues.iter().copied().chain(control).collect()
    }

    /// True if the server provides the device configuration.
    pub(super) fn asks_for_config(&self) -> bool {
        matches!(self.config, ConfigSource::Server { .. })
    }
}
