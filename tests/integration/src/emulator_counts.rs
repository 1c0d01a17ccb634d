// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the emulated machine has executed, by the plug-in of the rig's emulator (`tests/integration/plugin/counts.c`).

use std::arch::asm;
use std::fs;
use std::path::Path;

/// Number of the mark that has the emulator write a line, and what it says there.
const LINE: &str = "3 executed ";

/// Instructions that all CPUs of the machine have executed so far. `file` is the one that the emulator writes to; `None` if it has not.
pub(crate) fn executed(file: &Path) -> Option<u64> {
    mark();
    fs::read_to_string(file).ok()?.lines().rev().find_map(total)
}

/// The total that a line tells.
fn total(line: &str) -> Option<u64> {
    line.strip_prefix(LINE)?.rsplit(' ').next()?.parse().ok()
}

/// The mark: a no-operation, whose displacement is its number and the letters R, A, C.
fn mark() {
    // SAFETY: it does nothing.
    unsafe { asm!(".byte 0x0f, 0x1f, 0x84, 0x00, 3, 0x52, 0x41, 0x43", options(nomem, nostack, preserves_flags)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_total_counts_and_other_lines_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("counts");
        assert_eq!(executed(&file), None);
        fs::write(&file, "3 executed 1 5 5 5\n3 executed 1 700 700 700\n16 lines 1000 1 9 9\n").unwrap();
        assert_eq!(executed(&file), Some(700));
        fs::write(&file, "16 lines 1000 1 9 9\n").unwrap();
        assert_eq!(executed(&file), None);
    }
}
