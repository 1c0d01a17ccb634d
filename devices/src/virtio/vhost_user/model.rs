// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What differs between the devices that a server can serve.

use std::ops::Range;

use crate::virtio::net::CONTROL_QUEUE_SIZE;

/// Where the device configuration comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ConfigSource {
    /// The front end has it.
    Own(Vec<u8>),
    /// The server has it.
    Server {
        /// Its bytes.
        len: usize,
        /// What the front end puts in its place: offset and bytes.
        over: Vec<(usize, Vec<u8>)>,
        /// What the driver may write.
        writable: Range<usize>,
    },
}

/// What becomes of a device whose server is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OnLoss {
    /// It has failed until its driver resets it: the server had state of its own.
    Fail,
    /// It goes on with the next server. Where requests were under way, only if the servers keep account of them.
    GoOn,
    /// It goes on with the next server, and what was under way is lost, as on a wire.
    Lose,
}

/// A device to be served by a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    pub(super) device_type: u16,
    pub(super) pci_class: u32,
    /// Features of the device type that a server may offer.
    pub(super) server_features: u64,
    /// Those that the front end offers itself.
    pub(super) own_features: u64,
    /// Size of each queue that the server has.
    pub(super) queues: Vec<u16>,
    /// Pairs of queues, of a network card with several: there is a control queue behind them then, which the front end serves.
    pub(super) pairs: Option<u16>,
    pub(super) config: ConfigSource,
    pub(super) on_loss: OnLoss,
}

impl Model {
    /// Bytes of the device configuration.
    pub(super) fn config_len(&self) -> usize {
        match &self.config {
            ConfigSource::Own(bytes) => bytes.len(),
            ConfigSource::Server { len, .. } => *len,
        }
    }

    /// Size of each queue that the driver has.
    pub(super) fn queue_sizes(&self) -> Vec<u16> {
        let control = self.pairs.map(|_| CONTROL_QUEUE_SIZE);
        self.queues.iter().copied().chain(control).collect()
    }

    /// Whether the server has the device configuration.
    pub(super) fn asks_for_config(&self) -> bool {
        matches!(self.config, ConfigSource::Server { .. })
    }
}
