// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host block devices that store their data in a file. A [`FailingDevice`] rejects requests to a selected range.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use carom_integration::harness::DMSETUP;

/// Unit of device-mapper tables, in bytes (`Documentation/admin-guide/device-mapper` of the kernel).
const SECTOR: u64 = 512;

/// Loop device on a file. Dropping this value removes the device.
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
            eprintln!("cannot detach {}", self.0.display());
        }
    }
}

/// Block device on a file, with a range in which requests fail. Dropping this value removes the device.
pub(crate) struct FailingDevice {
    name: String,
    image: LoopDevice,
    size: u64,
}

impl FailingDevice {
    /// Creates a device on an image of `size` bytes. Requests to the byte range `bad` fail.
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

    /// Makes all requests succeed from now on.
    pub(crate) fn mend(&self) {
        self.dmsetup("load", &["--table", &self.sound(0..self.size)]);
        self.dmsetup("resume", &[]);
    }

    pub(crate) fn path(&self) -> PathBuf {
        // Use the kernel's name of the device: udev, which creates the usual name, may not run here.
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
            eprintln!("cannot remove {}", self.name);
        }
    }
}
