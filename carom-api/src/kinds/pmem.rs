// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-pmem device: a file of the host as memory of the guest that keeps what is written.

use std::path::{Path, PathBuf};

use super::{Add, HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure};
use crate::field::{Field, keys};
use crate::limits::MIB;
use crate::option_list::from_option;

/// What sizes are multiples of, in bytes: the least that Linux makes a namespace of.
const GRANULE: u64 = 2 * MIB;
/// Most bytes: what there are addresses for in any VM.
const MAX_SIZE: u64 = 1 << 40;

device_config! {
    /// A file of the host as memory of the guest that keeps what is written.
    pub struct PmemConfig {
        /// The file, whose length is a multiple of 2 MiB unless `size` says how much of it the guest sees.
        #[schema(value_type = String)]
        pub file: PathBuf,
        /// Bytes of it that the guest sees, a multiple of 2 MiB; all of it where nothing is said.
        #[schema(multiple_of = 2_097_152, maximum = 1099511627776_u64)]
        pub size: Option<u64>,
        /// True if the device is behind the virtio-iommu. The memory itself is the guest's as RAM is.
        #[serde(default)]
        pub iommu: bool,
        /// True if writes of the guest are lost with the device. The file is opened for reading only then.
        #[serde(default)]
        pub discard_writes: bool,
    }
}

impl PmemConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--pmem", "pmem");
    keys! { FILE = "file", SIZE = "size", DISCARD_WRITES = "discard_writes" }

    /// The kind.
    pub const KIND: Kind = Kind {
        value: "file=FILE,…",
        help: "A file of the host as memory that keeps what is written",
        keys: "file=FILE[,size=SIZE][,iommu=on|off][,discard_writes=on|off]",
        add: Some(Add {
            operation: "vm.add-pmem",
            id: "addPmemVM",
            summary: "Adds a file of the host as memory that keeps what is written, to a running VM too.",
            schema: "PmemConfig",
            about: "Add a file of the host as memory that keeps what is written, to a running guest too",
        }),
        ..Kind::of::<Self>("pmem", "_pmem", Number::Many)
    };

    /// Checks a number of bytes that the guest is to see.
    ///
    /// # Errors
    /// It cannot be.
    pub fn check_size(size: u64) -> Result<(), ConfigError> {
        let fits = size != 0 && size.is_multiple_of(GRANULE) && size <= MAX_SIZE;
        ensure(fits, Self::SIZE, || {
            format!("{size} bytes are no positive multiple of {}M up to {MAX_SIZE}", GRANULE / MIB)
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
    fn sizes_that_cannot_be_are_refused() {
        for size in [0, 1, GRANULE + 4096, MAX_SIZE + GRANULE] {
            let pmem = PmemConfig { size: Some(size), ..serde_json::from_str(r#"{"file": "/f"}"#).unwrap() };
            let error = pmem.check(&MemoryConfig::default()).unwrap_err().explain(Terms::Json);
            assert_eq!(error, format!("pmem.size: {size} bytes are no positive multiple of 2M up to {MAX_SIZE}"));
        }
    }
}
