// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits on the system calls of threads (seccomp), and on the files that threads may access (Landlock).
//!
//! A thread starts with a role ([`start`]). The role lists the system calls that the thread may make, and is a constant in the thread's
//! source file. After [`begin`], any other call ends the process with a message, fails, or is logged by the kernel, depending on the
//! [`Mode`].
//!
//! A thread inherits the filter of the thread that starts it. So one thread, the *starter thread*, starts all other threads and does
//! nothing else. A vCPU can ask the starter thread to start a device's thread. So the vCPU itself needs no right to start threads, and its
//! filter does not limit the device's thread. Without [`begin`], as in tests, nothing is filtered.

mod call;
mod call_name;
pub mod calls;
mod common;
mod files;
mod filter;
mod host_cpus;
mod program;
mod starter;
#[cfg(test)]
mod tests;
mod trap;

pub use self::call::{Argument, Call, ThreadRole};
pub use self::common::{COMMON, REFUSED};
pub use self::files::{files_are_limited, give_up_files, known_accesses, limit_files, no_files};
pub use self::host_cpus::{HostCpus, PinError};
pub use self::starter::{Mode, begin, check_host_cpus, confine, start, start_on, start_prepared};
