// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Suppression of notifications in both directions: driver to device, and device to driver (virtio 1.3, sections 2.7.7 and 2.7.10).

use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Error, Queue, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory};

/// Ring with the field `avail_event`. A test replaces the guest's ring with a model.
trait EventRing {
    /// Returns the driver's index in the available ring. All elements before this index are visible to the caller.
    fn available(&self) -> Result<Wrapping<u16>, Error>;
    /// Asks the driver to notify the device when the driver adds this element.
    fn set_used_event(&self, element: Wrapping<u16>) -> Result<(), Error>;
    /// Orders earlier writes before later reads.
    fn fence(&self);
}

struct GuestRing<'r, M> {
    queue: &'r Queue,
    memory: &'r M,
    avail_event: GuestAddress,
}

impl<'r, M> GuestRing<'r, M> {
    fn new(queue: &'r Queue, memory: &'r M) -> Result<Self, Error> {
        // `avail_event` follows the elements of the used ring.
        let offset = 4 + 8 * u64::from(queue.size());
        let avail_event = GuestAddress(queue.used_ring()).checked_add(offset).ok_or(Error::AddressOverflow)?;
        Ok(Self { queue, memory, avail_event })
    }
}

impl<M: GuestMemory> EventRing for GuestRing<'_, M> {
    fn available(&self) -> Result<Wrapping<u16>, Error> {
        self.queue.avail_idx(self.memory, Ordering::Acquire)
    }
    fn set_used_event(&self, element: Wrapping<u16>) -> Result<(), Error> {
        self.memory.store(element.0.to_le(), self.avail_event, Ordering::Relaxed).map_err(Error::GuestMemory)
    }
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// Asks the driver to notify the device of the first element that is not in the available ring yet. Returns the index of this element. The
/// caller must serve all elements before this index.
fn keep_up(ring: &impl EventRing, size: u16) -> Result<Wrapping<u16>, Error> {
    let mut seen = ring.available()?;
    // A correct driver adds at most `size` elements while the device serves no element. The limit ends the loop if a faulty driver keeps
    // changing the index.
    for _ in 0..=size {
        ring.set_used_event(seen)?;
        // The device writes `avail_event` before it reads the driver's index. The driver writes its index before it reads `avail_event`. So
        // at least one of the two sees the write of the other.
        ring.fence();
        let now = ring.available()?;
        if now == seen {
            break;
        }
        seen = now;
    }
    Ok(seen)
}

/// Asks the driver to notify the device of every element that it adds to the available ring from now on.
///
/// Without `EVENT_IDX`, a driver notifies the device of each element, unless the device has set a flag in the used ring
/// (`VRING_USED_F_NO_NOTIFY`). With `EVENT_IDX`, a driver notifies the device only when it adds the element that `avail_event` names.
///
/// Call this function before serving a queue. The driver then notifies the device of all later elements. So the device may stop after it
/// has served the elements that are already present. Otherwise, a vCPU that keeps adding elements could keep the device busy for ever.
pub(crate) fn ask_for_notifications(queue: &Queue, memory: &impl GuestMemory) -> Result<(), Error> {
    if !queue.event_idx_enabled() {
        return Ok(());
    }
    keep_up(&GuestRing::new(queue, memory)?, queue.size()).map(drop)
}

/// Asks the driver to notify the device of element `taken`, the next element that the device will take. Returns true if the driver has
/// already added this element.
fn request_interrupt_after(ring: &impl EventRing, taken: Wrapping<u16>) -> Result<bool, Error> {
    ring.set_used_event(taken)?;
    // This fence is needed for the same reason as the fence in `keep_up`.
    ring.fence();
    Ok(ring.available()? != taken)
}

/// Asks the driver to notify the device of later elements. Call this function after the device has taken all elements that it found.
///
/// Returns true if the driver has added further elements. The driver may have sent no notification of these elements, so the device must
/// take them before it waits.
///
/// With `EVENT_IDX`, a driver sends no notification until the device asks again. So if a device asks only when idle, notifications cause no
/// VM exits while the device is busy. Without `EVENT_IDX`, a driver notifies the device of each element.
pub(crate) fn more_came(queue: &Queue, memory: &impl GuestMemory) -> Result<bool, Error> {
    let taken = Wrapping(queue.next_avail());
    if !queue.event_idx_enabled() {
        return Ok(queue.avail_idx(memory, Ordering::Acquire)? != taken);
    }
    request_interrupt_after(&GuestRing::new(queue, memory)?, taken)
}

/// Returns the number of chains that the driver has added and not taken back yet, at most the queue size.
///
/// With `EVENT_IDX`, `used_event` shows how many used chains the driver has taken back. Without `EVENT_IDX`, the result is the number of
/// chains that the device has not used yet.
pub(crate) fn outstanding(queue: &Queue, memory: &impl GuestMemory) -> Result<u16, Error> {
    let available = queue.avail_idx(memory, Ordering::Relaxed)?;
    let taken = if queue.event_idx_enabled() {
        // `used_event` follows the elements of the available ring.
        let offset = 4 + 2 * u64::from(queue.size());
        let place = GuestAddress(queue.avail_ring()).checked_add(offset).ok_or(Error::AddressOverflow)?;
        u16::from_le(memory.load(place, Ordering::Relaxed).map_err(Error::GuestMemory)?)
    } else {
        queue.next_used()
    };
    Ok((available - Wrapping(taken)).0.min(queue.size()))
}

/// True if the driver wants an interrupt for the buffers that were used since the last call. With `EVENT_IDX`, `used_event` decides.
/// Without `EVENT_IDX`, a flag in the available ring decides.
pub(crate) fn wants_interrupt(queue: &mut Queue, memory: &impl GuestMemory) -> Result<bool, Error> {
    if queue.event_idx_enabled() {
        return queue.needs_notification(memory);
    }
    // The driver must see the new used index before this function reads the flag. Otherwise the driver could miss an interrupt.
    fence(Ordering::SeqCst);
    let flags: u16 = memory.load(GuestAddress(queue.avail_ring()), Ordering::Relaxed).map_err(Error::GuestMemory)?;
    Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0)
}

#[cfg(test)]
mod tests {
    use virtio_queue::mock::MockSplitQueue;

    use super::*;
    use crate::dma::NearMemory;
    use crate::ram::Ram;

    /// Returns a queue of size 4. The device has used `used` elements.
    fn queue(memory: &Ram, event_idx: bool, used: u16) -> Queue {
        let mock = MockSplitQueue::create(memory, GuestAddress(0x1000), 4);
        let mut queue: Queue = mock.create_queue().unwrap();
        queue.set_event_idx(event_idx);
        for head in 0..used {
            queue.add_used(memory, head, 0).unwrap();
        }
        queue
    }

    fn memory() -> Ram {
        Ram::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap()
    }

    #[test]
    fn avail_event_follows_next_avail_and_reports_late_elements() {
        let memory = memory();
        let near = NearMemory::new(&memory);
        for event_idx in [true, false] {
            let mut queue = queue(&memory, event_idx, 0);
            let asked = GuestAddress(queue.used_ring()).unchecked_add(4 + 8 * 4);
            memory.write_obj(9u16, asked).unwrap();
            memory.write_obj(2u16, GuestAddress(queue.avail_ring()).unchecked_add(2)).unwrap();
            for (taken, more) in [(1, true), (2, false)] {
                queue.set_next_avail(taken);
                assert_eq!(more_came(&queue, &near).unwrap(), more);
                assert_eq!(memory.read_obj::<u16>(asked).unwrap(), if event_idx { taken } else { 9 });
            }
        }
    }

    #[test]
    fn buffers_are_outstanding_until_used_event_passes_them() {
        let memory = memory();
        let near = NearMemory::new(&memory);
        for (event_idx, used_event, expected) in [(true, 1u16, 2), (true, 3, 0), (true, 4, 4), (false, 0, 1)] {
            let queue = queue(&memory, event_idx, 2);
            let ring = GuestAddress(queue.avail_ring());
            memory.write_obj(3u16, ring.unchecked_add(2)).unwrap();
            memory.write_obj(used_event, ring.unchecked_add(4 + 2 * 4)).unwrap();
            assert_eq!(outstanding(&queue, &near).unwrap(), expected, "{used_event}");
        }
    }

    #[test]
    fn flag_in_the_available_ring_suppresses_interrupts() {
        let memory = memory();
        let mut queue = queue(&memory, false, 1);
        assert!(wants_interrupt(&mut queue, &NearMemory::new(&memory)).unwrap());
        memory.write_obj(1u16, GuestAddress(queue.avail_ring())).unwrap();
        assert!(!wants_interrupt(&mut queue, &NearMemory::new(&memory)).unwrap());
    }

    #[test]
    fn used_event_decides_when_to_interrupt() {
        let memory = memory();
        for (used_event, wanted) in [(0u16, true), (1, true), (2, false), (7, false)] {
            let mut queue = queue(&memory, true, 2);
            let event = GuestAddress(queue.avail_ring()).unchecked_add(4 + 2 * 4);
            memory.write_obj(used_event, event).unwrap();
            assert_eq!(
                wants_interrupt(&mut queue, &NearMemory::new(&memory)).unwrap(),
                wanted,
                "used_event {used_event}"
            );
        }
    }

    /// The two ring fields that notifications depend on. loom tries all orders of accesses to these fields.
    #[derive(Default)]
    struct ModelRing {
        available: loom::sync::atomic::AtomicU16,
        avail_event: loom::sync::atomic::AtomicU16,
    }

    impl EventRing for ModelRing {
        fn available(&self) -> Result<Wrapping<u16>, Error> {
            Ok(Wrapping(self.available.load(Ordering::Acquire)))
        }
        fn set_used_event(&self, element: Wrapping<u16>) -> Result<(), Error> {
            self.avail_event.store(element.0, Ordering::Relaxed);
            Ok(())
        }
        fn fence(&self) {
            loom::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    impl ModelRing {
        /// Adds an element as a driver does. Returns true if the driver must notify the device.
        fn add(&self) -> bool {
            let old = self.available.load(Ordering::Relaxed);
            let new = old.wrapping_add(1);
            self.available.store(new, Ordering::Release);
            loom::sync::atomic::fence(Ordering::SeqCst);
            let event = self.avail_event.load(Ordering::Relaxed);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        }
    }

    #[test]
    fn every_element_is_seen_or_notified_in_any_order() {
        no_element_is_left(|ring, _| keep_up(ring, 4).unwrap());
    }

    #[test]
    fn device_asking_only_on_a_drained_ring_misses_no_element() {
        no_element_is_left(|ring, _| {
            loop {
                let taken = ring.available().unwrap();
                if !request_interrupt_after(ring, taken).unwrap() {
                    return taken;
                }
            }
        });
    }

    /// Lets two driver threads add elements, and calls `serve` for each notification. `serve` takes and returns the index of the next
    /// element to serve.
    fn no_element_is_left(serve: fn(&ModelRing, Wrapping<u16>) -> Wrapping<u16>) {
        use loom::sync::{Arc, Mutex};
        const EACH: u16 = 2;
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let ring = Arc::new(ModelRing::default());
            // The driver threads add elements under one lock, and the device serves elements under another lock. The device serves elements
            // only after a notification.
            let (adding, served) = (Arc::new(Mutex::new(())), Arc::new(Mutex::new(Wrapping(0u16))));
            let driver = {
                let (ring, served) = (ring.clone(), served.clone());
                move || {
                    for _ in 0..EACH {
                        let added = adding.lock().unwrap();
                        let reported = ring.add();
                        drop(added);
                        if reported {
                            let mut served = served.lock().unwrap();
                            *served = serve(&ring, *served);
                        }
                    }
                }
            };
            let other = loom::thread::spawn(driver.clone());
            driver();
            other.join().unwrap();
            assert_eq!(*served.lock().unwrap(), Wrapping(2 * EACH), "an element was neither seen nor notified");
        });
    }
}
