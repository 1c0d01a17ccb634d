// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks of a qcow2 header before `imago` opens the image. `docs/interop/qcow2.rst` of QEMU describes the header.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::buffer::{Buffer, PAGE};
use super::error::ImageError;

/// First bytes of a qcow2 image.
pub(super) const MAGIC: &[u8] = b"QFI\xfb";
/// Size of a version 2 header in bytes. Later versions start with the same fields.
const BYTES: usize = 72;
/// Range of `cluster_bits`: a cluster has 512 bytes to 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Maximum size of the disk in bytes: the maximum file offset of the host.
const MOST_BYTES: u64 = i64::MAX.cast_unsigned();
/// Maximum size of the L1 table in bytes, as in QEMU.
const MOST_L1_BYTES: u64 = 32 << 20;

/// Bits of a refcount table entry that contain the offset of a refcount block.
const REFCOUNT_BLOCK: u64 = !0x1ff;

/// Values from the header of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Size of a cluster in bytes.
    pub(super) cluster: u32,
    /// Byte range of the L1 table in the file, rounded up to whole clusters.
    pub(super) l1: Range<u64>,
}

/// Checks the header of the image in `file`.
///
/// # Errors
/// The file has no valid header, or the image needs an unsupported feature.
pub(super) fn check(file: &File, writable: bool) -> Result<Header, ImageError> {
    let malformed = |rule: String| Err(ImageError::Malformed(rule));
    // Direct I/O needs an aligned buffer.
    let mut buffer = Buffer::new(PAGE);
    let read = file.read_at(buffer.bytes_mut(), 0)?;
    let header = &buffer.bytes_mut()[..BYTES];
    if read < BYTES || !header.starts_with(MAGIC) {
        return malformed(
            "the image does not start with a qcow2 header; set image_type to the format of the file".into(),
        );
    }
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (version, cluster_bits, encryption, snapshots) = (word(4), word(20), word(32), word(60));
    let size = u64::from(word(24)) << 32 | u64::from(word(28));
    if !(2..=3).contains(&version) {
        return malformed(format!(
            "the image's version {version} is not supported, only 2 and 3; convert the image with qemu-img convert"
        ));
    }
    if !CLUSTER_BITS.contains(&cluster_bits) {
        return malformed(format!(
            "the image's clusters have 2^{cluster_bits} bytes, but must have 512 bytes to 2 MiB; check the image with qemu-img check"
        ));
    }
    if size > MOST_BYTES {
        return malformed(format!(
            "the image's disk has {size} bytes, more than the host's maximum file size; check the image with qemu-img check"
        ));
    }
    if encryption != 0 {
        return malformed("the image is encrypted, which is not supported; convert it to an unencrypted image".into());
    }
    if writable && snapshots != 0 {
        return malformed(format!(
            "the image has {snapshots} internal snapshots, so the image can only be opened read-only; turn readonly on, or delete the snapshots with qemu-img snapshot -d"
        ));
    }
    let cluster = 1 << cluster_bits;
    let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
    let (start, entries) = (long(40), u64::from(word(36)));
    let end = start.saturating_add((entries * 8).next_multiple_of(cluster.into()));
    if entries * 8 > MOST_L1_BYTES {
        return malformed(format!(
            "the image's L1 table of {entries} entries has more than {MOST_L1_BYTES} bytes; check the image with qemu-img check"
        ));
    }
    let (counts, clusters) = (long(48), word(56));
    if writable && (clusters == 0 || !counts_header(file, counts, cluster.into())?) {
        return malformed("the image has no refcount block for its first clusters; repair the image with qemu-img check -r all, or open the image read-only".into());
    }
    Ok(Header { cluster, l1: start..end })
}

/// Returns true if the refcount table at `start` has a refcount block for the first clusters. Without this refcount block, an allocation
/// would search endlessly for space for the block.
fn counts_header(file: &File, start: u64, cluster: u64) -> Result<bool, ImageError> {
    if !start.is_multiple_of(cluster) || start > MOST_BYTES {
        return Err(ImageError::Malformed(format!(
            "the image's refcount table is at {start:#x}, but must be aligned to a cluster and within the host's maximum file size; check the image with qemu-img check"
        )));
    }
    let page = PAGE as u64;
    let mut buffer = Buffer::new(PAGE);
    let read = file.read_at(buffer.bytes_mut(), start / page * page)?;
    let at = usize::try_from(start % page).expect("the remainder is less than a page");
    let entry = buffer.bytes_mut()[..read].get(at..).and_then(|entries| entries.first_chunk());
    Ok(entry.is_some_and(|entry| u64::from_be_bytes(*entry) & REFCOUNT_BLOCK != 0))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn checked(change: impl FnOnce(&mut [u8; BYTES]), writable: bool) -> Result<Header, String> {
        let mut header = [0; BYTES];
        header[..4].copy_from_slice(MAGIC);
        (header[7], header[23], header[39], header[45], header[53], header[59]) = (3, 16, 1, 3, 1, 1);
        change(&mut header);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&header).unwrap();
        file.write_all_at(&0x2_0000u64.to_be_bytes(), 0x1_0000).unwrap();
        check(&file, writable).map_err(|error| error.to_string())
    }

    #[test]
    fn unsupported_header_is_rejected_with_the_rule() {
        let sound = Header { cluster: 65536, l1: 0x3_0000..0x4_0000 };
        assert_eq!(checked(|_| {}, true), Ok(sound.clone()));
        for (place, value, rule) in [
            (0, b'R', "does not start with a qcow2 header"),
            (7, 1, "version 1 is not supported"),
            (7, 4, "version 4 is not supported"),
            (23, 8, "clusters have 2^8 bytes"),
            (23, 22, "clusters have 2^22 bytes"),
            (24, 0x80, "more than the host's maximum file size"),
            (35, 1, "is encrypted"),
            (63, 2, "2 internal snapshots"),
            (37, 0x40, "more than 33554432 bytes"),
            (
                54,
                1,
                "refcount table is at 0x10100, but must be aligned to a cluster and within the host's maximum file size; check",
            ),
            (48, 0x80, "refcount table is at 0x8000000000010000, but must be"),
            (53, 2, "no refcount block for its first clusters"),
            (59, 0, "no refcount block for its first clusters"),
        ] {
            let refused = checked(|header| header[place] = value, true).unwrap_err();
            assert!(refused.contains(rule), "{refused}");
        }
        assert_eq!(checked(|header| header[63] = 2, false), Ok(sound));
        let short = tempfile::tempfile().unwrap();
        short.set_len(71).unwrap();
        assert!(check(&short, true).is_err());
    }
}
