// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What guest RAM is made of. All that handles it names these types, so that what RAM keeps of its pages is decided here.

use vm_memory::{GuestMemoryMmap, GuestRegionMmap};

/// What each region keeps of its pages: nothing. A bitmap of pages that were written, as live migration and incremental
/// snapshots need it, takes its place here (`vm_memory::bitmap::AtomicBitmap`).
pub type RamBitmap = ();

/// All RAM of a guest, by guest-physical address.
pub type Ram = GuestMemoryMmap<RamBitmap>;

/// A contiguous part of it.
pub type RamRegion = GuestRegionMmap<RamBitmap>;
