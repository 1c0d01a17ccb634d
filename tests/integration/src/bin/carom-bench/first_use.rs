// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! First use of an emulated machine's memory. The emulator's host allocates each page at its first use, so the first use takes
//! several times as long as later uses. This module writes to the memory before the measurement, so that the first guests are as
//! fast as later guests.

use std::fs;
use std::hint::black_box;

use anyhow::{Context, Result};

/// Writes to nearly all free memory once.
///
/// # Errors
/// Fails if the amount of free memory cannot be read.
pub(crate) fn use_free_memory() -> Result<()> {
    let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let free = free_bytes(&text).context("/proc/meminfo has no MemFree")?;
    let mut memory = vec![0u8; free / 20 * 19];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    black_box(&memory);
    Ok(())
}

/// Parses the line `MemFree: 123 kB`.
fn free_bytes(text: &str) -> Option<usize> {
    let words = text.lines().find_map(|line| line.strip_prefix("MemFree:"))?;
    Some(words.trim().strip_suffix(" kB")?.parse::<usize>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_found_among_other_lines() {
        assert_eq!(free_bytes("MemTotal:  9 kB\nMemFree:     1234 kB\nMemAvailable: 1 kB\n"), Some(1234 << 10));
        assert_eq!(free_bytes("MemTotal:  9 kB\n"), None);
    }
}
