// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Returns several chains to the driver together: the driver sees either all chains as used, or no chain. A packet that is spread over
//! several chains must become visible to the driver as a whole (virtio 1.3, section 5.1.6.4).

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Error, Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory};

/// Number of bytes in the used ring before its elements.
const HEADER: u64 = 4;
/// Size of an element in bytes.
const ELEMENT: u64 = 8;

/// Adds `used` to the used ring, and makes all elements visible to the driver together. Each element is the head index of a chain and the
/// number of bytes that were written to the chain.
pub(super) fn add_used(queue: &mut Queue, memory: &impl GuestMemory, used: &[(u16, u32)]) -> Result<(), Error> {
    let ring = GuestAddress(queue.used_ring());
    let mut next = Wrapping(queue.next_used());
    for (head, len) in used {
        if *head >= queue.size() {
            return Err(Error::InvalidDescriptorIndex);
        }
        let offset = HEADER + ELEMENT * u64::from(next.0 % queue.size());
        let place = ring.checked_add(offset).ok_or(Error::AddressOverflow)?;
        let element = [u32::from(*head).to_le(), len.to_le()];
        memory.write_obj(element, place).map_err(Error::GuestMemory)?;
        next += 1;
    }
    queue.set_next_used(next.0);
    let index = ring.checked_add(2).ok_or(Error::AddressOverflow)?;
    memory.store(next.0.to_le(), index, Ordering::Release).map_err(Error::GuestMemory)
}

/// True if the driver wants an interrupt for the chains that were used since the used index was `since` (virtio 1.3, section 2.7.7).
pub(super) fn wants_interrupt(queue: &Queue, memory: &impl GuestMemory, since: u16) -> Result<bool, Error> {
    let now = Wrapping(queue.next_used());
    let used = now - Wrapping(since);
    if used.0 == 0 {
        return Ok(false);
    }
    // The driver must see the new used index before this function reads `used_event` or the flag. Otherwise the driver could miss an
    // interrupt.
    fence(Ordering::SeqCst);
    let ring = GuestAddress(queue.avail_ring());
    let load = |offset| -> Result<u16, Error> {
        let place = ring.checked_add(offset).ok_or(Error::AddressOverflow)?;
        memory.load(place, Ordering::Relaxed).map(u16::from_le).map_err(Error::GuestMemory)
    };
    if queue.event_idx_enabled() {
        // `used_event` follows the elements of the available ring.
        let used_event = Wrapping(load(4 + 2 * u64::from(queue.size()))?);
        return Ok(now - used_event - Wrapping(1) < used);
    }
    Ok(u32::from(load(0)?) & VRING_AVAIL_F_NO_INTERRUPT == 0)
}

#[cfg(test)]
mod tests {
    use virtio_queue::mock::MockSplitQueue;

    use super::*;
    use crate::dma::NearMemory;
    use crate::ram::Ram;

    fn memory() -> Ram {
        Ram::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap()
    }

    fn queue(memory: &Ram, event_idx: bool) -> Queue {
        let mock = MockSplitQueue::create(memory, GuestAddress(0x1000), 4);
        let mut queue: Queue = mock.create_queue().unwrap();
        // The mock leaves no room for `used_event` between the available ring and the used ring, so move the used ring.
        queue.set_used_ring_address(Some(0x2000), Some(0));
        queue.set_event_idx(event_idx);
        queue
    }

    #[test]
    fn elements_wrap_around_and_the_index_comes_last() {
        let memory = memory();
        let mut queue = queue(&memory, false);
        let near = NearMemory::new(&memory);
        add_used(&mut queue, &near, &[(0, 1), (1, 2), (2, 3)]).unwrap();
        add_used(&mut queue, &near, &[(3, 4), (0, 5)]).unwrap();
        let element = |slot: u64| -> (u32, u32) {
            let place = GuestAddress(queue.used_ring() + 4 + 8 * slot);
            (memory.read_obj(place).unwrap(), memory.read_obj(GuestAddress(place.0 + 4)).unwrap())
        };
        assert_eq!([element(3), element(0), element(1)], [(3, 4), (0, 5), (1, 2)]);
        assert_eq!(memory.read_obj::<u16>(GuestAddress(queue.used_ring() + 2)).unwrap(), 5);
        assert!(matches!(add_used(&mut queue, &near, &[(4, 0)]), Err(Error::InvalidDescriptorIndex)));
    }

    #[test]
    fn driver_gets_one_interrupt_where_it_asked_for_it() {
        let memory = memory();
        let near = NearMemory::new(&memory);
        for (used_event, wanted) in [(0u16, true), (1, true), (2, true), (3, false), (u16::MAX, false)] {
            let mut queue = queue(&memory, true);
            memory.write_obj(used_event, GuestAddress(queue.avail_ring() + 4 + 2 * 4)).unwrap();
            add_used(&mut queue, &near, &[(0, 1), (1, 2), (2, 3)]).unwrap();
            assert_eq!(wants_interrupt(&queue, &near, 0).unwrap(), wanted, "{used_event}");
            assert!(!wants_interrupt(&queue, &near, 3).unwrap(), "nothing was used since");
        }
        let mut queue = queue(&memory, false);
        add_used(&mut queue, &near, &[(0, 1)]).unwrap();
        assert!(wants_interrupt(&queue, &near, 0).unwrap());
        memory.write_obj(1u16, GuestAddress(queue.avail_ring())).unwrap();
        assert!(!wants_interrupt(&queue, &near, 0).unwrap());
    }

    #[test]
    fn interrupt_decision_survives_an_index_wraparound() {
        let memory = memory();
        let near = NearMemory::new(&memory);
        let mut queue = queue(&memory, true);
        queue.set_next_used(u16::MAX);
        memory.write_obj(0u16, GuestAddress(queue.avail_ring() + 4 + 2 * 4)).unwrap();
        add_used(&mut queue, &near, &[(0, 1), (1, 1)]).unwrap();
        assert_eq!(queue.next_used(), 1);
        assert!(wants_interrupt(&queue, &near, u16::MAX).unwrap());
    }
}
