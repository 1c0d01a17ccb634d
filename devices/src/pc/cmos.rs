// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CMOS of the PC: a clock (Motorola MC146818) with 128 bytes of memory. Two ports give access to one byte at a time. Firmware reads the
//! time and the amount of RAM from the CMOS. The amount of RAM is in the same bytes as on other PCs.
//!
//! The clock shows the host's time in UTC. The clock has no alarms and no interrupts. The clock ignores the guest's writes for two reasons:
//!
//! - A guest must not set a wrong time for its next boot.
//! - At each boot, firmware sets the clock to the time that it has just read. If the clock accepted the write, each boot would lose a
//!   fraction of a second.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::Offset;
use serde::{Deserialize, Serialize};

use crate::platform::BusDevice;
use crate::state::{DeviceState, StateError};

/// Number of ports. The guest writes an index to the first port, and accesses the byte at this index through the second port.
pub const REGISTERS_LEN: u64 = 2;

/// Size of the memory in bytes.
const CELLS: usize = 128;
/// Bits of the index port that select a byte. The port also stores bit 7, which disables NMIs on a PC, but bit 7 has no effect here.
const INDEX_MASK: u8 = 0x7f;

const SECONDS: u8 = 0x00;
const MINUTES: u8 = 0x02;
const HOURS: u8 = 0x04;
const DAY_OF_WEEK: u8 = 0x06;
const DAY: u8 = 0x07;
const MONTH: u8 = 0x08;
const YEAR: u8 = 0x09;
/// Register A: rate, divider, and the update-in-progress bit.
const REGISTER_A: u8 = 0x0a;
/// Register B: format of the time, and enabled interrupts.
const REGISTER_B: u8 = 0x0b;
/// Register C: causes of interrupts.
const REGISTER_C: u8 = 0x0c;
/// Register D: validity of memory and time.
const REGISTER_D: u8 = 0x0d;
/// Index of the century, as on other PCs.
const CENTURY: u8 = 0x32;
/// Index of the two bytes with the amount of RAM from 16 MiB up to 4 GiB, in units of 64 KiB.
const RAM_ABOVE_16_MIB: u8 = 0x34;
/// Index of the three bytes with the amount of RAM above 4 GiB, in units of 64 KiB.
const RAM_ABOVE_4_GIB: u8 = 0x5b;

/// Value that a PC's firmware writes to register A: a time base of 32768 Hz, 1024 periodic interrupts per second, and no update in
/// progress.
const A_AT_POWER_ON: u8 = 0x26;
const A_UPDATE_IN_PROGRESS: u8 = 1 << 7;
/// Bit of register B. If the bit is set, hours are 0 to 23. Otherwise hours are 1 to 12, and bit 7 of the hour stands for the afternoon.
const B_24_HOURS: u8 = 1 << 1;
/// Bit of register B. If the bit is set, numbers are binary. Otherwise numbers are two decimal digits (BCD).
const B_BINARY: u8 = 1 << 2;
/// Bit of an hour in 12-hour format that stands for the afternoon.
const AFTERNOON: u8 = 1 << 7;
/// Bit of register D that reports valid memory and a valid time.
const D_VALID: u8 = 1 << 7;

/// The clock stands still for this time after a read of register A. A driver first reads in register A that no update is in progress.
/// The driver then reads field after field, and must not see the old minute with the new second. A real clock guarantees that no update
/// follows within 244 µs. VM exits on a busy host can take longer, so this clock stands still for longer.
const HOLD_TIME: Duration = Duration::from_millis(50);

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("cmos", 1);

/// Saved state of the CMOS.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CmosState {
    index: u8,
    cells: Vec<u8>,
}

/// Registers that the guest can change.
struct Registers {
    index: u8,
    cells: [u8; CELLS],
    /// Time at the last read of register A.
    held_since: Option<Timestamp>,
}

impl Registers {
    /// Returns the time that the clock shows at `now`.
    fn time(&self, now: Timestamp) -> DateTime {
        let fresh = |at: &Timestamp| Duration::try_from(now.duration_since(*at)).is_ok_and(|passed| passed < HOLD_TIME);
        let time = self.held_since.filter(fresh).unwrap_or(now);
        Offset::UTC.to_datetime(time)
    }

    fn b(&self) -> u8 {
        self.cells[usize::from(REGISTER_B)]
    }

    /// Returns a number in the format that register B selects.
    fn number(&self, value: i8) -> u8 {
        let value = value.unsigned_abs();
        if self.b() & B_BINARY != 0 { value } else { ((value / 10) << 4) | (value % 10) }
    }

    fn hours(&self, hour: i8) -> u8 {
        match hour {
            _ if self.b() & B_24_HOURS != 0 => self.number(hour),
            0 => self.number(12),
            1..12 => self.number(hour),
            12 => self.number(12) | AFTERNOON,
            _ => self.number(hour - 12) | AFTERNOON,
        }
    }

    fn cell(&mut self, now: Timestamp) -> u8 {
        let index = self.index & INDEX_MASK;
        let century = |time: DateTime| i8::try_from(time.year() / 100).unwrap_or_default();
        let year = |time: DateTime| i8::try_from(time.year() % 100).unwrap_or_default();
        match index {
            SECONDS => self.number(self.time(now).second()),
            MINUTES => self.number(self.time(now).minute()),
            HOURS => self.hours(self.time(now).hour()),
            DAY_OF_WEEK => self.number(self.time(now).weekday().to_sunday_one_offset()),
            DAY => self.number(self.time(now).day()),
            MONTH => self.number(self.time(now).month()),
            YEAR => self.number(year(self.time(now))),
            CENTURY => self.number(century(self.time(now))),
            REGISTER_A => {
                self.held_since = Some(now);
                self.cells[usize::from(index)]
            }
            _ => self.cells[usize::from(index)],
        }
    }
}

/// True if the guest can change the byte at `index`.
fn is_writable(index: u8) -> bool {
    let of_ram = (RAM_ABOVE_16_MIB..RAM_ABOVE_16_MIB + 2).contains(&index)
        || (RAM_ABOVE_4_GIB..RAM_ABOVE_4_GIB + 3).contains(&index);
    let of_time = matches!(index, SECONDS | MINUTES | HOURS | DAY_OF_WEEK..=YEAR | CENTURY);
    !of_ram && !of_time && !matches!(index, REGISTER_C | REGISTER_D)
}

/// Returns the contents of the CMOS memory at power-on. The machine has RAM up to `low_end` (below 4 GiB), and `high_ram` bytes of RAM
/// above 4 GiB.
fn cells(low_end: u64, high_ram: u64) -> [u8; CELLS] {
    let mut cells = [0; CELLS];
    let mut set = |index: u8, bytes: &[u8]| cells[usize::from(index)..][..bytes.len()].copy_from_slice(bytes);
    set(REGISTER_A, &[A_AT_POWER_ON]);
    set(REGISTER_B, &[B_24_HOURS]);
    set(REGISTER_D, &[D_VALID]);
    let units = |bytes: u64, most: u64| (bytes >> 16).min(most).to_le_bytes();
    set(RAM_ABOVE_16_MIB, &units(low_end.saturating_sub(16 << 20), 0xffff)[..2]);
    set(RAM_ABOVE_4_GIB, &units(high_ram, 0xff_ffff)[..3]);
    cells
}

/// Ports of the CMOS.
pub struct Cmos {
    registers: Mutex<Registers>,
    now: fn() -> Timestamp,
}

impl Cmos {
    /// Creates the CMOS. The machine has RAM up to `low_end` (below 4 GiB), and `high_ram` bytes of RAM above 4 GiB.
    pub fn new(low_end: u64, high_ram: u64) -> Self {
        Self::with_clock(low_end, high_ram, Timestamp::now)
    }

    fn with_clock(low_end: u64, high_ram: u64, now: fn() -> Timestamp) -> Self {
        let registers = Registers { index: 0, cells: cells(low_end, high_ram), held_since: None };
        Self { registers: Mutex::new(registers), now }
    }

    /// Returns the state of the CMOS. Call this function while all vCPUs are stopped.
    ///
    /// # Errors
    /// This function never fails today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        let registers = self.lock();
        DeviceState::new(STATE.0, STATE.1, &CmosState { index: registers.index, cells: registers.cells.to_vec() })
    }

    /// Restores `state`. The clock shows the host's current time, because the state does not contain the time.
    ///
    /// # Errors
    /// The saved state is invalid, or does not match this VM. In this case nothing has changed.
    pub fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let CmosState { index, cells } = state.payload(STATE.0, STATE.1)?;
        let rule = |rule: &str| StateError::rule("cells", rule);
        let cells: [u8; CELLS] = cells.try_into().map_err(|_| {
            rule("the saved state must have 128 cells of one byte: restore from an unmodified snapshot")
        })?;
        let mut registers = self.lock();
        let same = |at: &u8| cells[usize::from(*at)] == registers.cells[usize::from(*at)];
        if !(0..=INDEX_MASK).filter(|at| !is_writable(*at)).all(|at| same(&at)) {
            return Err(rule(
                "the saved cells differ from the cells of this VM at an index that no guest can write: restore with the configuration that was saved",
            ));
        }
        if cells[usize::from(REGISTER_A)] & A_UPDATE_IN_PROGRESS != 0 {
            return Err(rule(
                "the saved register A reports an update in progress, but this clock never does: restore from an unmodified snapshot",
            ));
        }
        *registers = Registers { index, cells, held_since: None };
        Ok(())
    }

    /// Resets the index, and lets a stopped clock continue. The memory keeps its contents, because on a PC the CMOS has a battery. Call
    /// this function while all vCPUs are stopped.
    pub fn reset(&self) {
        let mut registers = self.lock();
        (registers.index, registers.held_since) = (0, None);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Registers> {
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BusDevice for Cmos {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut registers = self.lock();
        for (port, byte) in (offset..REGISTERS_LEN).zip(data) {
            *byte = if port == 0 { registers.index } else { registers.cell((self.now)()) };
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut registers = self.lock();
        for (port, value) in (offset..REGISTERS_LEN).zip(data) {
            let index = registers.index & INDEX_MASK;
            match (port, index) {
                (0, _) => registers.index = *value,
                (_, REGISTER_A) => registers.cells[usize::from(index)] = value & !A_UPDATE_IN_PROGRESS,
                _ if is_writable(index) => registers.cells[usize::from(index)] = *value,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
