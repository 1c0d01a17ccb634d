// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs real guests on Carom, and on QEMU for comparison, and checks their results.
//!
//! The guests need KVM and devices bound to `vfio-pci`. Both exist in the rig (`scripts/rig`) or on a suitable host. [`Site`]
//! says what is available. [`Guest`] describes one guest and runs it. [`Outcome`] is its result. [`workload`] contains jobs
//! that several programs give to guests.

mod apart;
pub mod api;
mod background;
pub mod devices;
mod document;
mod emulator_counts;
pub mod events;
mod guest;
pub mod harness;
pub mod host_memory;
mod initramfs;
pub mod kunit;
mod kvm_counters;
pub mod measure;
pub mod messages;
mod probe;
mod process;
pub mod rig;
mod site;
mod stuck;
mod tally;
pub mod vmm;
pub mod workload;

pub use background::Background;
pub use guest::{Guest, INIT_BEGIN, Outcome};
pub use probe::{PROBE, Probe};
pub use process::{Ended, Finished, Limits, run_limited};
pub use site::Site;
pub use tally::Tally;
pub use vmm::{Kernel, Vmm};
