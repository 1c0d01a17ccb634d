// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which files threads may reach (Landlock).
//!
//! A thread hands its limits on to those that it starts, and can have more of them, never less.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr,
    RulesetError,
};

use super::starter;

/// Whether the threads that open files are limited.
static LIMITED: AtomicBool = AtomicBool::new(false);

/// What is refused unless a rule allows it, as far as the host's kernel knows it: all that Linux 6.10 has.
pub fn known_accesses() -> BitFlags<AccessFs> {
    AccessFs::from_all(ABI::V5)
}

/// Rules that allow nothing yet.
///
/// # Errors
/// The host's kernel has no Landlock.
pub fn no_files() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(known_accesses())?
        .create()
        // The process gave up privileges when it started; a filter may refuse the call.
        .map(|rules| rules.no_new_privs(false))
}

/// Has the kernel hold this thread to `rules`, all threads that are started from now on, and those that these start.
///
/// # Errors
/// The kernel does not take them: a thread has 16 sets of rules at most. Nothing has changed for this thread then.
pub fn limit_files(rules: RulesetCreated) -> io::Result<()> {
    starter::limit_files(&rules)?;
    rules.restrict_self().map_err(io::Error::other)?;
    LIMITED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether threads are limited by [`limit_files`].
pub fn files_are_limited() -> bool {
    LIMITED.load(Ordering::Relaxed)
}

/// Has the kernel refuse this thread all files that it has not open already, if it can: for threads that need none, and are there before the
/// limits of others are known.
pub fn give_up_files() {
    if let Err(error) = no_files().and_then(RulesetCreated::restrict_self) {
        log::debug!("the kernel keeps no files from this thread: {error}");
    }
}
