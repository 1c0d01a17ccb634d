// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fake host function for tests. A test can make the function broken or hostile.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::bar_mapping::BarMapping;
use super::host_function::{ConfigAccess, HostFunction, IrqKind, Region};
use crate::pci::regs;
use crate::platform::{HostRange, MemorySlots, MsiAllocator, MsiMessage, MsiVectors, SharedLine};
use crate::vfio::space::Attachable;
use crate::vfio::space::DmaSpace;

/// Recorded operation on the function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Config(u16, Vec<u8>),
    Region(u8, u64, Vec<u8>),
    Enable(IrqKind, usize),
    Disable(IrqKind),
    /// A call of `unmask_intx_by`.
    Unmask,
    Reset,
}

pub(crate) struct Inner {
    pub(crate) config: Mutex<Vec<u8>>,
    pub(crate) regions: Vec<Region>,
    pub(crate) irqs: (u32, u32),
    /// INTx and host notices that the function supports. Each entry has an event if the interrupt or notice is enabled.
    pub(crate) notices: Mutex<Vec<(IrqKind, Option<EventFd>)>>,
    /// Kinds of interrupts and notices whose events the host rejects.
    pub(crate) refused: Mutex<Vec<IrqKind>>,
    /// True if the function rejects the event that unmasks INTx.
    pub(crate) keeps_intx_masked: AtomicBool,
    /// True if each request to disable interrupts fails.
    pub(crate) is_gone: AtomicBool,
    /// Number of vectors that the host can still allocate.
    pub(crate) vectors_left: AtomicUsize,
    pub(crate) events: Mutex<Vec<Event>>,
    pub(crate) resets: bool,
    /// True if the host holds the function, so that a reset fails.
    pub(crate) held: AtomicBool,
    file: File,
}

/// Fake function. Clones refer to the same function.
#[derive(Clone)]
pub(crate) struct FakeFunction(pub(crate) Arc<Inner>);

impl FakeFunction {
    /// Creates an endpoint with `config` bytes of configuration space. `bars` lists the index, the low bits of the register, and the size
    /// of each BAR. All BARs are mappable. `irqs` is the number of MSI vectors, and the number of MSI-X vectors.
    pub(crate) fn new(config: usize, bars: &[(u8, u32, u64)], irqs: (u32, u32)) -> Self {
        let mut bytes = vec![0; config];
        bytes[..4].copy_from_slice(&0x0010_1b36u32.to_le_bytes());
        let mut regions = vec![Region::default(); 6];
        for (index, flags, size) in bars {
            let offset = usize::from(regs::BAR0) + 4 * usize::from(*index);
            bytes[offset..offset + 4].copy_from_slice(&(0xc000_0000 | flags).to_le_bytes());
            regions[usize::from(*index)] =
                Region { size: *size, readable: true, writable: true, mappable: vec![(0, *size)] };
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let inner = Inner {
            config: Mutex::new(bytes),
            regions,
            irqs,
            notices: Mutex::default(),
            refused: Mutex::default(),
            keeps_intx_masked: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            vectors_left: AtomicUsize::new(usize::MAX),
            events: Mutex::default(),
            resets: true,
            held: AtomicBool::new(false),
            file,
        };
        Self(Arc::new(inner))
    }

    /// Makes the function support interrupts or notices of this kind.
    pub(crate) fn offer(&self, kind: IrqKind) {
        self.0.notices.lock().unwrap().push((kind, None));
    }

    /// Writes the event of this notice, if the notice has an event. Returns true if the event was written.
    pub(crate) fn signal(&self, kind: IrqKind) -> bool {
        let notices = self.0.notices.lock().unwrap();
        let event = notices.iter().find(|(other, _)| *other == kind).and_then(|(_, event)| event.as_ref());
        event.map(|event| event.write(1).unwrap()).is_some()
    }

    pub(crate) fn set(&self, offset: u16, bytes: &[u8]) {
        self.0.config.lock().unwrap()[usize::from(offset)..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Sets the status bit that announces a capability list, and the offset of the first capability.
    pub(crate) fn list(&self, head: u8) {
        self.set(regs::STATUS, &regs::STATUS_CAPABILITIES.to_le_bytes());
        self.set(regs::CAPABILITIES, &[head]);
    }

    pub(crate) fn get(&self, offset: u16) -> u8 {
        self.0.config.lock().unwrap()[usize::from(offset)]
    }

    /// Returns the operations that were recorded since the last call of this function.
    pub(crate) fn events(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.events.lock().unwrap())
    }

    fn record(&self, event: Event) {
        self.0.events.lock().unwrap().push(event);
    }
}

impl Attachable for Inner {
    fn attach(&self, _: &DmaSpace) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl ConfigAccess for FakeFunction {
    fn config_size(&self) -> u64 {
        self.0.config.lock().unwrap().len() as u64
    }
    fn read_config(&self, offset: u16, data: &mut [u8]) {
        if let Some(bytes) = self.0.config.lock().unwrap().get(usize::from(offset)..usize::from(offset) + data.len()) {
            data.copy_from_slice(bytes);
        }
    }
    fn write_config(&self, offset: u16, data: &[u8]) {
        self.record(Event::Config(offset, data.to_vec()));
        if let Some(bytes) =
            self.0.config.lock().unwrap().get_mut(usize::from(offset)..usize::from(offset) + data.len())
        {
            bytes.copy_from_slice(data);
        }
    }
}

impl HostFunction for FakeFunction {
    fn region(&self, bar: u8) -> Region {
        self.0.regions[usize::from(bar)].clone()
    }
    fn read_region(&self, _: u8, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = at.to_le_bytes()[0];
        }
    }
    fn write_region(&self, bar: u8, offset: u64, data: &[u8]) {
        self.record(Event::Region(bar, offset, data.to_vec()));
    }
    fn map_region(&self, _: u8, offset: u64, len: usize, read_only: bool) -> io::Result<BarMapping> {
        BarMapping::new(&self.0.file, offset, len, read_only)
    }
    fn irq_count(&self, kind: IrqKind) -> u32 {
        match kind {
            IrqKind::Msi => self.0.irqs.0,
            IrqKind::Msix => self.0.irqs.1,
            kind => u32::from(self.0.notices.lock().unwrap().iter().any(|(other, _)| *other == kind)),
        }
    }
    fn enable_irqs(&self, kind: IrqKind, events: Vec<&EventFd>) -> io::Result<()> {
        if self.0.refused.lock().unwrap().contains(&kind) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        if events.len() > self.0.vectors_left.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        if let Some((_, event)) = self.0.notices.lock().unwrap().iter_mut().find(|(other, _)| *other == kind) {
            *event = Some(events[0].try_clone()?);
        }
        self.record(Event::Enable(kind, events.len()));
        Ok(())
    }
    fn unmask_intx_by(&self, _: &EventFd) -> io::Result<()> {
        if self.0.keeps_intx_masked.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.record(Event::Unmask);
        Ok(())
    }
    fn disable_irqs(&self, kind: IrqKind) -> io::Result<()> {
        self.record(Event::Disable(kind));
        if self.0.is_gone.load(Ordering::Relaxed) { Err(io::Error::from_raw_os_error(libc::ENODEV)) } else { Ok(()) }
    }
    fn reset(&self) -> io::Result<bool> {
        if self.0.held.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        self.record(Event::Reset);
        Ok(self.0.resets)
    }
    fn attachable(&self) -> Weak<dyn Attachable> {
        let inner: Arc<dyn Attachable> = self.0.clone();
        Arc::downgrade(&inner)
    }
}

/// Vectors that record their routes.
pub(crate) struct FakeVectors {
    events: Vec<EventFd>,
    pub(crate) routes: Mutex<Vec<Option<MsiMessage>>>,
}

impl MsiVectors for FakeVectors {
    fn count(&self) -> u16 {
        u16::try_from(self.events.len()).unwrap()
    }
    fn event(&self, vector: u16) -> Option<&EventFd> {
        self.events.get(usize::from(vector))
    }
    fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()> {
        self.routes.lock().unwrap()[usize::from(vector)] = message;
        Ok(())
    }
    fn trigger(&self, vector: u16) -> io::Result<()> {
        self.events[usize::from(vector)].write(1)
    }
}

/// Allocates [`FakeVectors`] and keeps them.
#[derive(Default)]
pub(crate) struct FakeAllocator(pub(crate) Mutex<Vec<Arc<FakeVectors>>>);

impl MsiAllocator for FakeAllocator {
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>> {
        let events = (0..count).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect();
        let vectors = Arc::new(FakeVectors { events, routes: Mutex::new(vec![None; count.into()]) });
        self.0.lock().unwrap().push(vectors.clone());
        Ok(vectors)
    }
}

/// Fake interrupt line of the guest, which counts the connected devices.
#[derive(Default)]
pub(crate) struct FakeLine(pub(crate) AtomicU32);

impl FakeLine {
    pub(crate) const NUMBER: u8 = 22;

    pub(crate) fn connected(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

impl SharedLine for FakeLine {
    fn number(&self) -> u8 {
        Self::NUMBER
    }
    fn connect(&self, _: &EventFd, _: &EventFd) -> io::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn disconnect(&self, _: &EventFd) -> io::Result<()> {
        self.0.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Memory slots that record which areas the guest sees.
#[derive(Default)]
pub(crate) struct FakeSlots {
    /// Guest-physical address and length of each slot, by slot number. `None` if the slot was removed.
    pub(crate) shown: Mutex<Vec<Option<(u64, usize)>>>,
    /// Maximum number of slots. The creation of any further slot fails.
    pub(crate) most: Mutex<Option<usize>>,
}

impl FakeSlots {
    pub(crate) fn visible(&self) -> Vec<(u64, usize)> {
        self.shown.lock().unwrap().iter().flatten().copied().collect()
    }
    /// Returns the number of slots that were ever created.
    pub(crate) fn made(&self) -> usize {
        self.shown.lock().unwrap().len()
    }
}

impl MemorySlots for FakeSlots {
    unsafe fn insert(&self, gpa: u64, host: HostRange, _: bool) -> io::Result<u32> {
        let mut shown = self.shown.lock().unwrap();
        if self.most.lock().unwrap().is_some_and(|most| shown.len() >= most) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        shown.push(Some((gpa, host.len)));
        Ok(u32::try_from(shown.len() - 1).unwrap())
    }
    fn remove(&self, slot: u32) -> io::Result<()> {
        self.shown.lock().unwrap()[usize::try_from(slot).unwrap()]
            .take()
            .map(|_| ())
            .ok_or(io::ErrorKind::NotFound.into())
    }
}
