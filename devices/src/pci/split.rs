// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Splits accesses of any width and alignment into accesses that PCI registers support.

use std::ops::Range;

/// Splits the `len` bytes at `offset` into naturally aligned accesses of at most four bytes each. Returns the parts in ascending order, as
/// ranges of the access's data.
pub(crate) fn aligned_pieces(offset: u64, len: usize) -> impl Iterator<Item = Range<usize>> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = len - done;
        if left == 0 {
            return None;
        }
        let at = offset.wrapping_add(done as u64);
        let width = [4, 2, 1].into_iter().find(|width| left >= *width && at.is_multiple_of(*width as u64)).unwrap_or(1);
        done += width;
        Some(done - width..done)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(offset: u64, len: usize) -> Vec<Range<usize>> {
        aligned_pieces(offset, len).collect()
    }

    #[test]
    fn register_access_stays_whole() {
        assert_eq!(pieces(0x10, 4), vec![0..4]);
        assert_eq!(pieces(0x12, 2), vec![0..2]);
        assert_eq!(pieces(0x13, 1), vec![0..1]);
    }

    #[test]
    fn wide_or_crossing_access_is_split() {
        assert_eq!(pieces(0x10, 8), vec![0..4, 4..8]);
        assert_eq!(pieces(0x13, 4), vec![0..1, 1..3, 3..4]);
        assert_eq!(pieces(0, 0), Vec::<Range<usize>>::new());
        assert_eq!(pieces(u64::MAX, 2), vec![0..1, 1..2]);
    }
}
