// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Message-signalled interrupts: one KVM interrupt route and one irqfd for each vector.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use devices::platform::{MsiAllocator, MsiMessage, MsiVectors};
use kvm_bindings::{KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry};
use kvm_ioctls::VmFd;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::arch::irqchip::line_routes;
use crate::arch::layout::FIRST_MSI_GSI;

/// Most routes that KVM takes (`KVM_MAX_IRQ_ROUTES`).
const MAX_GSI: u32 = 4096;

/// The VM's table of interrupt routes.
struct Routes {
    vm: Arc<VmFd>,
    /// All vectors handed out, with their message while they are routed.
    messages: Mutex<BTreeMap<u32, Option<MsiMessage>>>,
}

/// Hands out message-signalled interrupt vectors.
pub struct KvmMsi {
    routes: Arc<Routes>,
}

impl KvmMsi {
    /// Vectors of `vm`; sets the routes of the interrupt lines at once.
    pub fn new(vm: Arc<VmFd>) -> io::Result<Self> {
        let routes = Routes { vm, messages: Mutex::new(BTreeMap::new()) };
        routes.write(&BTreeMap::new())?;
        Ok(Self { routes: Arc::new(routes) })
    }
}

impl MsiAllocator for KvmMsi {
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>> {
        let events = (0..count).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<io::Result<Vec<_>>>()?;
        let mut messages = self.routes.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let free: Vec<u32> =
            (FIRST_MSI_GSI..MAX_GSI).filter(|gsi| !messages.contains_key(gsi)).take(count.into()).collect();
        if free.len() < usize::from(count) {
            return Err(io::Error::other(format!("no {count} interrupt routes are left of {MAX_GSI}")));
        }
        messages.extend(free.iter().map(|gsi| (*gsi, None)));
        drop(messages);
        let vectors = free.into_iter().zip(events).map(|(gsi, event)| Vector { gsi, event }).collect();
        Ok(Arc::new(KvmVectors { routes: self.routes.clone(), vectors }))
    }
}

impl Routes {
    /// Gives KVM the whole table, as its interface wants it.
    fn write(&self, messages: &BTreeMap<u32, Option<MsiMessage>>) -> io::Result<()> {
        let mut entries = line_routes();
        let routed = messages.iter().filter_map(|(gsi, message)| message.map(|message| (*gsi, message)));
        entries.extend(routed.map(|(gsi, message)| msi_route(gsi, message)));
        let table = KvmIrqRouting::from_entries(&entries).map_err(|e| io::Error::other(format!("{e:?}")))?;
        Ok(self.vm.set_gsi_routing(&table)?)
    }

    /// Changes one route; on failure the table is as before.
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
}

/// The vectors of one device.
struct KvmVectors {
    routes: Arc<Routes>,
    vectors: Vec<Vector>,
}

impl KvmVectors {
    fn vector(&self, vector: u16) -> io::Result<&Vector> {
        self.vectors
            .get(usize::from(vector))
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("no interrupt vector {vector}")))
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
        let Vector { gsi, event } = self.vector(vector)?;
        let was_routed = self.is_routed(*gsi);
        if message.is_some() {
            // The route first, then the irqfd: an event that is pending from masked times fires to the right place.
            self.routes.set(*gsi, message)?;
            if !was_routed {
                self.routes.vm.register_irqfd(event, *gsi)?;
            }
        } else if was_routed {
            self.routes.vm.unregister_irqfd(event, *gsi)?;
            self.routes.set(*gsi, None)?;
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
                log::warn!("giving interrupt vector {index} back: {error}");
            }
        }
        let mut messages = self.routes.messages.lock().unwrap_or_else(PoisonError::into_inner);
        for vector in &self.vectors {
            messages.remove(&vector.gsi);
        }
    }
}
