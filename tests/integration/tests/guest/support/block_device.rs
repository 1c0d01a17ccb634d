// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Block devices of the host that show files, and such that fail in places.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use carom_integration::harness::DMSETUP;

/// Bytes that tables of the device mapper count in (`Documentation/admin-guide/device-mapper` of the kernel).
const SECTOR: u64 = 512;

/// A block device of the host that shows a file, until it is dropped.
pub(crate) struct LoopDevice(pub(crate) PathBuf);

impl LoopDevice {
    pub(crate) fn new(image: &Path) -> Self {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(image).output().unwrap();
        assert!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        Self(String::from_utf8(output.stdout).unwrap().trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let status = Command::new("losetup").arg("--detach").arg(&self.0).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("{} is left", self.0.display());
        }
    }
}

/// A block device of the host that shows a file and fails in places, until it is dropped.
pub(crate) struct FailingDevice {
    name: String,
    image: LoopDevice,
    size: u64,
}

impl FailingDevice {
    /// One over the whole of an image of `size` bytes, of which requests into `bad`, in bytes, fail.
    pub(crate) fn new(name: &str, image: &Path, size: u64, bad: Range<u64>) -> Self {
        let device = Self { name: name.into(), image: LoopDevice::new(image), size };
        let table = [
            device.sound(0..bad.start),
            format!("{} {} error", bad.start / SECTOR, (bad.end - bad.start) / SECTOR),
            device.sound(bad.end..size),
        ];
        device.dmsetup("create", &["--table", &table.join("\n")]);
        device
    }

    /// Has no request fail any more.
    pub(crate) fn mend(&self) {
        self.dmsetup("load", &["--table", &self.sound(0..self.size)]);
        self.dmsetup("resume", &[]);
    }

    pub(crate) fn path(&self) -> PathBuf {
        // The kernel's own name of it: there is no udev that would make another.
        let minor = self.dmsetup("info", &["--columns", "--noheadings", "-o", "minor"]);
        PathBuf::from(format!("/dev/dm-{}", minor.trim()))
    }

    fn sound(&self, range: Range<u64>) -> String {
        let (start, len) = (range.start / SECTOR, (range.end - range.start) / SECTOR);
        format!("{start} {len} linear {} {start}", self.image.0.display())
    }

    fn dmsetup(&self, verb: &str, more: &[&str]) -> String {
        let output = Command::new(DMSETUP)
            .arg(verb)
            .args(["--noudevsync", "--noudevrules"])
            .arg(&self.name)
            .args(more)
            .output()
            .unwrap();
        assert!(output.status.success(), "dmsetup {verb}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for FailingDevice {
    fn drop(&mut self) {
        let status = Command::new(DMSETUP).args(["remove", "--noudevsync", "--retry", &self.name]).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("{} is left", self.name);
        }
    }
}
