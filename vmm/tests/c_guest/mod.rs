// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Builds guests without an operating system from C and assembly, with gcc.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::tiny_guest::elf;

/// Builds the guest `tests/{name}/guest.c` as the file `kernel` in `dir`. Each of `macros` has the form `MACRO=VALUE`. Returns `None`
/// without gcc.
pub(crate) fn build(name: &str, macros: &[&str], dir: &Path) -> Option<PathBuf> {
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
    let flat = dir.join("guest.bin");
    let built = Command::new("gcc")
        .args(["-m32", "-march=i686", "-mgeneral-regs-only", "-O2", "-ffreestanding", "-fno-pic", "-no-pie"])
        .args(["-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-nostdlib", "-static"])
        .args(["-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-Wl,--oformat,binary", "-Wl,--build-id=none"])
        .args(macros.iter().map(|name| format!("-D{name}")))
        .args([format!("-I{tests}/c_guest"), format!("-Wl,-T,{tests}/c_guest/guest.ld")])
        .args([format!("{tests}/c_guest/entry.s"), format!("{tests}/{name}/guest.c"), "-o".into()])
        .arg(&flat)
        .status();
    match built {
        Err(error) => {
            eprintln!("not tested: gcc: {error}");
            return None;
        }
        Ok(status) => assert!(status.success(), "gcc: {status}"),
    }
    let kernel = dir.join("kernel");
    fs::write(&kernel, elf(&fs::read(flat).unwrap())).unwrap();
    Some(kernel)
}
