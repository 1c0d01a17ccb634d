// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How often each page of a region of RAM is pinned.
//!
//! There are counts of pages and of blocks of 512 pages. A range counts once in each block that it covers, and in the pages of the
//! two that it begins and ends in: at most 1022 pages, however long it is. The counts are four bytes for each page, which the
//! host's kernel provides once some page nearby is pinned alone.

use std::ops::Range;

/// Bytes of a page.
pub(super) const PAGE: u64 = 4 << 10;
/// Bytes of a block.
pub(super) const BLOCK: u64 = 2 << 20;
const PAGES: u64 = BLOCK / PAGE;

#[derive(Clone, Copy, Default)]
struct Block {
    /// How often it is pinned whole.
    whole: u32,
    /// How often its pages are pinned, all together.
    parts: u32,
}

/// The counts of a region. All ranges are bytes from its start.
pub(super) struct RegionPins {
    pages: Vec<u32>,
    blocks: Vec<Block>,
}

fn index(number: u64) -> usize {
    usize::try_from(number).expect("a region fits into the address space")
}

/// A count that is full stays so: its pages are pinned for good.
fn change(count: &mut u32, pin: bool) {
    if *count != u32::MAX {
        *count = if pin { *count + 1 } else { count.saturating_sub(1) };
    }
}

impl RegionPins {
    /// Of a region of so many bytes, nothing of which is pinned.
    pub(super) fn new(len: u64) -> Self {
        Self { pages: vec![0; index(len.div_ceil(PAGE))], blocks: vec![Block::default(); index(len.div_ceil(BLOCK))] }
    }

    /// Bytes of the region, in whole pages.
    pub(super) fn size(&self) -> u64 {
        self.pages.len() as u64 * PAGE
    }

    /// Counts the pages that `range` touches once more, or once less.
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

    /// Whether the page is pinned.
    fn is_pinned(&self, page: u64) -> bool {
        let block = self.blocks[index(page / PAGES)];
        block.whole > 0 || block.parts > 0 && self.pages[index(page)] > 0
    }

    /// The first pages of `range` that follow each other and are not pinned; `None` if there are none.
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
