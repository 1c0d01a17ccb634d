// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work of a guest that shares its host with many other guests: the guest's job, and the lines that the job prints
//! (`tests/integration/guest/tenant.c`).

use carom_integration::workload::WAIT_FOR_NVME;

/// Line that the guest prints after touching its working set once, before it starts to work.
pub(crate) const READY: &str = "CAROM-TENANT-READY";

/// Number of writes per second. The guest also reads each written block back.
const RATE: u32 = 10;

/// Working set, in MiB.
const WORKING_SET_MIB: u32 = 96;

/// Time that a guest keeps its working set (`HOLD`), and time from freeing it to allocating it again (`REST`), in seconds.
/// These times are so long that all guests together leave half of the CPU time idle.
const HOLD: u32 = 8;
const REST: u32 = 16;

/// Returns the job of guest `number`. The number determines the point at which the guest starts in the cycle of `HOLD` and `REST`.
pub(crate) fn job(number: usize) -> String {
    let phase = number * 10 % 24;
    format!("{WAIT_FOR_NVME}exec tenant /dev/nvme0n1 {RATE} {WORKING_SET_MIB} {HOLD} {REST} {phase}\n")
}

/// Figures of a guest's work in about two seconds, from one line on its console.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Line {
    pub(crate) operations: f64,
    /// Actual duration, in ms.
    pub(crate) ms: f64,
    pub(crate) p99_us: f64,
    /// Number of blocks and pages with wrong contents since the guest's start.
    pub(crate) wrong: u64,
}

/// Parses all `CAROM-TENANT` lines in the output of a console.
pub(crate) fn lines(console: &str) -> Vec<Line> {
    console.lines().filter_map(|line| parse(line.trim().strip_prefix("CAROM-TENANT ")?)).collect()
}

/// Parses the words of a line: number, operations, ms, p99, late, wrong.
fn parse(line: &str) -> Option<Line> {
    let words: Vec<&str> = line.split(' ').collect();
    let [_, operations, ms, p99, _, wrong] = words[..] else { return None };
    Some(Line {
        operations: operations.parse().ok()?,
        ms: ms.parse().ok()?,
        p99_us: p99.parse().ok()?,
        wrong: wrong.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tenant_lines_of_the_console_are_read() {
        let console =
            "CAROM-TENANT-READY\nCAROM-TENANT 1 40 2001 1800 0 0\r\n[ 1.0] x\nCAROM-TENANT 2 39 2100 950 1 3\n";
        let line = |operations, ms, p99_us, wrong| Line { operations, ms, p99_us, wrong };
        assert_eq!(lines(console), [line(40.0, 2001.0, 1800.0, 0), line(39.0, 2100.0, 950.0, 3)]);
    }
}
