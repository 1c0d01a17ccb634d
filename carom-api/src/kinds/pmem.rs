// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-pmem device: a file of the host as memory of the guest that keeps what is written.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Add, HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::MIB;
use crate::option_list::OptionList;

/// What sizes are multiples of, in bytes: the least that Linux makes a namespace of.
const GRANULE: u64 = 2 * MIB;
/// Most bytes: what there are addresses for in any VM.
const MAX_SIZE: u64 = 1 << 40;

/// A file of the host as memory of the guest that keeps what is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PmemConfig {
    /// The file, whose length is a multiple of 2 MiB unless `size` says how much of it the guest sees.
    #[schema(value_type = String)]
    pub file: PathBuf,
    /// Bytes of it that the guest sees, a multiple of 2 MiB; all of it where nothing is said.
    #[serde(default)]
    #[schema(multiple_of = 2_097_152, maximum = 1099511627776_u64)]
    pub size: Option<u64>,
    /// Whether the device is behind the virtio-iommu. The memory itself is the guest's as RAM is.
    #[serde(default)]
    pub iommu: bool,
    /// Whether what the guest writes is for it alone and gone when the device is; the file is opened for reading then.
    #[serde(default)]
    pub discard_writes: bool,
    /// PCI segment that the device is on.
    #[serde(default)]
    #[schema(maximum = 15)]
    pub pci_segment: u16,
    /// Slot that it is in there, 1 to 31; a free one if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31)]
    pub pci_device_id: Option<u8>,
    /// Name in logs and the API, as that of other devices.
    #[serde(default)]
    pub id: Option<String>,
}

impl PmemConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--pmem", "pmem");
    /// [`Self::file`].
    pub const FILE: Field = Self::OPTION.key("file");
    /// [`Self::size`].
    pub const SIZE: Field = Self::OPTION.key("size");
    /// [`Self::discard_writes`].
    pub const DISCARD_WRITES: Field = Self::OPTION.key("discard_writes");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "pmem",
        field: Self::OPTION,
        number: Number::Many,
        value: "file=FILE,…",
        help: "A file of the host as memory that keeps what is written: file=FILE[,size=SIZE][,iommu=on|off][,discard_writes=on|off]\
               [,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_pmem",
        takes_slot: true,
        passed_through: false,
        iommu: Some(Self::OPTION.key("iommu")),
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-pmem",
            id: "addPmemVM",
            summary: "Adds a file of the host as memory that keeps what is written, to a running VM too.",
            schema: "PmemConfig",
            verb: "add-pmem",
            about: "Add a file of the host as memory that keeps what is written, to a running guest too: \
                    file=FILE[,size=SIZE][,iommu=on|off][,discard_writes=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Pmem),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Pmem),
    };

    /// Checks a number of bytes that the guest is to see.
    ///
    /// # Errors
    /// It cannot be.
    pub fn check_size(size: u64) -> Result<(), ConfigError> {
        if size == 0 || !size.is_multiple_of(GRANULE) || size > MAX_SIZE {
            let rule = format!("{size} bytes are no positive multiple of {}M up to {MAX_SIZE}", GRANULE / MIB);
            return Err(ConfigError::new(Self::SIZE, rule));
        }
        Ok(())
    }
}

impl KindConfig for PmemConfig {
    usual_methods!(Pmem);

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

impl FromStr for PmemConfig {
    type Err = ConfigError;

    /// Parses `file=PATH[,size=SIZE][,iommu=on|off][,discard_writes=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = ["file", "size", "iommu", "discard_writes", "pci_segment", "pci_device_id", "id"];
        let list = OptionList::parse(Self::OPTION, text, &keys)?;
        Ok(Self {
            file: list.required("file")?.into(),
            size: list.size("size")?,
            iommu: list.toggle("iommu", false)?,
            discard_writes: list.toggle("discard_writes", false)?,
            pci_segment: list.segment()?,
            pci_device_id: list.number("pci_device_id")?,
            id: list.get("id").map(str::to_string),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    #[test]
    fn pmem_parses_as_cloud_hypervisor_spells_it() {
        let pmem = |text: &str| text.parse::<PmemConfig>().unwrap();
        assert_eq!(pmem("file=/f"), serde_json::from_str(r#"{"file": "/f"}"#).unwrap());
        let json = r#"{"file": "/f", "size": 4194304, "iommu": true, "discard_writes": true, "id": "p"}"#;
        assert_eq!(pmem("file=/f,size=4M,iommu=on,discard_writes=on,id=p"), serde_json::from_str(json).unwrap());
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert_eq!("size=2M".parse::<PmemConfig>().unwrap_err().to_string(), "--pmem: 'file=' is needed");
        for size in [0, 1, GRANULE + 4096, MAX_SIZE + GRANULE] {
            let pmem = PmemConfig { size: Some(size), ..serde_json::from_str(r#"{"file": "/f"}"#).unwrap() };
            let error = pmem.check(&MemoryConfig::default()).unwrap_err().explain(Terms::Json);
            assert_eq!(error, format!("pmem.size: {size} bytes are no positive multiple of 2M up to {MAX_SIZE}"));
        }
    }
}
