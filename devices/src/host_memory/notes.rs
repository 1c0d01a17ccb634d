// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Notes about lost memory, from threads and signal handlers to the thread that acts on them.

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

/// Room for one note. A second one is dropped: the first stops the VM.
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

/// Notes of threads that go on, and of those that cannot.
static GOING_ON: Place = Place::new();
static STUCK: Place = Place::new();

/// Lost guest memory, as a thread or a signal handler found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// One line for the user.
    pub reason: String,
    /// The thread that found it waits for ever, with whatever locks it holds.
    pub is_stuck: bool,
}

/// Takes the notes that were left since the last call, one of each kind at most. Only one thread may call it.
pub fn take_notes() -> impl Iterator<Item = Note> {
    let note = |place: &Place, is_stuck: bool| {
        let (address, cause) = place.take()?;
        // The VM may have ended meanwhile: that thread has ended too then.
        if !is_stuck {
            regions::find(address)?;
        }
        let loss = Loss { address: Some(address), gpa: None, cause };
        Some(Note { reason: loss.explain(), is_stuck })
    };
    [note(&GOING_ON, false), note(&STUCK, true)].into_iter().flatten()
}

/// Leaves a note. A signal handler may call it.
pub(super) fn leave(address: usize, cause: Cause, is_stuck: bool) {
    if is_stuck { &STUCK } else { &GOING_ON }.leave(address, cause);
    wake::wake();
}

/// A system call of a device on these ranges of guest memory has failed with `errno`. If that means lost memory, the VM is stopped: the
/// thread that takes notes learns of it.
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
    // If the page has come back meanwhile, the device's own answer to the guest is true: the request failed, and nothing is lost.
    if let Some(page) = pages.into_iter().find(lost) {
        error!("{}", Loss { address: Some(page), gpa: None, cause }.explain());
        leave(page, cause, false);
    }
}
