// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mapper that does nothing, for measuring the engine alone.

use vm_memory::VolatileSlice;

use crate::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};

/// [`DmaMapper`] that accepts everything and records nothing.
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

    /// Returns true, as mappers of host devices do, so that measurements include the counting of page tables.
    fn keeps_page_tables(&self) -> bool {
        true
    }
}
