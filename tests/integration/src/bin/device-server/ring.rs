// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Split virtqueue (virtio 1.3, section 2.7), without indirect descriptors. The device uses the chains in the order in which they
//! became available.

use std::fs::File;
use std::io::Write;

use crate::memory::{Fault, Memory};

/// Flag of a descriptor: another descriptor follows.
const NEXT: u16 = 1;
/// Flag of a descriptor: the device writes to the buffer.
const WRITE: u16 = 2;
/// Flag of the available ring: the driver wants no interrupt.
const NO_INTERRUPT: u16 = 1;

/// Buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) is_writable: bool,
}

/// Descriptor chain.
#[derive(Debug)]
pub(crate) struct Chain {
    head: u16,
    pub(crate) parts: Vec<Part>,
}

/// Virtqueue, as far as the front end has set it up.
#[derive(Default)]
pub(crate) struct Ring {
    pub(crate) size: u16,
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    /// Index of the next chain in the available ring.
    pub(crate) next: u16,
    /// Eventfd that the driver's notifications signal. `None` unless the ring is started.
    pub(crate) kick: Option<File>,
    pub(crate) call: Option<File>,
    pub(crate) is_enabled: bool,
}

impl Ring {
    /// True if the ring is started and enabled, so that chains may be taken.
    pub(crate) fn runs(&self) -> bool {
        self.is_enabled && self.kick.is_some() && self.size != 0
    }

    /// Makes the server check the ring again, as if the driver had notified the device.
    pub(crate) fn kick_again(&mut self) {
        if let Some(kick) = &mut self.kick {
            // The write fails only if the event counter is full. In this case, the server checks the ring anyway.
            let _ = kick.write(&1u64.to_ne_bytes());
        }
    }

    /// Returns the next available chain, if any. Later calls return the same chain, until [`Self::put_used`] returns the chain to
    /// the driver.
    pub(crate) fn chain(&self, memory: &Memory) -> Result<Option<Chain>, Fault> {
        if memory.short(self.available + 2)? == self.next {
            return Ok(None);
        }
        let head = memory.short(self.available + 4 + 2 * u64::from(self.next % self.size))?;
        let (mut parts, mut index) = (Vec::new(), head);
        // The limit also ends a circular chain.
        while parts.len() < self.size.into() {
            let mut descriptor = [0; 16];
            memory.read(self.descriptors + 16 * u64::from(index), &mut descriptor)?;
            let [address @ .., _, _, _, _, _, _, _, _] = descriptor;
            let [.., a, b, c, d, e, f, g, h] = descriptor;
            let flags = u16::from_le_bytes([e, f]);
            let len = u32::from_le_bytes([a, b, c, d]);
            parts.push(Part { address: u64::from_le_bytes(address), len, is_writable: flags & WRITE != 0 });
            if flags & NEXT == 0 {
                break;
            }
            index = u16::from_le_bytes([g, h]);
        }
        Ok(Some(Chain { head, parts }))
    }

    /// Returns a chain to the driver with the number of written bytes, and notifies the driver.
    pub(crate) fn put_used(&mut self, memory: &Memory, chain: &Chain, written: u32) -> Result<(), Fault> {
        // First access both rings without changing them, so that a missing translation leaves no partial change.
        memory.short(self.available)?;
        memory.set_short(self.used + 2, self.next)?;
        let element = [u32::from(chain.head), written].map(u32::to_le_bytes);
        memory.write(self.used + 4 + 8 * u64::from(self.next % self.size), element.as_flattened())?;
        let next = self.next.wrapping_add(1);
        memory.set_short(self.used + 2, next)?;
        self.next = next;
        if memory.short(self.available)? & NO_INTERRUPT == 0
            && let Some(call) = &mut self.call
        {
            // The write fails only if the event counter is full. In this case, an earlier notification is still pending.
            let _ = call.write(&1u64.to_ne_bytes());
        }
        Ok(())
    }
}
