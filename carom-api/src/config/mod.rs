// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration of the parts that every VM has: boot payload, CPUs, RAM, console, and use of host resources. The configuration of
//! devices is in [`crate::kinds`].

mod affinity;
mod console;
mod cpus;
mod landlock;
mod memory;
mod memory_zone;
mod numa;
mod payload;
mod pci_segment;
mod platform;
mod rate_limit;

pub use affinity::{CpuAffinity, VirtQueueAffinity};
pub(crate) use console::console_option;
pub use console::{ConsoleMode, ConsoleTarget, SerialConfig};
pub use cpus::{CpuTopology, CpusConfig};
pub use landlock::{FileAccess, LandlockConfig};
pub use memory::MemoryConfig;
pub use memory_zone::MemoryZoneConfig;
pub use numa::{NumaConfig, NumaDistance};
pub use payload::PayloadConfig;
pub use pci_segment::PciSegmentConfig;
pub use platform::{IommuPoll, PlatformConfig};
pub use rate_limit::{RateLimitGroupConfig, RateLimiterConfig, TokenBucket};
