// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-pmem.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;

use carom_api::{ConfigError, PartConfig, PmemConfig};
use devices::inherited::{self, Access};
use devices::virtio::block::is_read_only_device;
use devices::virtio::pmem::{self, PmemCounters, PmemError, PmemParams};
use rustix::fs::{Mode, OFlags, open};

use super::emulated::{Counting, Wiring, failed};
use super::{Builder, Built, Site, not_built_here};
use crate::error::VmError;

pub(super) const BUILDER: Builder =
    Builder { kind: &PmemConfig::KIND, roles: &[pmem::ROLE], counters: || PmemCounters::default().all(), build };

/// Opens the file and creates the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Pmem(config) = config else { return Err(not_built_here(config)) };
    let (file, size) = open_file(config)?;
    let slots = site.shared.context.bars.clone();
    let (path, discard_writes) = (config.file.display().to_string(), config.discard_writes);
    site.emulate(config, |Wiring { id, memory, msi, doorbells, observer }| {
        let params = PmemParams { id, file, path, size, discard_writes, slots, memory, msi, doorbells, observer };
        let (function, device) = pmem::create(params).map_err(|error| match error {
            PmemError::Map(source) => {
                file_error(config)(io::Error::new(source.kind(), format!("cannot map the file: {source}")))
            }
            error => failed("create the virtio-pmem device")(error),
        })?;
        Ok((function, Counting(move || device.counters().all())))
    })
}

fn file_error(config: &PmemConfig) -> impl Fn(io::Error) -> VmError {
    VmError::of_file(PmemConfig::FILE, &config.file)
}

/// Returns the error for a file that can only be opened for reading. The error names the option to set.
fn only_readable(config: &PmemConfig, why: &str) -> VmError {
    let error = ConfigError::in_terms(PmemConfig::FILE, |terms| {
        let path = config.file.display();
        format!(
            "{path}: {why}: a read-only file needs {}, which drops the guest's writes",
            PmemConfig::DISCARD_WRITES.turned_on(terms)
        )
    });
    error.into()
}

/// Opens the file. Does not wait, for example for the other end of a FIFO. Returns the file and the number of bytes that the guest sees.
fn open_file(config: &PmemConfig) -> Result<(File, u64), VmError> {
    let (access, of_inherited) = match config.discard_writes {
        true => (OFlags::RDONLY, Access::Read),
        false => (OFlags::RDWR, Access::ReadWrite),
    };
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = inherited::file(&config.file, of_inherited).unwrap_or_else(|| {
        let opened = open(&config.file, flags, Mode::empty());
        opened.map(File::from).map_err(io::Error::from)
    });
    let mut file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::EROFS) => only_readable(config, &error.to_string()),
        _ => file_error(config)(error),
    })?;
    // Without this check, the device would accept the guest's writes, and the host would lose them at writeback.
    let is_device = file.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
    if is_device && !config.discard_writes && is_read_only_device(&file).map_err(file_error(config))? {
        return Err(only_readable(config, "is a block device that can only be read"));
    }
    // `seek` returns the size of block devices too. The metadata of a block device does not contain the device's size.
    let len = file.seek(SeekFrom::End(0)).map_err(file_error(config))?;
    let size = config.size.unwrap_or(len);
    if size > len {
        let rule =
            format!("{size} bytes are more than the {len} bytes of the file: enlarge the file, or use a smaller size");
        return Err(ConfigError::new(PmemConfig::SIZE, rule).into());
    }
    PmemConfig::check_size(size)?;
    Ok((file, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_pmem_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f").display().to_string();
        let refused = |more: &str| {
            let config = format!("file={path}{more}").parse().unwrap();
            open_file(&config).unwrap_err().to_string()
        };
        assert!(refused("").starts_with(&format!("--pmem {path}: No such file")), "{}", refused(""));
        File::create(&path).unwrap().set_len(3 << 20).unwrap();
        let whole = "--pmem size: is 3145728 bytes, but must be a multiple of 2M from 2M to 1099511627776 bytes";
        assert_eq!(refused(""), whole);
        assert_eq!(
            refused(",size=4M"),
            "--pmem size: 4194304 bytes are more than the 3145728 bytes of the file: enlarge the file, or use a smaller size"
        );
        let config = format!("file={path},size=2M,discard_writes=on").parse().unwrap();
        assert_eq!(open_file(&config).unwrap().1, 2 << 20);
    }
}
