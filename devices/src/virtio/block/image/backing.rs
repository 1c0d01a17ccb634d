// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Backing files. A qcow2 image can name a backing file. Data that the image does not contain is read from the backing file. Backing files
//! are read-only and can be shared.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::error::ImageError;
use super::host_file;
use super::lock::ImageLock;

/// A backing file.
pub(super) struct Backing {
    pub(super) file: File,
    /// True for a qcow2 image, false for a raw image.
    pub(super) is_qcow2: bool,
    pub(super) lock: ImageLock,
}

/// Returns the path of the backing file `name` of the image at `path`. A relative `name` starts at the image's directory.
pub(super) fn path(path: &Path, name: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(name)
}

/// Opens and locks a backing file. `format` is the format that the image states for its backing file.
///
/// # Errors
/// The file cannot be used. The [`ImageError`] states the reason.
pub(super) fn open(path: &Path, format: Option<&str>, direct: bool) -> Result<Backing, ImageError> {
    let is_qcow2 = match format {
        Some("raw" | "file" | "host_device") => false,
        Some("qcow2") => true,
        // Do not guess the format: a guest could make its raw image look like a qcow2 image that names any file of the host.
        None => return Err(ImageError::Malformed(
            "the image does not state the format of this file; set the format with qemu-img rebase -u -b FILE -F FORMAT IMAGE"
                .into(),
        )),
        Some(other) => {
            return Err(ImageError::Malformed(format!(
                "the format '{other}' of this file is not supported, only raw and qcow2; convert the file with qemu-img convert"
            )));
        }
    };
    let (file, _) = host_file::open(path, true)?;
    let lock = ImageLock::take(&file, true, None)?;
    if is_qcow2 {
        // Check the header before `set_flags` turns on direct I/O. Without direct I/O, the reads of the check need no alignment.
        super::qcow2_header::check(&file, false)?;
    }
    host_file::set_flags(&file, direct)?;
    Ok(Backing { file, is_qcow2, lock })
}
