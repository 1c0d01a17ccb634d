// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a disk offers, and its configuration (virtio 1.4, sections 5.2.3 and 5.2.4).

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::image::disk_image::Image;
use super::spec::{CONFIG_BYTES, SECTOR, feature};

/// Most sectors of one range of a discard: 4 GiB.
pub(super) const MAX_DISCARD_SECTORS: u32 = 1 << 23;
/// Most ranges of a discard.
pub(super) const MAX_DISCARD_RANGES: u32 = 16;
/// Most sectors that a request sets to zero: 64 MiB, which may have to be written. A pause waits for it.
pub(super) const MAX_ZEROES_SECTORS: u32 = 1 << 17;
/// Most ranges of such a request.
pub(super) const MAX_ZEROES_RANGES: u32 = 1;

/// The features that a disk of `image` offers.
pub(super) fn features(image: &Image, queues: u16) -> u64 {
    let rings = 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
    let always = feature::SEG_MAX | feature::BLK_SIZE | feature::FLUSH | feature::TOPOLOGY;
    let several = if queues > 1 { feature::MQ } else { 0 };
    let writing = if image.is_read_only() { feature::RO } else { feature::WRITE_ZEROES };
    let discards = if gives_back(image) { feature::DISCARD } else { 0 };
    rings | always | several | writing | discards
}

/// Whether the host gets back what the guest does without.
pub(super) fn gives_back(image: &Image) -> bool {
    !image.is_read_only() && !image.is_allocated()
}

/// The configuration's first field, which changes.
pub(super) fn capacity(image: &Image) -> [u8; 8] {
    image.sectors().to_le_bytes()
}

/// The configuration of a disk of `image`, but for [its size](capacity).
pub(super) fn bytes(image: &Image, queues: u16, queue_size: u16) -> [u8; CONFIG_BYTES] {
    let mut bytes = [0; CONFIG_BYTES];
    let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    let sectors_of_discard = image.discard_block() / u32::try_from(SECTOR).unwrap_or(512);
    // Beside the data there are the header and the status.
    put(12, &u32::from(queue_size.saturating_sub(2)).to_le_bytes());
    put(20, &image.block().to_le_bytes());
    let blocks = image.physical_block() / image.block();
    put(24, &[u8::try_from(blocks.max(1).ilog2()).unwrap_or(0)]);
    put(26, &u16::try_from(blocks.max(1)).unwrap_or(1).to_le_bytes());
    put(34, &queues.to_le_bytes());
    if gives_back(image) {
        put(36, &MAX_DISCARD_SECTORS.to_le_bytes());
        put(40, &MAX_DISCARD_RANGES.to_le_bytes());
        put(44, &sectors_of_discard.to_le_bytes());
        // Zeroes may be deallocated.
        put(56, &[1]);
    }
    if !image.is_read_only() {
        put(48, &MAX_ZEROES_SECTORS.to_le_bytes());
        put(52, &MAX_ZEROES_RANGES.to_le_bytes());
    }
    bytes
}
