// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Addresses, sizes and limits of the model and the engine.

use std::ops::{Range, RangeInclusive};

pub(crate) const PAGE: u64 = 0x1000;
pub(crate) const CHUNK: u64 = 4 * PAGE;
/// First page of requests: eight pages below the aperture. Requests use these pages, the aperture, and some pages above the aperture.
pub(crate) const FIRST_IOVA: u64 = APERTURE - 8 * PAGE;
pub(crate) const APERTURE: u64 = 0xe000_0000;
pub(crate) const APERTURE_CHUNKS: u64 = 4;
pub(crate) const MAX_DOMAINS: usize = 2;
pub(crate) const MAX_MAPPINGS: usize = 12;
/// Guest RAM: two regions that are adjacent in the guest, but not in the host.
pub(crate) const RAM_PAGES: u64 = 40;
/// Registers of a device, directly after RAM.
pub(crate) const DEVICE_PAGES: Range<u64> = RAM_PAGES..RAM_PAGES + 4;
/// File that the guest sees as memory, directly after the registers.
pub(crate) const FILE_PAGES: Range<u64> = DEVICE_PAGES.end..DEVICE_PAGES.end + 4;
/// Endpoint that is bound to its address space. The host can move the other endpoints.
pub(crate) const BOUND: u32 = 1;
pub(crate) const ENDPOINTS: RangeInclusive<u32> = 1..=4;
