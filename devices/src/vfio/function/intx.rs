// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! INTx of a passed-through function. Connects VFIO's events to an interrupt line of the guest.
//!
//! The host's kernel handles each interrupt without this process:
//! 1. The device asserts INTx. VFIO masks INTx and writes the event `raise`. KVM then raises the guest's line.
//! 2. When the guest signals the end of the interrupt, KVM lowers the line and writes the event `served`. VFIO then unmasks INTx.
//! 3. If the device still asserts INTx, the device interrupts again.
//!
//! If the guest masks INTx through the command register, VFIO masks INTx on the host.

use std::io;
use std::sync::Arc;

use log::warn;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::host_function::{HostFunction, IrqKind};
use crate::platform::SharedLine;

/// INTx of one function.
pub(crate) struct Intx {
    line: Arc<dyn SharedLine>,
    /// Event that VFIO writes when the device asserts INTx.
    raise: EventFd,
    /// Event that KVM writes when the guest has served the interrupt.
    served: EventFd,
    is_connected: bool,
}

impl Intx {
    /// Creates a disabled INTx on this line.
    pub(crate) fn new(line: Arc<dyn SharedLine>) -> io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        Ok(Self { line, raise: event()?, served: event()?, is_connected: false })
    }

    /// Enables INTx. On error, INTx is disabled.
    pub(crate) fn enable(&mut self, host: &dyn HostFunction) -> io::Result<()> {
        self.line.connect(&self.raise, &self.served)?;
        self.is_connected = true;
        let enabled = host.enable_irqs(IrqKind::Intx, vec![&self.raise]);
        let unmasked = enabled.and_then(|()| {
            host.unmask_intx_by(&self.served).inspect_err(|_| {
                // Without an event that unmasks INTx, the device would interrupt only once. So disable INTx completely.
                if let Err(error) = host.disable_irqs(IrqKind::Intx) {
                    warn!(
                        "the host cannot disable INTx of the device on interrupt line {} of the guest: {error}",
                        self.line.number()
                    );
                }
            })
        });
        unmasked.inspect_err(|_| self.disconnect())
    }

    /// Disables INTx. The device is disconnected from the guest's line even if the host cannot disable INTx.
    pub(crate) fn disable(&mut self, host: &dyn HostFunction) -> io::Result<()> {
        let outcome = host.disable_irqs(IrqKind::Intx);
        self.disconnect();
        outcome
    }

    fn disconnect(&mut self) {
        if std::mem::take(&mut self.is_connected)
            && let Err(error) = self.line.disconnect(&self.raise)
        {
            warn!("cannot disconnect a host device from interrupt line {} of the guest: {error}", self.line.number());
        }
    }
}

impl Drop for Intx {
    fn drop(&mut self) {
        self.disconnect();
    }
}
