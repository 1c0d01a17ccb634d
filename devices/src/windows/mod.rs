// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Window memory: the host memory behind the shared memory region of virtio-iommu's bounce windows.
//!
//! The region is a reserved range of this process's addresses. A chunk is an anonymous file that is mapped into it when
//! it is backed; when it is released, one scratch chunk that all released places share is mapped over it, and the file
//! with its memory is dropped. So a chunk that is backed again has never been seen by anyone. A *parked* chunk is out of
//! view in the same way and zeroed, but its file stays, since a device has it mapped; the same endpoint gets it back.
//! A chunk whose file was handed to another process, a vfio-user server, is never parked.
//!
//! The guest sees a chunk's place through a memory slot of its own, which is made when the place is first backed and
//! stays for good, because taking a slot away is costly for the whole VM. Where no chunk ever was, the guest's accesses
//! exit, read zero and write nothing.
//!
//! Allocating and zeroing memory takes long, and the guest waits with interrupts off: so a background thread keeps a
//! small stash of chunks ready while the driver uses windows. What is stashed, being allocated or being dropped counts
//! against the budget as what is backed does.

mod chunk;

mod memory;
mod region;
mod shared;
mod store;
mod supply;

#[cfg(test)]
mod tests;

pub use chunk::READER_ROLE;
pub use memory::{STASH_ROLE, WindowError, WindowMemory, WindowMemoryConfig};
pub use store::WindowStore;
