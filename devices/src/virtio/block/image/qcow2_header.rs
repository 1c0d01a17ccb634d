// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What of a qcow2 image's header has to be known before anything else reads the image (QEMU, `docs/interop/qcow2.rst`).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::buffer::{Buffer, PAGE};
use super::error::ImageError;

/// What an image begins with.
pub(super) const MAGIC: &[u8] = b"QFI\xfb";
/// Bytes of the header of version 2, which later ones begin with too.
const BYTES: usize = 72;
/// Least and most bits of the size of a cluster: 512 bytes to 2 MiB.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Most bytes of an image's disk: what offsets of the host's files can say.
const MOST_BYTES: u64 = i64::MAX.cast_unsigned();
/// Most bytes of the L1 table, as in QEMU.
const MOST_L1_BYTES: u64 = 32 << 20;

/// Bits of an entry of the refcount table that say where a block of refcounts is.
const REFCOUNT_BLOCK: u64 = !0x1ff;

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Bytes of a cluster.
    pub(super) cluster: u32,
    /// Where the L1 table is, in whole clusters.
    pub(super) l1: Range<u64>,
}

/// Checks the header of the image in `file`.
///
/// # Errors
/// It is none, or asks for what is not supported.
pub(super) fn check(file: &File, writable: bool) -> Result<Header, ImageError> {
    let malformed = |rule: String| Err(ImageError::Malformed(rule));
    // As direct I/O takes it.
    let mut buffer = Buffer::new(PAGE);
    let read = file.read_at(buffer.bytes_mut(), 0)?;
    let header = &buffer.bytes_mut()[..BYTES];
    if read < BYTES || !header.starts_with(MAGIC) {
        return malformed("it does not begin as a qcow2 image does".into());
    }
    let word = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (version, cluster_bits, encryption, snapshots) = (word(4), word(20), word(32), word(60));
    let size = u64::from(word(24)) << 32 | u64::from(word(28));
    if !(2..=3).contains(&version) {
        return malformed(format!("its version {version} is neither 2 nor 3"));
    }
    if !CLUSTER_BITS.contains(&cluster_bits) {
        return malformed(format!("its clusters of 2^{cluster_bits} bytes are not of 512 bytes to 2 MiB"));
    }
    if size > MOST_BYTES {
        return malformed(format!("its disk of {size} bytes is larger than files can be"));
    }
    if encryption != 0 {
        return malformed("it is encrypted, which is not supported".into());
    }
    if writable && snapshots != 0 {
        return malformed(format!("it has {snapshots} internal snapshots, beside which it can only be read"));
    }
    let cluster = 1 << cluster_bits;
    let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
    let (start, entries) = (long(40), u64::from(word(36)));
    let end = start.saturating_add((entries * 8).next_multiple_of(cluster.into()));
    if entries * 8 > MOST_L1_BYTES {
        return malformed(format!("its first table of {entries} entries has more than {MOST_L1_BYTES} bytes"));
    }
    let (counts, clusters) = (long(48), word(56));
    if writable && (clusters == 0 || !counts_header(file, counts, cluster.into())?) {
        return malformed("its refcounts do not begin with the header's own cluster".into());
    }
    Ok(Header { cluster, l1: start..end })
}

/// Whether the refcount table at `start` of an image has a block for the first clusters. Who allocates clusters in an image without it looks
/// for room for that block again and again.
fn counts_header(file: &File, start: u64, cluster: u64) -> Result<bool, ImageError> {
    if !start.is_multiple_of(cluster) || start > MOST_BYTES {
        return Err(ImageError::Malformed(format!("its refcount table at {start:#x} is not where a cluster begins")));
    }
    let page = PAGE as u64;
    let mut buffer = Buffer::new(PAGE);
    let read = file.read_at(buffer.bytes_mut(), start / page * page)?;
    let at = usize::try_from(start % page).expect("less than a page");
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
    fn header_says_what_is_not_supported() {
        let sound = Header { cluster: 65536, l1: 0x3_0000..0x4_0000 };
        assert_eq!(checked(|_| {}, true), Ok(sound.clone()));
        for (place, value, rule) in [
            (0, b'R', "does not begin as a qcow2 image"),
            (7, 1, "version 1 is neither 2 nor 3"),
            (7, 4, "version 4 is neither"),
            (23, 8, "clusters of 2^8 bytes"),
            (23, 22, "clusters of 2^22 bytes"),
            (24, 0x80, "larger than files can be"),
            (35, 1, "is encrypted"),
            (63, 2, "2 internal snapshots"),
            (37, 0x40, "more than 33554432 bytes"),
            (54, 1, "refcount table at 0x10100 is not where a cluster begins"),
            (48, 0x80, "refcount table at 0x8000000000010000 is not where"),
            (53, 2, "refcounts do not begin with the header's own cluster"),
            (59, 0, "refcounts do not begin with the header's own cluster"),
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
