// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-pmem device: a host file that the guest sees as persistent memory.

use std::path::{Path, PathBuf};

use super::{Add, HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure};
use crate::field::{Field, keys};
use crate::limits::MIB;
use crate::option_list::from_option;

/// Granule of sizes in bytes: the smallest namespace that Linux creates.
const GRANULE: u64 = 2 * MIB;
/// Maximum size in bytes. The guest-physical address space of every VM has room for persistent memory of this size.
const MAX_SIZE: u64 = 1 << 40;

device_config! {
    /// Host file that the guest sees as persistent memory.
    pub struct PmemConfig {
        /// Path of the file. Unless `size` is given, the length of the file must be a multiple of 2 MiB.
        #[schema(value_type = String)]
        pub file: PathBuf,
        /// Bytes of the file that the guest sees, a multiple of 2 MiB. By default, the whole file.
        #[schema(multiple_of = 2_097_152, maximum = 1099511627776_u64)]
        pub size: Option<u64>,
        /// True if the device is behind the virtio-iommu. The virtio-iommu then translates only the DMA of the device's queue. The guest's
        /// CPUs access the persistent memory directly, like RAM.
        #[serde(default)]
        pub iommu: bool,
        /// True if the guest's writes do not reach the file, and are lost when the device ends. The file is then opened read-only.
        #[serde(default)]
        pub discard_writes: bool,
    }
}

impl PmemConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--pmem", "pmem");
    keys! { FILE = "file", SIZE = "size", DISCARD_WRITES = "discard_writes" }

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "file=FILE,…",
        help: "Host file as persistent memory of the guest",
        keys: "file=FILE[,size=SIZE][,iommu=on|off][,discard_writes=on|off]",
        add: Some(Add {
            operation: "vm.add-pmem",
            id: "addPmemVM",
            summary: "Adds a host file as persistent memory, also to a running VM.",
            schema: "PmemConfig",
            about: "Add a host file as persistent memory, also to a running guest",
        }),
        ..Kind::of::<Self>("pmem", "_pmem", Number::Many)
    };

    /// Checks the size that the guest sees, in bytes.
    ///
    /// # Errors
    /// The size is zero, too large or not a multiple of its granule.
    pub fn check_size(size: u64) -> Result<(), ConfigError> {
        let fits = size != 0 && size.is_multiple_of(GRANULE) && size <= MAX_SIZE;
        ensure(fits, Self::SIZE, || {
            format!("is {size} bytes, but must be a multiple of {0}M from {0}M to {MAX_SIZE} bytes", GRANULE / MIB)
        })
    }
}

impl KindConfig for PmemConfig {
    usual_methods!();

    fn source(&self) -> Option<&Path> {
        Some(&self.file)
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        let path = self.file.as_path();
        vec![if self.discard_writes { HostFile::Read(path) } else { HostFile::ReadWrite(path) }]
    }

    fn check(&self, _: &MemoryConfig) -> Result<(), ConfigError> {
        self.size.map_or(Ok(()), Self::check_size)
    }
}

from_option!(PmemConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    #[test]
    fn size_out_of_range_or_granule_is_refused() {
        for size in [0, 1, GRANULE + 4096, MAX_SIZE + GRANULE] {
            let pmem = PmemConfig { size: Some(size), ..serde_json::from_str(r#"{"file": "/f"}"#).unwrap() };
            let error = pmem.check(&MemoryConfig::default()).unwrap_err().explain(Terms::Json);
            assert_eq!(
                error,
                format!("pmem.size: is {size} bytes, but must be a multiple of 2M from 2M to {MAX_SIZE} bytes")
            );
        }
    }
}
