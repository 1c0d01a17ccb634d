// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupts of a passed-through function. Sets VFIO's events as the guest's MSI and MSI-X registers require. INTx is enabled whenever MSI
//! and MSI-X are both disabled.
//!
//! Vectors are scarce on the host, which has about 200 vectors per CPU for all devices. A function may have 2048 vectors, but a driver
//! usually uses only one vector for each vCPU. So Carom enables MSI-X vectors in VFIO only up to the highest vector that the guest has
//! unmasked. The number of enabled vectors is rounded up to a power of two. When the guest unmasks a higher vector, Carom enables more
//! vectors.

use std::io;
use std::sync::Arc;

use log::error;

use super::config_view::ConfigView;
use super::examine::{MsiCapability, MsixCapability};
use super::host_function::{HostFunction, IrqKind};
use super::intx::Intx;
use crate::first_error::first_error;
use crate::pci::{CONTROL_ENABLE, MsixTable, regs};
use crate::platform::{MsiMessage, MsiVectors};
use crate::throttle::Throttle;

/// MSI as the guest has configured it.
struct Msi {
    capability: MsiCapability,
    vectors: Arc<dyn MsiVectors>,
    routed: Vec<Option<MsiMessage>>,
}

impl Msi {
    /// Routes a vector to `message`, or removes its route if `message` is `None`. Does nothing if the vector has this route already.
    fn route(&mut self, vector: usize, message: Option<MsiMessage>) -> io::Result<()> {
        if self.routed[vector] != message {
            let number = u16::try_from(vector).map_err(io::Error::other)?;
            self.vectors.route(number, message)?;
            self.routed[vector] = message;
        }
        Ok(())
    }
}

/// Interrupts that VFIO delivers now. A device uses one kind at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ActiveIrqs {
    kind: IrqKind,
    vectors: u16,
}

const INTX: ActiveIrqs = ActiveIrqs { kind: IrqKind::Intx, vectors: 1 };

/// The interrupts of one function.
pub(crate) struct Interrupts {
    name: String,
    msi: Option<Msi>,
    msix: Option<MsixCapability>,
    intx: Option<Intx>,
    active: Option<ActiveIrqs>,
    throttle: Throttle,
}

impl Interrupts {
    pub(crate) fn new(
        name: &str,
        msi: Option<(MsiCapability, Arc<dyn MsiVectors>)>,
        msix: Option<MsixCapability>,
        intx: Option<Intx>,
    ) -> Self {
        let msi = msi.map(|(capability, vectors)| Msi {
            capability,
            vectors,
            routed: vec![None; usize::from(capability.vectors)],
        });
        Self { name: name.to_string(), msi, msix, intx, active: None, throttle: Throttle::default() }
    }

    /// Updates the interrupts after the guest wrote `len` bytes at `offset` of configuration space.
    pub(crate) fn written(
        &mut self,
        host: &dyn HostFunction,
        view: &ConfigView,
        table: Option<&mut MsixTable>,
        offset: u16,
        len: usize,
    ) {
        let touches = |start: u16, size: u16| {
            usize::from(offset) < usize::from(start) + usize::from(size)
                && usize::from(start) < usize::from(offset) + len
        };
        if let Some(at) = self.msi.as_ref().map(|msi| msi.capability).filter(|msi| touches(msi.offset, msi.len())) {
            let outcome = self.follow_msi(host, view, at);
            self.report("MSI", outcome);
        }
        let msix = self.msix.as_ref().map(|msix| msix.offset).filter(|at| touches(*at, 4));
        if let (Some(at), Some(table)) = (msix, table) {
            let outcome = self.follow_msix(host, view.word(at + 2), table);
            self.report("MSI-X", outcome);
        }
    }

    /// Updates the interrupts after the guest wrote to the MSI-X table.
    pub(crate) fn table_written(&mut self, host: &dyn HostFunction, table: &mut MsixTable) {
        let Some(active) = self.active.filter(|active| active.kind == IrqKind::Msix) else { return };
        let outcome = self.have_vectors(host, active, table);
        self.report("MSI-X", outcome);
    }

    /// Makes VFIO deliver all MSI-X vectors that the guest has unmasked, if VFIO delivers too few vectors.
    fn have_vectors(&mut self, host: &dyn HostFunction, active: ActiveIrqs, table: &mut MsixTable) -> io::Result<()> {
        let vectors = enough(table);
        if vectors <= active.vectors {
            return Ok(());
        }
        let all = table.vectors().clone();
        let outcome = self.switch(host, Some(ActiveIrqs { vectors, ..active }), Some(&*all));
        if outcome.is_err() {
            // The host has too few vectors. Enable the old vectors again.
            self.switch(host, Some(active), Some(&*all))?;
        }
        // `switch` disables all vectors before it enables more. An interrupt that the device raises meanwhile is lost. So trigger each old
        // vector once. Drivers tolerate an extra interrupt.
        first_error((0..active.vectors).map(|vector| table.trigger(vector))).and(outcome)
    }

    fn follow_msi(&mut self, host: &dyn HostFunction, view: &ConfigView, at: MsiCapability) -> io::Result<()> {
        let control = view.word(at.offset + 2);
        let exponent = ((control & regs::MSI_MULTIPLE_ENABLE) >> 4).min(5);
        let count = (1 << exponent).min(at.vectors);
        let wanted = (control & regs::MSI_ENABLE != 0).then_some(ActiveIrqs { kind: IrqKind::Msi, vectors: count });
        if wanted.is_none() && self.active.is_some_and(|active| active.kind == IrqKind::Msi) {
            self.switch(host, None, None)?;
        }
        let high = if at.wide { view.dword(at.offset + 8) } else { 0 };
        let address = (u64::from(high) << 32) | u64::from(view.dword(at.offset + 4));
        let data = u32::from(view.word(at.data()));
        let masks = at.mask().map_or(0, |offset| view.dword(offset));
        let Some(msi) = &mut self.msi else { return Ok(()) };
        let mut outcome = Ok(());
        for vector in 0..at.vectors {
            let live = wanted.is_some() && vector < count && masks & (1 << vector) == 0;
            // The device replaces the low bits of the message data with the number of the vector.
            let data = (data & !u32::from(count - 1)) | u32::from(vector);
            let message = live.then_some(MsiMessage { address, data });
            outcome = outcome.and(msi.route(vector.into(), message));
        }
        outcome?;
        let vectors = msi.vectors.clone();
        if wanted.is_some() { self.switch(host, wanted, Some(&*vectors)) } else { self.start(host) }
    }

    fn follow_msix(&mut self, host: &dyn HostFunction, control: u16, table: &mut MsixTable) -> io::Result<()> {
        let is_on = control & CONTROL_ENABLE != 0;
        let active = self.active.filter(|active| active.kind == IrqKind::Msix);
        if !is_on && active.is_some() {
            self.switch(host, None, None)?;
        }
        table.set_control(control).map_err(io::Error::other)?;
        match active {
            _ if !is_on => self.start(host),
            Some(active) => self.have_vectors(host, active, table),
            None => {
                let wanted = ActiveIrqs { kind: IrqKind::Msix, vectors: enough(table) };
                self.switch(host, Some(wanted), Some(&**table.vectors()))
            }
        }
    }

    /// Enables INTx if no other interrupts are enabled: at power-on, and after the guest has disabled MSI and MSI-X.
    pub(crate) fn start(&mut self, host: &dyn HostFunction) -> io::Result<()> {
        match (&self.active, &self.intx) {
            (None, Some(_)) => self.switch(host, Some(INTX), None),
            _ => Ok(()),
        }
    }

    /// Drops INTx, so that it is never enabled again. INTx must be disabled already.
    pub(crate) fn give_intx_up(&mut self) {
        self.intx = None;
    }

    /// Makes VFIO deliver the wanted interrupts. If a masked vector interrupts, the interrupt stays pending in the vector's event.
    fn switch(
        &mut self,
        host: &dyn HostFunction,
        wanted: Option<ActiveIrqs>,
        vectors: Option<&dyn MsiVectors>,
    ) -> io::Result<()> {
        if wanted == self.active {
            return Ok(());
        }
        let off = match (self.active.take(), &mut self.intx) {
            (Some(INTX), Some(intx)) => intx.disable(host),
            (Some(active), _) => host.disable_irqs(active.kind),
            (None, _) => Ok(()),
        };
        // Enable the wanted interrupts even if the old interrupts cannot be disabled.
        self.report("interrupts", off);
        if let (Some(INTX), Some(intx)) = (wanted, &mut self.intx) {
            intx.enable(host)?;
            self.active = wanted;
        } else if let (Some(wanted), Some(vectors)) = (wanted, vectors) {
            let events: Option<Vec<_>> = (0..wanted.vectors).map(|vector| vectors.event(vector)).collect();
            let events = events.ok_or_else(|| {
                io::Error::other("an interrupt vector has no eventfd; this is an error in Carom: report it")
            })?;
            host.enable_irqs(wanted.kind, events)?;
            self.active = Some(wanted);
        }
        Ok(())
    }

    /// Disables all interrupts, as at power-on.
    pub(crate) fn reset(&mut self, host: &dyn HostFunction, table: Option<&mut MsixTable>) {
        let outcome = self.switch(host, None, None);
        self.report("interrupts", outcome);
        if let Some(table) = table {
            let outcome = table.reset().map_err(io::Error::other);
            self.report("MSI-X", outcome);
        }
        if let Some(msi) = &mut self.msi {
            let outcome = first_error((0..msi.routed.len()).map(|vector| msi.route(vector, None)));
            self.report("MSI", outcome);
        }
    }

    fn report(&self, what: &str, outcome: io::Result<()>) {
        if let Err(error) = outcome
            && self.throttle.pass()
        {
            error!("{}: cannot change the setup of {what} on the host: {error}", self.name);
        }
    }
}

/// Returns the number of MSI-X vectors to enable: all vectors up to the last unmasked vector. The number is rounded up to a power of two.
/// The result is at least 1, and at most the number of vectors of the table.
fn enough(table: &MsixTable) -> u16 {
    table.used().max(1).checked_next_power_of_two().unwrap_or(u16::MAX).min(table.count())
}
