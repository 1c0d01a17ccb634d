// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test of this host's KVM.

use std::fs::{self, OpenOptions};
use std::path::Path;
use std::process::{Command, Stdio};

/// True if this process may use KVM and KVM runs a boot sector. Starts QEMU for this test, and creates the test's files in `dir`. The
/// existence of /dev/kvm is not enough: on some machines, KVM does not run ordinary code.
#[must_use]
pub fn works(dir: &Path) -> bool {
    OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok() && boot_sector_runs(dir)
}

fn boot_sector_runs(dir: &Path) -> bool {
    // The code writes 0x10 to port 0xf4 (`mov dx`, `mov al`, `out dx,al`), and halts. The debug-exit device turns 0x10 into the exit
    // status 0x10 * 2 + 1.
    let mut sector = [0; 512];
    sector[..7].copy_from_slice(b"\xba\xf4\x00\xb0\x10\xee\xf4");
    sector[510..].copy_from_slice(b"\x55\xaa");
    let image = dir.join("probe.img");
    let Ok(()) = fs::write(&image, sector) else { return false };
    let drive = format!("file={},format=raw", image.display().to_string().replace(',', ",,"));
    let status = Command::new("timeout")
        .args(["-k", "1", "15", "qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-m", "64"])
        .args(["-display", "none", "-nic", "none", "-drive", &drive])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-no-reboot"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.code() == Some(33))
}
