// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host function exposed as a function of the guest.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use log::{error, info, warn};

use super::bars::HostBar;
use super::config_view::ConfigView;
use super::examine::{MsixCapability, examine};
use super::host_function::HostFunction;
use super::host_watch::HostWatch;
use super::interrupts::Interrupts;
use super::intx::Intx;
use super::sysfs::HostFunctionPath;
use super::vfio_function::VfioFunction;
use crate::crash::{CONFIG_SPACE, Claim, READ, RingKind, WRITE};
use crate::first_error::first_error;
use crate::pci::{Bar, MsixTable, PciDevice, regs};
use crate::platform::{HostListener, HostNotice, MemorySlots, MsiAllocator, MsiVectors, SharedLine};
use crate::sync::lock;
use crate::throttle::Throttle;
use crate::vfio::error::VfioPciError;
use crate::vfio::space::Attachable;
use crate::vfio::space::DmaSpace;

/// Maximum time that a reset waits for the host. The host may be resetting the device, or recovering the device's PCI Express link from an
/// error.
const HELD_FOR: Duration = Duration::from_secs(3);
/// Pause between two attempts to reset the device.
const HELD_PAUSE: Duration = Duration::from_millis(50);

/// Listener that forwards every notice, and records if the host has asked this process to close the device.
struct RequestWatcher {
    requested: Arc<AtomicBool>,
    listener: Arc<dyn HostListener>,
}

impl HostListener for RequestWatcher {
    fn notify(&self, id: &str, host: &str, notice: HostNotice) {
        if notice == HostNotice::Requested {
            self.requested.store(true, Ordering::Relaxed);
        }
        self.listener.notify(id, host, notice);
    }
}

struct FunctionState {
    view: ConfigView,
    /// The view at power-on, with the addresses that the VMM assigned to the BARs.
    initial: ConfigView,
    interrupts: Interrupts,
}

impl FunctionState {
    /// Drops INTx, and hides the interrupt pin from the guest.
    fn give_intx_up(&mut self) {
        self.interrupts.give_intx_up();
        for view in [&mut self.view, &mut self.initial] {
            view.fix(regs::INTERRUPT_PIN, &[0]);
        }
    }
}

/// Host PCI function, passed through to the guest by VFIO.
pub struct VfioPciDevice {
    id: String,
    name: String,
    state: Mutex<FunctionState>,
    /// A thread that locks both `state` and `table` locks `state` first.
    table: Option<Mutex<MsixTable>>,
    msix: Option<MsixCapability>,
    slots: Arc<dyn MemorySlots>,
    /// Ring that records recent accesses for crash reports. `None` if no ring was free.
    accesses: Option<Claim>,
    throttle: Throttle,
    watch: Mutex<Option<HostWatch>>,
    /// True if the last reset failed because the host held the device.
    held: AtomicBool,
    /// True if the host wants to unbind the device from its host driver, and has asked this process to close the device.
    requested: Arc<AtomicBool>,
    // The mappings of the BARs keep the device open, so they are dropped before `host`.
    bars: Vec<HostBar>,
    host: Box<dyn HostFunction>,
}

/// Target of an access to a BAR. The field of a variant is the offset from the start of the MSI-X table or of the pending bits.
enum BarTarget {
    Table(u64),
    Pending(u64),
    Device,
}

impl VfioPciDevice {
    /// Opens the function at sysfs path `path`, attaches it to address space `space`, and resets it. `id` is the function's name in logs
    /// and the API. The function's INTx raises `line`, which is `None` if the VM has no interrupt lines for host devices.
    pub fn open(
        id: &str,
        path: &Path,
        space: &DmaSpace,
        msi: Arc<dyn MsiAllocator>,
        line: Option<Arc<dyn SharedLine>>,
        slots: Arc<dyn MemorySlots>,
    ) -> Result<Self, VfioPciError> {
        let function = HostFunctionPath::inspect(path)?;
        let host = VfioFunction::open(&function, space)?;
        Self::assemble(id, function.name(), Box::new(host), &*msi, line, slots)
    }

    pub(crate) fn assemble(
        id: &str,
        name: &str,
        host: Box<dyn HostFunction>,
        msi: &dyn MsiAllocator,
        line: Option<Arc<dyn SharedLine>>,
        slots: Arc<dyn MemorySlots>,
    ) -> Result<Self, VfioPciError> {
        let layout = examine(name, &*host, line.as_ref().map(|line| line.number()))?;
        let only_intx = layout.intx && layout.msi.is_none() && layout.msix.is_none();
        let without_intx = |source| VfioPciError::OnlyIntx { name: name.to_string(), source };
        if only_intx && line.is_none() {
            return Err(without_intx(io::Error::other("KVM has no irqfd with resampling (KVM_CAP_IRQFD_RESAMPLE)")));
        }
        let line = line.filter(|_| layout.intx);
        let allocate = |count: u16| -> Result<Arc<dyn MsiVectors>, VfioPciError> {
            msi.allocate(count).map_err(|source| VfioPciError::Host {
                what: format!("cannot allocate {count} interrupt vectors for {name}"),
                source,
            })
        };
        let msi = layout.msi.map(|msi| Ok((msi, allocate(msi.vectors)?))).transpose()?;
        let table = layout.msix.as_ref().map(|msix| allocate(msix.vectors)).transpose()?;
        let bars: Vec<_> =
            layout.bars.iter().map(|bar| HostBar::new(name, &*host, *bar, layout.msix.as_ref())).collect();
        let intx = line.map(Intx::new).transpose().map_err(|source| VfioPciError::Host {
            what: format!("cannot create the eventfds for INTx of {name}"),
            source,
        })?;
        let interrupts = Interrupts::new(name, msi, layout.msix.clone(), intx);
        let state = FunctionState { initial: layout.view.clone(), view: layout.view, interrupts };
        let device = Self {
            id: id.to_string(),
            name: name.to_string(),
            state: Mutex::new(state),
            table: table.map(|vectors| Mutex::new(MsixTable::new(vectors))),
            msix: layout.msix,
            slots,
            accesses: Claim::new(id, RingKind::Accesses),
            throttle: Throttle::default(),
            watch: Mutex::default(),
            held: AtomicBool::new(false),
            requested: Arc::default(),
            bars,
            host,
        };
        device.restart().map_err(|source| VfioPciError::Host { what: format!("cannot reset {name}"), source })?;
        match device.start_intx() {
            Err(source) if only_intx => return Err(without_intx(source)),
            Err(source) => {
                warn!(
                    "{name}: the host cannot enable INTx of this device, so the guest's driver has to use MSI or MSI-X: {source}"
                );
                lock(&device.state).give_intx_up();
            }
            Ok(()) => {}
        }
        Ok(device)
    }

    /// Returns the address of the function in the host, such as `0000:00:05.0`.
    pub fn host_name(&self) -> &str {
        &self.name
    }

    /// Forwards the host's notices about the function to `listener` from now on. For some functions, the host sends no notices.
    ///
    /// # Errors
    /// The host cannot create an event or a thread.
    pub fn watch(&self, listener: Arc<dyn HostListener>) -> io::Result<()> {
        let watcher = RequestWatcher { requested: self.requested.clone(), listener };
        let watch = HostWatch::start(&self.id, &self.name, &*self.host, Arc::new(watcher))?;
        *lock(&self.watch) = watch;
        Ok(())
    }

    /// Stops forwarding notices. Returns after the last notice is delivered.
    pub fn unwatch(&self) {
        let watch = lock(&self.watch).take();
        drop(watch);
    }

    /// True if the last reset failed because the host held the function.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns a handle that attaches the function to another address space.
    pub(crate) fn attachable(&self) -> Weak<dyn Attachable> {
        self.host.attachable()
    }

    /// Performs an access and records it. If the access never ends, a crash report still shows the access.
    fn access(&self, code: u8, region: u16, offset: u64, len: usize, access: impl FnOnce()) {
        let Some(ring) = self.accesses.as_ref().map(Claim::ring) else { return access() };
        let (number, slot) = ring.begin(region);
        slot.set_sizes(len, 0);
        ring.note(number, code, offset);
        access();
        ring.end(number, 0);
    }

    fn bar(&self, index: u8) -> Option<&HostBar> {
        self.bars.iter().find(|bar| bar.bar().index == index)
    }

    fn lock_table(&self) -> Option<MutexGuard<'_, MsixTable>> {
        self.table.as_ref().map(lock)
    }

    fn write_table(&self, offset: u64, data: &[u8]) {
        let mut state = lock(&self.state);
        let Some(mut table) = self.lock_table() else { return };
        if let Err(error) = table.write_table(offset, data)
            && self.throttle.pass()
        {
            error!("{}: {error}", self.name);
        }
        state.interrupts.table_written(&*self.host, &mut table);
    }

    /// Returns the target of the byte at `offset` of BAR `bar`, and the number of bytes from this offset on that have the same target.
    fn target(&self, bar: u8, offset: u64) -> (BarTarget, u64) {
        let mut left = u64::MAX;
        if let Some(msix) = &self.msix {
            type Make = fn(u64) -> BarTarget;
            for (place, make) in [(&msix.table, BarTarget::Table as Make), (&msix.pending, BarTarget::Pending as Make)]
            {
                if place.bar != bar {
                } else if place.range.contains(&offset) {
                    return (make(offset - place.range.start), place.range.end - offset);
                } else if offset < place.range.start {
                    left = left.min(place.range.start - offset);
                }
            }
        }
        (BarTarget::Device, left)
    }

    /// Splits an access wherever its target changes.
    fn each_target(
        &self,
        bar: u8,
        offset: u64,
        len: usize,
        mut access: impl FnMut(BarTarget, u64, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let (target, left) = self.target(bar, at);
            let end =
                usize::try_from(left).ok().and_then(|left| done.checked_add(left)).map_or(len, |end| end.min(len));
            access(target, at, done..end);
            done = end;
        }
    }

    /// Resets the function, and leaves its interrupts disabled. Fails with `WouldBlock` while the host holds the
    /// function.
    fn restart(&self) -> io::Result<()> {
        let mut state = lock(&self.state);
        let mut table = self.lock_table();
        // Stop DMA now, so that the device does no DMA even if it cannot be reset.
        self.quiesce(&state);
        state.interrupts.reset(&*self.host, table.as_deref_mut());
        let outcome = self.host.reset();
        self.quiesce(&state);
        state.view = state.initial.clone();
        match outcome? {
            true => info!("{}: reset", self.name),
            false => warn!(
                "{}: the host cannot reset this device: its DMA is off, but its registers keep their state",
                self.name
            ),
        }
        Ok(())
    }

    /// Enables INTx, as at power-on.
    fn start_intx(&self) -> io::Result<()> {
        lock(&self.state).interrupts.start(&*self.host)
    }

    /// Writes the command register as at power-on: decoding on, no bus mastering.
    fn quiesce(&self, state: &FunctionState) {
        self.host.write_config(regs::COMMAND, &state.initial.pinned(regs::COMMAND).to_le_bytes());
    }
}

/// True if a write to configuration space turns off the decoding of memory BARs.
fn ends_decoding(offset: u16, data: &[u8]) -> bool {
    let low = regs::COMMAND.checked_sub(offset).and_then(|at| data.get(usize::from(at)));
    low.is_some_and(|low| u16::from(*low) & regs::COMMAND_MEMORY == 0)
}

impl PciDevice for VfioPciDevice {
    fn id(&self) -> &str {
        &self.id
    }

    fn read_config(&self, offset: u16, data: &mut [u8]) {
        self.access(READ, CONFIG_SPACE, offset.into(), data.len(), || {
            lock(&self.state).view.read(&*self.host, offset, data);
        });
    }

    fn write_config(&self, offset: u16, data: &[u8]) {
        self.access(WRITE, CONFIG_SPACE, offset.into(), data.len(), || {
            let mut state = lock(&self.state);
            if ends_decoding(offset, data)
                && let Err(error) = first_error(self.bars.iter().map(HostBar::withhold))
                && self.throttle.pass()
            {
                warn!(
                    "{}: cannot block DMA of other devices to a BAR before its decoding is turned off: {error}",
                    self.name
                );
            }
            let FunctionState { view, interrupts, .. } = &mut *state;
            view.write(&*self.host, offset, data);
            let mut table = self.lock_table();
            interrupts.written(&*self.host, view, table.as_deref_mut(), offset, data.len());
        });
    }

    fn bars(&self) -> Vec<Bar> {
        self.bars.iter().map(HostBar::bar).collect()
    }

    fn assign_bar(&self, index: u8, address: u64) {
        let mut state = lock(&self.state);
        state.view.assign_bar(index, address);
        state.initial.assign_bar(index, address);
    }

    fn bar_address(&self, index: u8) -> Option<u64> {
        lock(&self.state).view.bar_address(index)
    }

    fn bar_moved(&self, index: u8, address: u64) -> io::Result<()> {
        self.bar(index).map_or(Ok(()), |bar| bar.show(&self.slots, address))
    }

    fn bar_released(&self, index: u8) -> io::Result<()> {
        self.bar(index).map_or(Ok(()), HostBar::hide)
    }

    fn read_bar(&self, index: u8, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        self.access(READ, index.into(), offset, data.len(), || {
            self.each_target(index, offset, data.len(), |target, at, part| {
                let data = &mut data[part];
                match (target, self.lock_table()) {
                    (BarTarget::Table(at), Some(table)) => table.read_table(at, data),
                    (BarTarget::Pending(at), Some(table)) => {
                        data.fill(0);
                        table.read_pending(at, data);
                    }
                    (_, table) => {
                        drop(table);
                        self.host.read_region(index, at, data);
                    }
                }
            });
        });
    }

    fn write_bar(&self, index: u8, offset: u64, data: &[u8]) {
        self.access(WRITE, index.into(), offset, data.len(), || {
            self.each_target(index, offset, data.len(), |target, at, part| {
                let data = &data[part];
                match target {
                    BarTarget::Table(at) => self.write_table(at, data),
                    BarTarget::Pending(_) => {}
                    BarTarget::Device => self.host.write_region(index, at, data),
                }
            });
        });
    }

    /// Resets the function. While the host holds the function, the function cannot be reset:
    ///
    /// - If the host is taking the function back, the host holds the function until this process closes the function. The reset then
    ///   returns success, because the guest loses the function anyway and the VM continues.
    /// - In any other case the host holds the function only for a moment, so the reset is tried again for at most `HELD_FOR`.
    fn reset(&self) -> io::Result<()> {
        let since = Instant::now();
        loop {
            let outcome = self.restart();
            let held = outcome.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
            self.held.store(held, Ordering::Relaxed);
            if held && self.requested.load(Ordering::Relaxed) {
                warn!(
                    "{}: cannot reset this device, because the host is taking it back: its DMA is off, but its registers keep their state",
                    self.name
                );
                return Ok(());
            }
            if outcome.is_ok()
                && let Err(error) = self.start_intx()
            {
                error!("{}: cannot enable INTx after the reset: {error}", self.name);
            }
            if !held || since.elapsed() >= HELD_FOR {
                return outcome;
            }
            thread::sleep(HELD_PAUSE);
        }
    }
}
