// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver whose actions are encoded in bytes, for a fuzzer and for replaying the fuzzer's findings.

use super::registers::Registers;

/// Reads, writes and resets the registers, and ends stages, as `bytes` encode. Checks that the state of the registers can be restored at
/// any time.
///
/// # Panics
/// If a state cannot be restored.
pub fn run(bytes: &[u8]) {
    let mut registers = Registers::new();
    for piece in bytes.chunks(8) {
        let (head, data) = piece.split_at(piece.len().min(3));
        let [what, offset, len] = [0, 1, 2].map(|index| head.get(index).copied().unwrap_or(0));
        let mut data = data[..data.len().min(usize::from(len % 5))].to_vec();
        match what % 6 {
            0 => registers.read_config(u16::from(offset), &mut data),
            1 => {
                let _ = registers.write_config(u16::from(offset), &data);
            }
            2 => registers.read(u64::from(offset), &mut data),
            3 => {
                let _ = registers.write(u64::from(offset % 17), &data);
            }
            4 => {
                let _ = registers.end_stage();
            }
            _ => {
                let _ = registers.reset();
            }
        }
        assert!(registers.stage().is_none_or(|stage| stage.as_secs() < 1100));
        let mut again = Registers::new();
        again.restore(&registers.state()).expect("a guest caused this state");
        assert_eq!(again.state(), registers.state());
    }
}
