// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! qcow2 images, as QEMU's own program makes, checks and reads them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use carom_integration::harness::QEMU_IMG;

/// What the check of an image says by its status (`qemu-img(1)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    /// All is as it should be.
    Sound,
    /// So is the content, but some clusters are nobody's.
    Leaks,
}

fn qemu_img(arguments: &[&str]) -> Output {
    Command::new(QEMU_IMG).args(arguments).output().expect("qemu-img starts")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of the test's own")
}

/// Makes an image of `size` bytes that holds nothing, before the raw image of this name in the same directory if there is one.
pub(crate) fn create(dir: &Path, name: &str, size: u64, behind: Option<&str>) -> PathBuf {
    let path = dir.join(name);
    let mut arguments = vec!["create", "-q", "-f", "qcow2"];
    arguments.extend(behind.into_iter().flat_map(|behind| ["-b", behind, "-F", "raw"]));
    let size = size.to_string();
    let made = qemu_img(&[&arguments[..], &[text(&path), &size]].concat());
    assert!(made.status.success(), "{made:?}");
    path
}

/// Checks an image, which nobody uses; panics if it is corrupt.
pub(crate) fn check(image: &Path) -> Check {
    let checked = qemu_img(&["check", "-f", "qcow2", text(image)]);
    match checked.status.code() {
        Some(0) => Check::Sound,
        Some(3) => Check::Leaks,
        _ => panic!("{}: {checked:?}", image.display()),
    }
}

/// What a guest sees in an image.
pub(crate) fn content(image: &Path) -> Vec<u8> {
    let raw = image.with_extension("as-raw");
    let converted = qemu_img(&["convert", "-f", "qcow2", "-O", "raw", text(image), text(&raw)]);
    assert!(converted.status.success(), "{converted:?}");
    let bytes = fs::read(&raw).unwrap();
    fs::remove_file(raw).unwrap();
    bytes
}
