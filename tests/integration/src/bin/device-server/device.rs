// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices that this server offers.

use std::fs::File;
use std::os::fd::BorrowedFd;

use anyhow::{Result, bail};

use crate::card::{self, Card};
use crate::disk;
use crate::memory::{Fault, Memory};
use crate::ring::Ring;

/// Device with its back end.
pub(crate) enum Device {
    Card(Card),
    /// Disk whose data is in this image file.
    Disk(File),
}

impl Device {
    /// Returns the virtio features of the device type.
    pub(crate) fn features(&self) -> u64 {
        match self {
            Self::Card(_) => card::FEATURES,
            Self::Disk(_) => disk::FEATURES,
        }
    }

    /// Returns the vhost-user features of the device type.
    pub(crate) fn protocol_features(&self) -> u64 {
        match self {
            Self::Card(_) => 0,
            Self::Disk(_) => disk::PROTOCOL_FEATURES,
        }
    }

    /// Returns the device's configuration.
    pub(crate) fn config(&self, queues: usize) -> Result<Vec<u8>> {
        match self {
            Self::Card(_) => bail!("a network card has no device configuration (GET_CONFIG)"),
            Self::Disk(image) => disk::config(image, queues),
        }
    }

    /// Returns a file that becomes readable when the device has work that the driver did not put into the queues.
    pub(crate) fn source(&self, rings: &[Ring]) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Card(card) => card.source(rings),
            Self::Disk(_) => None,
        }
    }

    /// Does the pending work of all queues, up to a limit for each queue.
    pub(crate) fn work(&mut self, rings: &mut [Ring], memory: &Memory) -> Result<(), Fault> {
        match self {
            Self::Card(card) => card.work(rings, memory),
            Self::Disk(image) => rings.iter_mut().try_for_each(|ring| disk::serve(image, ring, memory)),
        }
    }
}
