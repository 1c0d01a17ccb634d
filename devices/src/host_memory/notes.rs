// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Notes about lost memory. Threads and signal handlers leave notes for the thread that stops the VM.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use log::error;

use super::loss::{Cause, Loss};
use super::probe::populate_page;
use super::{regions, wake};
use crate::platform::HostRange;

const EMPTY: u8 = 0;
const WRITING: u8 = 1;
const MISSING: u8 = 2;
const POISONED: u8 = 3;

/// Room for one note. A further note is dropped, because the first note already stops the VM.
struct Place {
    state: AtomicU8,
    address: AtomicUsize,
}

impl Place {
    const fn new() -> Self {
        Self { state: AtomicU8::new(EMPTY), address: AtomicUsize::new(0) }
    }

    fn leave(&self, address: usize, cause: Cause) {
        if self.state.compare_exchange(EMPTY, WRITING, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            self.address.store(address, Ordering::Relaxed);
            let state = if cause == Cause::Missing { MISSING } else { POISONED };
            self.state.store(state, Ordering::Release);
        }
    }

    fn take(&self) -> Option<(usize, Cause)> {
        let cause = match self.state.load(Ordering::Acquire) {
            MISSING => Cause::Missing,
            POISONED => Cause::Poisoned,
            _ => return None,
        };
        let address = self.address.load(Ordering::Relaxed);
        self.state.store(EMPTY, Ordering::Release);
        Some((address, cause))
    }
}

/// Note of a thread that continues.
static GOING_ON: Place = Place::new();
/// Note of a thread that cannot continue.
static STUCK: Place = Place::new();

/// Note about lost guest memory that a thread or a signal handler has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// One-line message for the user.
    pub reason: String,
    /// True if the thread that found the loss waits for ever, and holds its locks for ever.
    pub is_stuck: bool,
}

/// Takes the notes that were left since the last call. Returns at most one note of a thread that continues, and at most one note of a stuck
/// thread. Only one thread may call this function.
pub fn take_notes() -> impl Iterator<Item = Note> {
    let note = |place: &Place, is_stuck: bool| {
        let (address, cause) = place.take()?;
        // The thread that left this note continued, and may have ended together with its VM. If the region no longer exists, the note is
        // dropped.
        if !is_stuck {
            regions::find(address)?;
        }
        let loss = Loss { address: Some(address), gpa: None, cause };
        Some(Note { reason: loss.explain(), is_stuck })
    };
    [note(&GOING_ON, false), note(&STUCK, true)].into_iter().flatten()
}

/// Leaves a note. A signal handler may call this function.
pub(super) fn leave(address: usize, cause: Cause, is_stuck: bool) {
    if is_stuck { &STUCK } else { &GOING_ON }.leave(address, cause);
    wake::wake();
}

/// Reports that a device's system call on these ranges of guest memory failed with `errno`. If guest memory is lost, leaves a note. The
/// thread that takes the note stops the VM.
pub fn report_io(errno: i32, ranges: impl Iterator<Item = HostRange>, kernel_writes: bool) {
    let cause = match errno {
        libc::EFAULT => Cause::Missing,
        libc::EHWPOISON => Cause::Poisoned,
        _ => return,
    };
    let pages = ranges.flat_map(|range| {
        let start = range.address & !4095;
        (start..range.address.saturating_add(range.len)).step_by(4096)
    });
    let lost = |page: &usize| populate_page(*page, kernel_writes).is_err() && regions::find(*page).is_some();
    // If the page is available again, nothing is lost. The device reports the failure of the request to the guest.
    if let Some(page) = pages.into_iter().find(lost) {
        error!("{}", Loss { address: Some(page), gpa: None, cause }.explain());
        leave(page, cause, false);
    }
}
