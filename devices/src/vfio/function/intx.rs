// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! INTx of a passed-through function: its interrupt line on one side, VFIO's events on the other.
//!
//! The host's kernel does it all: the device interrupts, VFIO masks it and writes an event, KVM raises the guest's line. The guest's
//! end of interrupt has KVM lower the line and write the other event, by which VFIO unmasks the device. If that still asks, it
//! interrupts anew. The guest masks INTx by its command register, which VFIO follows.

use std::io;
use std::sync::Arc;

use log::warn;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::host_function::{HostFunction, IrqKind};
use crate::platform::SharedLine;

/// INTx of one function.
pub(crate) struct Intx {
    line: Arc<dyn SharedLine>,
    /// The device asks.
    raise: EventFd,
    /// The guest has served it.
    served: EventFd,
    is_connected: bool,
}

impl Intx {
    /// INTx on this line, off.
    pub(crate) fn new(line: Arc<dyn SharedLine>) -> io::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
        Ok(Self { line, raise: event()?, served: event()?, is_connected: false })
    }

    /// Turns it on. On error it is off.
    pub(crate) fn enable(&mut self, host: &dyn HostFunction) -> io::Result<()> {
        self.line.connect(&self.raise, &self.served)?;
        self.is_connected = true;
        let enabled = host.enable_irqs(IrqKind::Intx, vec![&self.raise]);
        let unmasked = enabled.and_then(|()| {
            host.unmask_intx_by(&self.served).inspect_err(|_| {
                // Without it the device would interrupt once and never again.
                if let Err(error) = host.disable_irqs(IrqKind::Intx) {
                    warn!("turning INTx off: {error}");
                }
            })
        });
        unmasked.inspect_err(|_| self.disconnect())
    }

    /// Turns it off. The guest's line is lowered, whatever fails.
    pub(crate) fn disable(&mut self, host: &dyn HostFunction) -> io::Result<()> {
        let outcome = host.disable_irqs(IrqKind::Intx);
        self.disconnect();
        outcome
    }

    fn disconnect(&mut self) {
        if std::mem::take(&mut self.is_connected)
            && let Err(error) = self.line.disconnect(&self.raise)
        {
            warn!("interrupt line {}: disconnecting a device: {error}", self.line.number());
        }
    }
}

impl Drop for Intx {
    fn drop(&mut self) {
        self.disconnect();
    }
}
