// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Images behind others: what a disk shows where the image in front has nothing. They are read only, by however many.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::error::ImageError;
use super::host_file;
use super::lock::ImageLock;

/// An image behind another.
pub(super) struct Backing {
    pub(super) file: File,
    /// It is a qcow2 image; otherwise a raw one.
    pub(super) is_qcow2: bool,
    pub(super) lock: ImageLock,
}

/// Where the image of this name is that the one at `path` names.
pub(super) fn path(path: &Path, name: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(name)
}

/// Opens and locks an image that is behind another, which says this of its format.
///
/// # Errors
/// Why it cannot be used.
pub(super) fn open(path: &Path, format: Option<&str>, direct: bool) -> Result<Backing, ImageError> {
    let is_qcow2 = match format {
        Some("raw" | "file" | "host_device") => false,
        Some("qcow2") => true,
        // What a guest wrote to a raw image could make it look like another, which names any file of the host.
        None => return Err(ImageError::Malformed("the image in front of it does not say its format".into())),
        Some(other) => return Err(ImageError::Malformed(format!("its format '{other}' is not supported"))),
    };
    let (file, _) = host_file::open(path, true)?;
    let lock = ImageLock::take(&file, true, None)?;
    if is_qcow2 {
        // Its header is read as it lies, before direct I/O asks for aligned buffers.
        super::qcow2_header::check(&file, false)?;
    }
    host_file::set_flags(&file, direct)?;
    Ok(Backing { file, is_qcow2, lock })
}
