// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counts how often each page of a RAM region is pinned.
//!
//! Both pages and blocks of 512 pages have counts. A pin of a range increments one count for each block that the range covers completely.
//! At the two ends of the range, the pin increments the counts of single pages. At most 1022 single pages are counted, regardless of the
//! length of the range.
//!
//! Each page's count needs four bytes. The host kernel allocates memory for these counts only when single pages nearby are pinned.

use std::ops::Range;

/// Size of a page in bytes.
pub(super) const PAGE: u64 = 4 << 10;
/// Size of a block in bytes.
pub(super) const BLOCK: u64 = 2 << 20;
const PAGES: u64 = BLOCK / PAGE;

#[derive(Clone, Copy, Default)]
struct Block {
    /// Number of pins of the whole block.
    whole: u32,
    /// Sum of the pins of the block's single pages.
    parts: u32,
}

/// Counts of a region. All ranges are byte offsets from the start of the region.
pub(super) struct RegionPins {
    pages: Vec<u32>,
    blocks: Vec<Block>,
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("a region fits into the address space")
}

/// Increments or decrements a count. A count at its maximum never changes again, so the counted pages stay pinned for ever.
fn change(count: &mut u32, pin: bool) {
    if *count != u32::MAX {
        *count = if pin { *count + 1 } else { count.saturating_sub(1) };
    }
}

impl RegionPins {
    /// Returns the counts of a region of `len` bytes without pins.
    pub(super) fn new(len: u64) -> Self {
        Self { pages: vec![0; index(len.div_ceil(PAGE))], blocks: vec![Block::default(); index(len.div_ceil(BLOCK))] }
    }

    /// Returns the size of the region in bytes, rounded up to whole pages.
    pub(super) fn size(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    /// Adds (`pin` is true) or removes a pin of all pages that `range` overlaps.
    pub(super) fn count(&mut self, range: Range<u64>, pin: bool) {
        let mut page = range.start / PAGE;
        let end = range.end.div_ceil(PAGE);
        while page < end {
            let block = &mut self.blocks[index(page / PAGES)];
            let next = (page + 1).next_multiple_of(PAGES);
            if page.is_multiple_of(PAGES) && next <= end {
                change(&mut block.whole, pin);
                page = next;
                continue;
            }
            for page in page..next.min(end) {
                change(&mut block.parts, pin);
                change(&mut self.pages[index(page)], pin);
            }
            page = next;
        }
    }

    /// True if the page is pinned.
    fn is_pinned(&self, page: u64) -> bool {
        let block = self.blocks[index(page / PAGES)];
        block.whole > 0 || block.parts > 0 && self.pages[index(page)] > 0
    }

    /// Returns the first run of unpinned pages in `range`, or `None` if all its pages are pinned.
    pub(super) fn free(&self, range: Range<u64>) -> Option<Range<u64>> {
        let mut pages = range.start / PAGE..range.end / PAGE;
        let first = pages.find(|page| !self.is_pinned(*page))?;
        let mut end = first + 1;
        while end < pages.end && !self.is_pinned(end) {
            end += 1;
        }
        Some(first * PAGE..end * PAGE)
    }
}
