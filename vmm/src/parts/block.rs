// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disks: virtio-blk.

use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::error::FileError;
use carom_api::kinds::{ImageType, LockGranularity};
use carom_api::types::VmResizeDisk;
use carom_api::{ConfigError, DiskConfig, Field, PartConfig};
use devices::counters::Counter;
use devices::virtio::block::{
    self, BlockCounters, BlockParams, Image, ImageError, ImageFormat, ImageOptions, IoMode, ResizeError, VirtioBlock,
};
use devices::virtio::vhost_user::{Model, VhostUserCounters};

use super::emulated::{Wiring, failed};
use super::vhost_user::{self, Wanted};
use super::{Builder, Built, Part, Site, not_built_here};
use crate::error::VmError;
use crate::limits::affinity;

pub(super) const BUILDER: Builder = Builder {
    kind: &DiskConfig::KIND,
    roles: &[block::ROLE, vhost_user::ROLE],
    counters: || [BlockCounters::default().all(), VhostUserCounters::default().all()].concat(),
    build,
};

impl Part for Arc<VirtioBlock> {
    fn counters(&self) -> Vec<Counter> {
        VirtioBlock::counters(self).all()
    }

    fn resize(&self, bytes: u64) -> Result<(), VmError> {
        VirtioBlock::resize(self, bytes).map_err(|error| match error {
            ResizeError::Host(source) => VmError::Device { what: "resize a disk", source },
            rule => ConfigError::new(VmResizeDisk::DESIRED_SIZE, rule.to_string()).into(),
        })
    }
}

/// Opens and locks the image, and creates the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Disk(config) = config else { return Err(not_built_here(config)) };
    if let Some(socket) = config.vhost_socket.as_deref() {
        return served(config, socket, &mut site);
    }
    let affinity = affinity::of_queues(&config.queue_affinity)?;
    let image = open(config)?;
    let limiter = site.shared.context.limits.of_disk(config);
    site.emulate(config, |Wiring { id, memory, msi, doorbells, observer }| {
        let params = BlockParams {
            serial: config.serial.clone().unwrap_or_else(|| id.clone()),
            id,
            image,
            queues: config.num_queues,
            queue_size: config.queue_size,
            mode: IoMode::Async,
            limiter,
            affinity,
            memory,
            msi,
            doorbells,
            observer,
        };
        block::create(params).map_err(failed("create a disk"))
    })
}

/// Connects to the vhost-user server of the disk, and creates the device.
fn served(config: &DiskConfig, socket: &Path, site: &mut Site<'_>) -> Result<Built, VmError> {
    let wanted = Wanted {
        config,
        field: DiskConfig::VHOST_SOCKET,
        socket,
        model: Model::block(config.num_queues, config.queue_size),
        // The server may let a host drive do DMA to guest RAM, as SPDK does. Such RAM is pinned.
        pins: true,
    };
    vhost_user::build(wanted, site)
}

fn open(config: &DiskConfig) -> Result<Image, VmError> {
    let options = ImageOptions {
        read_only: config.readonly,
        direct: config.direct,
        format: match config.image_type {
            ImageType::Unknown => ImageFormat::Unknown,
            ImageType::Raw => ImageFormat::Raw,
            ImageType::Qcow2 => ImageFormat::Qcow2,
            ImageType::FixedVhd => ImageFormat::FixedVhd,
        },
        backing_files: config.backing_files,
        lock_all: config.lock_granularity == LockGranularity::Full,
        allocated: !config.sparse,
    };
    Image::open(&config.path, options).map_err(|error| {
        let path = config.path.display().to_string();
        let (field, source): (Field, _) = match error {
            ImageError::ReadOnly => return only_readable(&path, &error.to_string()),
            ImageError::Host(source) if source.raw_os_error() == Some(libc::EROFS) => {
                return only_readable(&path, &source.to_string());
            }
            ImageError::Host(source) => (DiskConfig::PATH, source),
            ImageError::Format(_) | ImageError::Malformed(_) => (DiskConfig::IMAGE_TYPE, io::Error::other(error)),
            ImageError::BackingFile(_) | ImageError::Behind { .. } => {
                (DiskConfig::BACKING_FILES, io::Error::other(error))
            }
            ImageError::Allocate(_) => (DiskConfig::SPARSE, io::Error::other(error)),
            ImageError::Direct(_) => (DiskConfig::DIRECT, io::Error::other(error)),
            ImageError::Used { .. }
            | ImageError::Locked { .. }
            | ImageError::Writing
            | ImageError::Kind
            | ImageError::Empty { .. } => (DiskConfig::PATH, io::Error::other(error)),
        };
        FileError { field, path, source }.into()
    })
}

/// Returns the error for an image that can only be opened for reading. The error names the option to set.
fn only_readable(path: &str, why: &str) -> VmError {
    let error = ConfigError::in_terms(DiskConfig::PATH, |terms| {
        format!("{path}: {why}: a read-only disk needs {}", DiskConfig::READONLY.turned_on(terms))
    });
    error.into()
}

#[cfg(test)]
mod tests {
    use carom_api::{Explain, Terms};

    use super::*;

    #[test]
    fn unusable_disk_image_is_refused_with_its_path_and_field() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().display().to_string();
        let config: DiskConfig = format!("path={path}").parse().unwrap();
        let refused = |config: &DiskConfig| open(config).unwrap_err().explain(Terms::Json);
        assert_eq!(
            refused(&config),
            format!("disks.path: {path}: has 0 bytes, less than one block of 512 bytes: enlarge the image")
        );
        file.as_file().set_len(1024).unwrap();
        let first = open(&config).unwrap();
        let held = refused(&config);
        assert!(held.starts_with(&format!("disks.path: {path}: is already used by this VM, as the image")), "{held}");
        drop(first);
        std::fs::write(file.path(), [b"QFI\xfb".as_slice(), &[0; 1020]].concat()).unwrap();
        let other = refused(&config);
        assert!(
            other.starts_with(&format!("disks.image_type: {path}: looks like an image in qcow2 format")),
            "{other}"
        );
        let error = only_readable("/d", "is a block device that can only be read");
        let rule = "/d: is a block device that can only be read: a read-only disk needs";
        assert_eq!(error.to_string(), format!("--disk path: {rule} --disk readonly=on"));
        assert_eq!(error.explain(Terms::Json), format!("disks.path: {rule} disks.readonly to be true"));
        let none: DiskConfig = "path=/no/image".parse().unwrap();
        assert!(refused(&none).starts_with("disks.path: /no/image: No such file"));
        assert_eq!(open(&none).unwrap_err().to_string(), "--disk /no/image: No such file or directory (os error 2)");
    }
}
