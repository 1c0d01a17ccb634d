// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disk (virtio 1.3, section 5.2), served by qemu-storage-daemon, SPDK or others.

use super::model::{ConfigSource, Model, OnLoss};
use super::spec::block::{CONFIG_BYTES, DEVICE_TYPE, FEATURES, NUM_QUEUES, PCI_CLASS, WRITEBACK};

impl Model {
    /// Returns the description of a disk with `queues` queues of size `size`. The server determines the disk's contents and features.
    pub fn block(queues: u16, size: u16) -> Self {
        Self {
            device_type: DEVICE_TYPE,
            pci_class: PCI_CLASS,
            server_features: FEATURES,
            own_features: 0,
            queues: vec![size; queues.into()],
            pairs: None,
            config: ConfigSource::Server {
                len: CONFIG_BYTES,
                // The server reports its own number of queues, which may be larger than `queues`. The driver must see `queues`.
                over: vec![(NUM_QUEUES, queues.to_le_bytes().to_vec())],
                writable: WRITEBACK..WRITEBACK + 1,
            },
            on_loss: OnLoss::GoOn,
        }
    }
}
