// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Buffers in this process that meet the alignment of direct I/O.

/// Alignment of a buffer, in bytes.
pub(in crate::virtio::block) const PAGE: usize = 4096;

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Pages of zeroes. Writes of zeroes use these pages as source.
static ZEROES: [Page; 16] = [Page([0; PAGE]); 16];

/// Returns the address and the length of memory that always contains zeroes.
pub(in crate::virtio::block) fn zeroes() -> (*const u8, usize) {
    (ZEROES.as_ptr().cast(), size_of_val(&ZEROES))
}

/// Page-aligned memory.
pub(in crate::virtio::block) struct Buffer(Vec<Page>);

impl Buffer {
    /// Allocates at least `len` bytes, all zero.
    pub(in crate::virtio::block) fn new(len: usize) -> Self {
        Self(vec![Page([0; PAGE]); len.div_ceil(PAGE)])
    }

    /// Returns the address of the memory. The address is valid and constant while the buffer lives.
    pub(in crate::virtio::block) fn address(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// Returns the buffer's bytes. Nothing else may access the memory while the caller uses the bytes, so no kernel I/O to the buffer may
    /// be under way.
    pub(in crate::virtio::block) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.0.len() * PAGE;
        // SAFETY: A page consists of initialised bytes without padding, and the pages follow each other without a gap.
        unsafe { std::slice::from_raw_parts_mut(self.address(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_page_aligned_and_long_enough() {
        for len in [1, PAGE, PAGE + 1] {
            let mut buffer = Buffer::new(len);
            assert!(buffer.address().addr().is_multiple_of(PAGE) && buffer.bytes_mut().len() >= len);
            assert!(buffer.bytes_mut().iter().all(|byte| *byte == 0));
        }
        assert!(zeroes().0.addr().is_multiple_of(PAGE));
    }
}
