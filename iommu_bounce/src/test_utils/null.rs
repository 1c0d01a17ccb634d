// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A mapper that does nothing, for measuring what is left.

use vm_memory::VolatileSlice;

use crate::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};

/// A [`DmaMapper`] that accepts everything and remembers nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NullMapper;

impl DmaMapper for NullMapper {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, _: Permissions) -> Result<(), MapError> {
        std::hint::black_box((iova, memory.len()));
        Ok(())
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        std::hint::black_box((iova, len));
        Ok(())
    }

    fn limits(&self) -> MapperLimits {
        MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=u64::MAX], max_mappings: None }
    }

    /// As the host's, so that counting them is measured too.
    fn keeps_page_tables(&self) -> bool {
        true
    }
}
