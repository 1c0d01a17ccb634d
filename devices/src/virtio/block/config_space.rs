// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Features and configuration space of a disk (virtio 1.4, sections 5.2.3 and 5.2.4).

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::image::disk_image::Image;
use super::spec::{CONFIG_BYTES, SECTOR, feature};

/// Maximum size of one range of a discard request, in sectors. The maximum is 4 GiB.
pub(super) const MAX_DISCARD_SECTORS: u32 = 1 << 23;
/// Maximum number of ranges in a discard request.
pub(super) const MAX_DISCARD_RANGES: u32 = 16;
/// Maximum size of the range of a write-zeroes request, in sectors. The maximum is 64 MiB. The device may have to write all these zeroes,
/// and a pause waits for the writes. The limit therefore bounds the time of a pause.
pub(super) const MAX_ZEROES_SECTORS: u32 = 1 << 17;
/// Maximum number of ranges in a write-zeroes request.
pub(super) const MAX_ZEROES_RANGES: u32 = 1;

/// Returns the features that a disk backed by `image` offers.
pub(super) fn features(image: &Image, queues: u16) -> u64 {
    let rings = 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
    let always = feature::SEG_MAX | feature::BLK_SIZE | feature::FLUSH | feature::TOPOLOGY;
    let several = if queues > 1 { feature::MQ } else { 0 };
    let writing = if image.is_read_only() { feature::RO } else { feature::WRITE_ZEROES };
    let discards = if gives_back(image) { feature::DISCARD } else { 0 };
    rings | always | several | writing | discards
}

/// Returns true if a discard returns space to the host.
pub(super) fn gives_back(image: &Image) -> bool {
    !image.is_read_only() && !image.is_allocated()
}

/// Returns the configuration's first field, the capacity. The capacity is the only field that can change.
pub(super) fn capacity(image: &Image) -> [u8; 8] {
    image.sectors().to_le_bytes()
}

/// Returns the configuration of a disk backed by `image`, with a capacity of 0. [`capacity`] returns the real capacity.
pub(super) fn bytes(image: &Image, queues: u16, queue_size: u16) -> [u8; CONFIG_BYTES] {
    let mut bytes = [0; CONFIG_BYTES];
    let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
    let sectors_of_discard = image.discard_block() / u32::try_from(SECTOR).unwrap_or(512);
    // `seg_max`: maximum number of data buffers in a request. The header and the status of the request each need one more descriptor.
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
        // `write_zeroes_may_unmap`: zeroed ranges may be deallocated.
        put(56, &[1]);
    }
    if !image.is_read_only() {
        put(48, &MAX_ZEROES_SECTORS.to_le_bytes());
        put(52, &MAX_ZEROES_RANGES.to_le_bytes());
    }
    bytes
}
