// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! qcow2 images, which QEMU's own program creates, checks and reads.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use carom_integration::harness::QEMU_IMG;

/// Result of the check of an image (`qemu-img(1)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// The image has no errors.
    Sound,
    /// The contents are correct, but some clusters are leaked.
    Leaks,
}

fn qemu_img(arguments: &[&str]) -> Output {
    Command::new(QEMU_IMG).args(arguments).output().expect("qemu-img starts")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the test's path is UTF-8")
}

/// Creates an empty image of `size` bytes. `behind` is the name of a raw backing file in the same directory.
pub(crate) fn create(dir: &Path, name: &str, size: u64, behind: Option<&str>) -> PathBuf {
    let path = dir.join(name);
    let mut arguments = vec!["create", "-q", "-f", "qcow2"];
    arguments.extend(behind.into_iter().flat_map(|behind| ["-b", behind, "-F", "raw"]));
    let size = size.to_string();
    let made = qemu_img(&[&arguments[..], &[text(&path), &size]].concat());
    assert!(made.status.success(), "{made:?}");
    path
}

/// Checks an image that is not in use. Panics if the image is corrupt.
pub(crate) fn check(image: &Path) -> Check {
    let checked = qemu_img(&["check", "-f", "qcow2", text(image)]);
    match checked.status.code() {
        Some(0) => Check::Sound,
        Some(3) => Check::Leaks,
        _ => panic!("{}: {checked:?}", image.display()),
    }
}

/// Returns an image's contents as a guest sees them.
pub(crate) fn content(image: &Path) -> Vec<u8> {
    let raw = image.with_extension("as-raw");
    let converted = qemu_img(&["convert", "-f", "qcow2", "-O", "raw", text(image), text(&raw)]);
    assert!(converted.status.success(), "{converted:?}");
    let bytes = fs::read(&raw).unwrap();
    fs::remove_file(raw).unwrap();
    bytes
}
