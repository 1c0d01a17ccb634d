// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A disk (virtio 1.3, section 5.2), served by qemu-storage-daemon, SPDK and others.

use super::model::{ConfigSource, Model, OnLoss};
use super::spec::block::{CONFIG_BYTES, DEVICE_TYPE, FEATURES, NUM_QUEUES, PCI_CLASS, WRITEBACK};

impl Model {
    /// A disk with so many queues, each of `size`. What is in it, and what it can do, the server says.
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
                // Servers tell how many they have, which may be more.
                over: vec![(NUM_QUEUES, queues.to_le_bytes().to_vec())],
                writable: WRITEBACK..WRITEBACK + 1,
            },
            on_loss: OnLoss::GoOn,
        }
    }
}
