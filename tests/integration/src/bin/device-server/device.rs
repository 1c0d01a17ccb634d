// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is served.

use std::fs::File;
use std::os::fd::BorrowedFd;

use anyhow::{Result, bail};

use crate::card::{self, Card};
use crate::disk;
use crate::memory::{Fault, Memory};
use crate::ring::Ring;

/// A device, with what is behind it.
pub(crate) enum Device {
    Card(Card),
    /// The image.
    Disk(File),
}

impl Device {
    /// Features of virtio that are its own.
    pub(crate) fn features(&self) -> u64 {
        match self {
            Self::Card(_) => card::FEATURES,
            Self::Disk(_) => disk::FEATURES,
        }
    }

    /// Features of vhost-user that are its own.
    pub(crate) fn protocol_features(&self) -> u64 {
        match self {
            Self::Card(_) => 0,
            Self::Disk(_) => disk::PROTOCOL_FEATURES,
        }
    }

    /// Its configuration.
    pub(crate) fn config(&self, queues: usize) -> Result<Vec<u8>> {
        match self {
            Self::Card(_) => bail!("a card tells no configuration"),
            Self::Disk(image) => disk::config(image, queues),
        }
    }

    /// What it waits for, beside its queues.
    pub(crate) fn source(&self, rings: &[Ring]) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Card(card) => card.source(rings),
            Self::Disk(_) => None,
        }
    }

    /// Does what there is to do.
    pub(crate) fn work(&mut self, rings: &mut [Ring], memory: &Memory) -> Result<(), Fault> {
        match self {
            Self::Card(card) => card.work(rings, memory),
            Self::Disk(image) => rings.iter_mut().try_for_each(|ring| disk::serve(image, ring, memory)),
        }
    }
}
