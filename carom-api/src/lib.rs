// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Carom's configuration and API: command line options, JSON requests and answers, and the rules for them. This crate does not use
//! KVM, devices or HTTP. The VMM and its client both depend on this crate.
//!
//! [`kinds`] is the registry of device kinds. The command line, configuration, operations and OpenAPI document are generated from this
//! registry.

pub mod body;
pub mod call;
pub mod cli;
pub mod config;
mod defaults;
pub mod document;
pub mod error;
pub mod field;
mod info_form;
mod json;
pub mod kinds;
mod left_out;
pub mod limits;
pub mod mac_address;
mod object;
pub mod operations;
pub mod option_list;
#[cfg(test)]
mod option_tests;
pub mod size;
pub mod snapshot;
pub mod tap_files;
mod text_form;
pub mod types;
pub mod unsupported;
pub mod vm_config;

pub use call::Call;
pub use defaults::VmDefaults;
pub use error::{ConfigError, Explain, one_line};
pub use field::{Field, Terms};
pub use kinds::{
    BalloonConfig, ConsoleConfig, DeviceConfig, DiskConfig, FsConfig, IommuBounceConfig, Kind, NetConfig, PartConfig,
    PmemConfig, RngConfig, UserDeviceConfig, VsockConfig,
};
pub use snapshot::{RestoreConfig, VmSnapshotConfig};
pub use vm_config::{CheckedConfig, VmConfig};
