// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What every VM has: what it boots, its CPUs, RAM and console, and what it uses of the host. Devices are [`crate::kinds`]'.

mod console;
mod cpus;
mod memory;
mod payload;
mod pci_segment;
mod platform;

pub use console::{ConsoleConfig, ConsoleMode};
pub use cpus::{CpuTopology, CpusConfig};
pub use memory::MemoryConfig;
pub use payload::PayloadConfig;
pub use pci_segment::PciSegmentConfig;
pub use platform::{IommuPoll, PlatformConfig};
