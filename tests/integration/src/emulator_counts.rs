// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Number of instructions that the emulated machine has executed. A plug-in of the rig's emulator counts them
//! (`tests/integration/plugin/counts.c`).

use std::arch::asm;
use std::fs;
use std::path::Path;

/// Start of the line that the plug-in writes for mark 3.
const LINE: &str = "3 executed ";

/// Returns the number of instructions that all CPUs of the machine have executed so far. The emulator appends its counts to
/// `file`. Returns `None` if the emulator does not count.
pub(crate) fn executed(file: &Path) -> Option<u64> {
    mark();
    fs::read_to_string(file).ok()?.lines().rev().find_map(total)
}

/// Returns the total of a line, if it is a line of mark 3.
fn total(line: &str) -> Option<u64> {
    line.strip_prefix(LINE)?.rsplit(' ').next()?.parse().ok()
}

/// Executes mark 3: a no-operation instruction whose displacement contains the mark's number and the letters R, A, C.
fn mark() {
    // SAFETY: the instruction does nothing.
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
