// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VHD images of fixed size: the disk's bytes, followed by a footer of 512 bytes (Microsoft, Virtual Hard Disk Image Format Specification,
//! version 1.0).

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::error::ImageError;

/// Size of the footer in bytes.
const FOOTER: usize = 512;
/// First bytes of the footer.
const COOKIE: &[u8] = b"conectix";
/// Disk type of an image of fixed size.
const FIXED: u32 = 2;
/// Position of the checksum in the footer.
const CHECKSUM: std::ops::Range<usize> = 64..68;

/// Returns the ones' complement of the sum of all bytes except the checksum.
fn checksum(footer: &[u8; FOOTER]) -> u32 {
    let others = footer.iter().enumerate().filter(|(place, _)| !CHECKSUM.contains(place));
    !others.map(|(_, byte)| u32::from(*byte)).sum::<u32>()
}

/// Returns the size of the disk in `file`, in bytes. The file has `len` bytes, and must not be open for direct I/O.
///
/// # Errors
/// The file is not a VHD image of fixed size.
pub(super) fn size(file: &File, len: u64) -> Result<u64, ImageError> {
    let malformed = |rule: String| Err(ImageError::Malformed(rule));
    let mut footer = [0; FOOTER];
    let Some(end) = len.checked_sub(FOOTER as u64).filter(|end| end.is_multiple_of(512)) else {
        return malformed(format!(
            "the image has {len} bytes, but a fixed VHD image consists of sectors of 512 bytes and a footer of 512 bytes; set image_type to the format of the file"
        ));
    };
    file.read_exact_at(&mut footer, end)?;
    if !footer.starts_with(COOKIE) {
        return malformed("the image has no VHD footer; set image_type to the format of the file".into());
    }
    let word = |at: usize| u32::from_be_bytes([footer[at], footer[at + 1], footer[at + 2], footer[at + 3]]);
    if word(CHECKSUM.start) != checksum(&footer) {
        return malformed(
            "the checksum of the VHD footer is wrong; if the file is no VHD image, set image_type to the format of the file".into(),
        );
    }
    if word(60) != FIXED {
        return malformed(format!(
            "the image is a VHD image of type {}, but only fixed size (type {FIXED}) is supported; convert the image with qemu-img convert -o subformat=fixed",
            word(60)
        ));
    }
    let size = u64::from(word(48)) << 32 | u64::from(word(52));
    if size > end {
        return malformed(format!(
            "the VHD footer gives a disk size of {size} bytes, but the file has only {end} bytes before the footer; copy the complete image again"
        ));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an image of 4 KiB. `change` modifies the footer before the checksum is calculated.
    fn image(change: impl FnOnce(&mut [u8; FOOTER])) -> (File, u64) {
        let mut footer = [0; FOOTER];
        footer[..8].copy_from_slice(COOKIE);
        footer[54] = 0x10;
        footer[63] = 2;
        change(&mut footer);
        let sum = checksum(&footer);
        footer[CHECKSUM].copy_from_slice(&sum.to_be_bytes());
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&footer, 4096).unwrap();
        (file, 4096 + 512)
    }

    #[test]
    fn footer_gives_the_disk_size() {
        let (file, len) = image(|_| {});
        assert_eq!(size(&file, len).unwrap(), 4096);
        // Some tools make a file that is larger than the disk. Here, the disk has 2048 bytes.
        let (file, len) = image(|footer| footer[54] = 8);
        assert_eq!(size(&file, len).unwrap(), 2048);
    }

    #[test]
    fn invalid_fixed_vhd_is_rejected_with_the_rule() {
        let refused = |(file, len): (File, u64)| size(&file, len).unwrap_err().to_string();
        for (image, rule) in [
            (image(|footer| footer[63] = 3), "type 3, but only fixed size"),
            (image(|footer| footer[54] = 0x20), "gives a disk size of 8192 bytes, but the file has only 4096 bytes"),
            (image(|footer| footer[0] = b'x'), "no VHD footer"),
            ((tempfile::tempfile().unwrap(), 511), "the image has 511 bytes, but a fixed VHD image"),
            ((tempfile::tempfile().unwrap(), 0), "the image has 0 bytes, but a fixed VHD image"),
        ] {
            let error = refused(image);
            assert!(error.contains(rule), "{error}");
        }
        let (file, len) = image(|_| {});
        file.write_all_at(&[1], 4096 + 100).unwrap();
        assert!(refused((file, len)).contains("checksum"));
    }
}
