// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Loads the guest's boot contents into RAM: kernel, initramfs, command line and tables.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use devices::ram::Ram;
use devices::sandbox;

use crate::arch::boot::Payload;
use crate::arch::generation_id::GenerationId;
use crate::arch::registers::Entry;
use crate::arch::{acpi, smbios};
use crate::error::VmError;
use crate::process::thread_roles::LOADER;

/// Data that Carom writes to RAM before the guest boots. The payload includes the command line.
pub(super) struct Contents {
    pub(super) payload: Payload,
    pub(super) tables: acpi::TableConfig,
    pub(super) smbios: smbios::Tables,
    /// VM Generation ID, if the guest has one. A reboot does not change the ID.
    pub(super) generation_id: Option<GenerationId>,
}

impl Contents {
    /// Writes the contents to RAM of `size` bytes.
    pub(super) fn load(&self, memory: &Ram, size: u64) -> Result<Entry, VmError> {
        let rsdp = acpi::write(memory, &self.tables).map_err(VmError::Tables)?;
        self.smbios.write(memory).map_err(VmError::Tables)?;
        self.generation_id.map_or(Ok(()), |id| id.write(memory)).map_err(VmError::Tables)?;
        Ok(self.payload.load(memory, size, rsdp)?)
    }
}

/// Thread that loads the contents while KVM creates the VM. KVM's work takes about as long as loading, because KVM waits for other CPUs.
/// Dropping this value waits for the thread, because a client may retry a failed boot with the same files and the same shared memory.
pub(super) struct Loading {
    outcome: Receiver<Result<Entry, VmError>>,
    thread: Option<JoinHandle<()>>,
}

impl Loading {
    pub(super) fn begin(contents: Arc<Contents>, memory: Arc<Ram>, size: u64) -> Result<Self, VmError> {
        let (sender, outcome) = sync_channel(1);
        let load = move || {
            let entry = contents.load(&memory, size);
            drop((contents, memory));
            // If another step of the boot failed, the receiver was dropped, and the entry point is not needed.
            let _ = sender.send(entry);
        };
        let thread = Some(sandbox::start(LOADER, "loader".into(), load).map_err(failed)?);
        Ok(Self { outcome, thread })
    }

    /// Waits until the contents are loaded. Afterwards the thread no longer uses the contents and RAM.
    pub(super) fn end(self) -> Result<Entry, VmError> {
        let result = self.outcome.recv();
        result.unwrap_or_else(|_| Err(failed(io::Error::other("the loader thread panicked"))))
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The result of `join` is not needed: `end` reports a panic of the thread, because the thread has sent no outcome.
            drop(thread.join());
        }
    }
}

fn failed(source: io::Error) -> VmError {
    VmError::Device { what: "load the kernel or firmware", source }
}
