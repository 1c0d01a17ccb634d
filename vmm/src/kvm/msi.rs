// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Message-signalled interrupts: a KVM interrupt route and an irqfd for each vector.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use devices::event_fd;
use devices::platform::{MsiAllocator, MsiMessage, MsiVectors};
use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Maximum number of routes in KVM (`KVM_MAX_IRQ_ROUTES`).
const MAX_GSI: u32 = 4096;

/// Interface to KVM's interrupt routing.
trait RoutingHost: Send + Sync {
    /// Replaces the whole table of routes with the routes of the interrupt lines and of `messages`.
    fn set_routes(&self, messages: &[(u32, MsiMessage)]) -> io::Result<()>;
    /// Makes writes to `event` fire the interrupt that `gsi` is routed to.
    fn register(&self, event: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undoes [`register`](Self::register).
    fn unregister(&self, event: &EventFd, gsi: u32) -> io::Result<()>;
}

/// VM in KVM, and the routes of its interrupt lines.
struct KvmRouting {
    vm: Arc<VmFd>,
    line_routes: Vec<kvm_irq_routing_entry>,
}

impl RoutingHost for KvmRouting {
    fn set_routes(&self, messages: &[(u32, MsiMessage)]) -> io::Result<()> {
        let mut entries = self.line_routes.clone();
        entries.extend(messages.iter().map(|(gsi, message)| msi_route(*gsi, *message)));
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|e| io::Error::other(format!("cannot build KVM's table of interrupt routes: {e:?}")))?;
        Ok(self.vm.set_gsi_routing(&table)?)
    }
    fn register(&self, event: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.vm.register_irqfd(event, gsi)?)
    }
    fn unregister(&self, event: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.vm.unregister_irqfd(event, gsi)?)
    }
}

/// Table of a VM's interrupt routes.
struct Routes {
    host: Arc<dyn RoutingHost>,
    /// GSI of the first vector.
    first_gsi: u32,
    /// Messages of all allocated vectors, by GSI. `None` means that the vector has no route.
    messages: Mutex<BTreeMap<u32, Option<MsiMessage>>>,
}

/// Allocator of message-signalled interrupt vectors.
pub struct KvmMsi {
    routes: Arc<Routes>,
}

impl KvmMsi {
    /// Creates the allocator of `vm`, and sets `line_routes`, the routes of the interrupt lines. The GSIs of vectors start at `first_gsi`.
    ///
    /// # Errors
    /// KVM rejects the routes.
    pub fn new(vm: Arc<VmFd>, line_routes: Vec<kvm_irq_routing_entry>, first_gsi: u32) -> io::Result<Self> {
        Self::on(Arc::new(KvmRouting { vm, line_routes }), first_gsi)
    }

    fn on(host: Arc<dyn RoutingHost>, first_gsi: u32) -> io::Result<Self> {
        let routes = Routes { host, first_gsi, messages: Mutex::new(BTreeMap::new()) };
        routes.write(&BTreeMap::new())?;
        Ok(Self { routes: Arc::new(routes) })
    }
}

impl MsiAllocator for KvmMsi {
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>> {
        let events = (0..count).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<io::Result<Vec<_>>>()?;
        let mut messages = self.routes.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let gsis = self.routes.first_gsi..MAX_GSI;
        let free: Vec<u32> = gsis.filter(|gsi| !messages.contains_key(gsi)).take(count.into()).collect();
        if free.len() < usize::from(count) {
            return Err(io::Error::other(format!(
                "the device needs {count} of KVM's {MAX_GSI} interrupt routes, but only {} are free: use fewer devices or queues",
                free.len()
            )));
        }
        messages.extend(free.iter().map(|gsi| (*gsi, None)));
        drop(messages);
        let vectors = free
            .into_iter()
            .zip(events)
            .map(|(gsi, event)| Vector { gsi, event, is_registered: Mutex::new(false) })
            .collect();
        Ok(Arc::new(KvmVectors { routes: self.routes.clone(), vectors }))
    }
}

impl Routes {
    /// Passes the whole table to KVM, whose interface cannot change a single route.
    fn write(&self, messages: &BTreeMap<u32, Option<MsiMessage>>) -> io::Result<()> {
        let routed = messages.iter().filter_map(|(gsi, message)| message.map(|message| (*gsi, message)));
        self.host.set_routes(&routed.collect::<Vec<_>>())
    }

    /// Changes one route. On error, the table is unchanged.
    fn set(&self, gsi: u32, message: Option<MsiMessage>) -> io::Result<()> {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let before = messages.insert(gsi, message).flatten();
        let result = self.write(&messages);
        if result.is_err() {
            messages.insert(gsi, before);
        }
        result
    }
}

fn msi_route(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_MSI, ..Default::default() };
    let bytes = message.address.to_le_bytes();
    entry.u.msi.address_lo = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    entry.u.msi.address_hi = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
    entry.u.msi.data = message.data;
    entry
}

struct Vector {
    gsi: u32,
    event: EventFd,
    /// True if a write to the event fires the interrupt. The table of routes does not show this, because KVM may accept the route and then
    /// reject the event.
    is_registered: Mutex<bool>,
}

/// Vectors of one device.
struct KvmVectors {
    routes: Arc<Routes>,
    vectors: Vec<Vector>,
}

impl KvmVectors {
    fn vector(&self, vector: u16) -> io::Result<&Vector> {
        self.vectors
            .get(usize::from(vector))
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("the device has no vector {vector}")))
    }

    fn is_routed(&self, gsi: u32) -> bool {
        let messages = self.routes.messages.lock().unwrap_or_else(PoisonError::into_inner);
        messages.get(&gsi).copied().flatten().is_some()
    }
}

impl MsiVectors for KvmVectors {
    fn count(&self) -> u16 {
        u16::try_from(self.vectors.len()).expect("allocated with a 16-bit count")
    }

    fn event(&self, vector: u16) -> Option<&EventFd> {
        self.vectors.get(usize::from(vector)).map(|vector| &vector.event)
    }

    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()> {
        let Vector { gsi, event, is_registered } = self.vector(vector)?;
        let mut is_registered = is_registered.lock().unwrap_or_else(PoisonError::into_inner);
        if message.is_some() {
            // Set the route before the irqfd. An event may be pending since the vector was masked, and must fire with the new message.
            self.routes.set(*gsi, message)?;
            if !*is_registered {
                // If KVM does not remove the route again, the leftover route is harmless, because no event uses it.
                self.routes.host.register(event, *gsi).inspect_err(|_| drop(self.routes.set(*gsi, None)))?;
                *is_registered = true;
                // If the event was pending, KVM has fired the interrupt, but has not reset the event's counter. Without this reset, the
                // same count would fire the interrupt again when the vector is next masked and unmasked. The reset never blocks, even if a
                // process that shares the event has put it in blocking mode.
                event_fd::forget(event);
            }
        } else {
            if *is_registered {
                self.routes.host.unregister(event, *gsi)?;
                *is_registered = false;
            }
            if self.is_routed(*gsi) {
                self.routes.set(*gsi, None)?;
            }
        }
        Ok(())
    }

    fn trigger(&self, vector: u16) -> io::Result<()> {
        self.vector(vector)?.event.write(1)
    }
}

impl Drop for KvmVectors {
    fn drop(&mut self) {
        for index in 0..self.count() {
            if let Err(error) = self.route(index, None) {
                log::warn!("cannot free interrupt vector {index} of a device: {error}");
            }
        }
        let mut messages = self.routes.messages.lock().unwrap_or_else(PoisonError::into_inner);
        for vector in &self.vectors {
            messages.remove(&vector.gsi);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    const FIRST_GSI: u32 = 24;
    const MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_0000, data: 0x41 };

    /// State of the fake KVM: routes of vectors, and GSIs whose event is registered.
    #[derive(Default)]
    struct State {
        routed: BTreeMap<u32, u32>,
        registered: BTreeSet<u32>,
        /// Names of the calls that must fail, in the order of the calls.
        failing: Vec<&'static str>,
    }

    /// Fake KVM, whose calls fail if a test requests the failure.
    #[derive(Default)]
    struct FakeHost(Mutex<State>);

    impl FakeHost {
        fn call(&self, name: &str, change: impl FnOnce(&mut State)) -> io::Result<()> {
            let mut state = self.0.lock().unwrap();
            if state.failing.first().is_some_and(|next| *next == name) {
                state.failing.remove(0);
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
            change(&mut state);
            Ok(())
        }

        fn fail(&self, calls: &[&'static str]) {
            self.0.lock().unwrap().failing = calls.to_vec();
        }

        /// Returns the data of the routed messages, and true if the first vector's event is registered.
        fn has(&self) -> (Vec<u32>, bool) {
            let state = self.0.lock().unwrap();
            (state.routed.values().copied().collect(), state.registered.contains(&FIRST_GSI))
        }
    }

    impl RoutingHost for FakeHost {
        fn set_routes(&self, messages: &[(u32, MsiMessage)]) -> io::Result<()> {
            let routed = messages.iter().map(|(gsi, message)| (*gsi, message.data)).collect();
            self.call("route", |state| state.routed = routed)
        }
        fn register(&self, _: &EventFd, gsi: u32) -> io::Result<()> {
            self.call("register", |state| assert!(state.registered.insert(gsi), "registered twice"))
        }
        fn unregister(&self, _: &EventFd, gsi: u32) -> io::Result<()> {
            self.call("unregister", |state| assert!(state.registered.remove(&gsi), "is not registered"))
        }
    }

    fn vector() -> (Arc<FakeHost>, Arc<dyn MsiVectors>) {
        let host = Arc::new(FakeHost::default());
        let vectors = KvmMsi::on(host.clone(), FIRST_GSI).unwrap().allocate(1).unwrap();
        (host, vectors)
    }

    #[test]
    fn vector_is_routed_and_registered_until_it_is_unrouted() {
        let (host, vectors) = vector();
        vectors.route(0, Some(MESSAGE)).unwrap();
        assert_eq!(host.has(), (vec![0x41], true));
        vectors.route(0, Some(MsiMessage { data: 0x42, ..MESSAGE })).unwrap();
        assert_eq!(host.has(), (vec![0x42], true));
        vectors.route(0, None).unwrap();
        assert_eq!(host.has(), (vec![], false));
        vectors.route(0, Some(MESSAGE)).unwrap();
        drop(vectors);
        assert_eq!(host.has(), (vec![], false));
    }

    #[test]
    fn vector_whose_event_was_refused_is_registered_the_next_time() {
        let (host, vectors) = vector();
        host.fail(&["register"]);
        assert!(vectors.route(0, Some(MESSAGE)).is_err());
        assert_eq!(host.has(), (vec![], false), "the failed route was removed");
        vectors.route(0, Some(MESSAGE)).unwrap();
        assert_eq!(host.has(), (vec![0x41], true));
    }

    #[test]
    fn leftover_route_is_used_or_removed_by_the_next_call() {
        for then in [Some(MESSAGE), None] {
            let (host, vectors) = vector();
            // Removing the route fails too.
            host.fail(&["register", "route"]);
            assert!(vectors.route(0, Some(MESSAGE)).is_err());
            assert_eq!(host.has(), (vec![0x41], false));
            vectors.route(0, then).unwrap();
            assert_eq!(host.has(), if then.is_some() { (vec![0x41], true) } else { (vec![], false) });
        }
    }

    #[test]
    fn vector_with_a_leftover_route_is_registered_again() {
        let (host, vectors) = vector();
        vectors.route(0, Some(MESSAGE)).unwrap();
        host.fail(&["route"]);
        assert!(vectors.route(0, None).is_err());
        assert_eq!(host.has(), (vec![0x41], false));
        vectors.route(0, Some(MESSAGE)).unwrap();
        assert_eq!(host.has(), (vec![0x41], true));
    }

    #[test]
    fn pending_event_fires_once() {
        let (_, vectors) = vector();
        let event = vectors.event(0).unwrap();
        event.write(1).unwrap();
        vectors.route(0, Some(MESSAGE)).unwrap();
        vectors.route(0, None).unwrap();
        assert!(event.read().is_err(), "KVM took the pending count when the event was registered");
    }

    #[test]
    fn full_blocking_eventfd_does_not_block_a_trigger() {
        let (_, vectors) = vector();
        let event = vectors.event(0).unwrap();
        fcntl_setfl(event_fd::borrow(event), OFlags::empty()).unwrap();
        event.write(u64::MAX - 1).unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            vectors.route(0, Some(MESSAGE)).unwrap();
            sender.send(vectors.trigger(0).is_ok()).unwrap();
        });
        assert!(receiver.recv_timeout(Duration::from_secs(60)).unwrap());
    }

    #[test]
    fn event_that_cannot_be_unregistered_keeps_its_route() {
        let (host, vectors) = vector();
        vectors.route(0, Some(MESSAGE)).unwrap();
        host.fail(&["unregister"]);
        assert!(vectors.route(0, None).is_err());
        assert_eq!(host.has(), (vec![0x41], true));
        vectors.route(0, None).unwrap();
        assert_eq!(host.has(), (vec![], false));
    }
}
