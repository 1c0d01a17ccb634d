// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Window memory: the host memory in the shared memory region of virtio-iommu's bounce windows.
//!
//! The region is a reserved range of this process's addresses. The range consists of *places*, one for each chunk index. A chunk is an
//! anonymous file:
//! * A *backed* chunk is mapped at its place.
//! * When a chunk is *released*, the scratch chunk is mapped over its place. All released places share this one scratch chunk. The file of
//!   the released chunk and its memory are dropped. So a newly backed chunk contains no old data.
//! * A *parked* chunk is zeroed, and the scratch chunk is also mapped over its place. But the chunk's file stays open, because the device
//!   keeps the chunk mapped. The same endpoint gets the chunk back later. A chunk is never parked if another process has its file, such as
//!   a vfio-user or vhost-user server.
//!
//! Each place has its own memory slot, which makes the place visible to the guest. The slot is created when the place is first backed. The
//! slot normally stays for ever, because the removal of a slot is expensive for the whole VM. If a place was never backed, guest accesses
//! exit to the VMM: reads return zero and writes have no effect.
//!
//! Allocating and zeroing memory takes long, and the guest would wait meanwhile with interrupts off. So a background thread keeps a small
//! stash of chunks ready while the driver uses windows. Chunks that are stashed, being allocated or being dropped also count against the
//! budget.

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
