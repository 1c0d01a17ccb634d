// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest memory that the host cannot supply, or has lost.
//!
//! A page of guest memory can be missing because its file was truncated, the file system is full, or no huge page is free. A page can
//! also have an uncorrectable memory error. In all these cases the guest's data is lost, and the VM must stop. A lost page is found in one
//! of these ways:
//!
//! - A thread of this process touches the page. The kernel sends SIGBUS to the handler in `sigbus` ([`watch`]).
//! - A system call on guest memory fails with EFAULT or EHWPOISON. The device then calls [`report_io`].
//! - KVM cannot map the page for the guest. The vCPU thread then creates a [`Loss`] from KVM's report.
//!
//! [`Origin`] describes a region for error messages, with its zone and file. `regions` keeps an origin for each range of this process's
//! memory that is guest memory.

mod loss;
mod notes;
mod probe;
mod regions;
mod sigbus;
#[cfg(test)]
mod tests;
mod wake;

pub use self::loss::{Cause, Loss, missing_memory, truncated_memory};
pub use self::notes::{Note, report_io, take_notes};
pub use self::probe::populate_page;
pub use self::regions::{Origin, Registration, Supply, register};
pub use self::sigbus::watch;
