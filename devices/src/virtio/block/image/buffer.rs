// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory of this process that direct I/O takes.

/// What a buffer is aligned to, in bytes.
pub(in crate::virtio::block) const PAGE: usize = 4096;

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Pages of zeroes, to be written.
static ZEROES: [Page; 16] = [Page([0; PAGE]); 16];

/// Address and length of bytes that are zero and stay so.
pub(in crate::virtio::block) fn zeroes() -> (*const u8, usize) {
    (ZEROES.as_ptr().cast(), size_of_val(&ZEROES))
}

/// Memory that begins at a page's start.
pub(in crate::virtio::block) struct Buffer(Vec<Page>);

impl Buffer {
    /// At least `len` bytes, all zero.
    pub(in crate::virtio::block) fn new(len: usize) -> Self {
        Self(vec![Page([0; PAGE]); len.div_ceil(PAGE)])
    }

    /// Where it is. It stays there while the buffer lives.
    pub(in crate::virtio::block) fn address(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }

    /// The bytes. Nobody else may access them meanwhile: no I/O of the kernel is under way.
    pub(in crate::virtio::block) fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.0.len() * PAGE;
        // SAFETY: A page is its bytes, and pages follow each other without a gap.
        unsafe { std::slice::from_raw_parts_mut(self.address(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_aligned_and_as_long_as_was_asked_for() {
        for len in [1, PAGE, PAGE + 1] {
            let mut buffer = Buffer::new(len);
            assert!(buffer.address().addr().is_multiple_of(PAGE) && buffer.bytes_mut().len() >= len);
            assert!(buffer.bytes_mut().iter().all(|byte| *byte == 0));
        }
        assert!(zeroes().0.addr().is_multiple_of(PAGE));
    }
}
