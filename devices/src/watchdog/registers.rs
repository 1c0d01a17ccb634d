// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers of the watchdog (Intel's document 300641-004; Linux, `drivers/watchdog/i6300esb.c`). The module `timer` measures the time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::state::StateError;

/// Configuration register, in configuration space, 2 bytes.
const CONFIG: u16 = 0x60;
/// Lock register, in configuration space, 1 byte.
const LOCK: u16 = 0x68;

/// Preload registers of both stages, 4 bytes each. Only the low 20 bits are used.
const PRELOAD: [u64; 2] = [0x0, 0x4];
/// Reload register, 2 bytes.
const RELOAD: u64 = 0xc;

/// Configuration bit: the end of the second stage does not reset the machine.
const NO_RESET: u16 = 1 << 5;
/// Configuration bit: one count takes 2^5 ticks of the PCI clock instead of 2^15.
const FAST: u16 = 1 << 2;
/// Configuration bits that the register stores. The two lowest bits select the interrupt at the end of the first stage. These two bits have
/// no effect in this emulation.
const CONFIG_MASK: u16 = NO_RESET | FAST | 3;

/// Lock bit: the counter starts again after the first stage, so there is no second stage.
const FREE_RUNNING: u8 = 1 << 2;
/// Lock bit: the counter runs.
const ENABLE: u8 = 1 << 1;
/// Lock bit: the three lock bits cannot change until the next reset.
const LOCKED: u8 = 1 << 0;

/// Reload bit: the second stage has ended. Writing 1 clears the bit.
const TIMEOUT: u16 = 1 << 9;
/// Reload bit: the counter starts its first stage again.
const BEGIN: u16 = 1 << 8;

/// Keys that must be written to the reload register, one after the other, before a memory-mapped register accepts a value.
const KEYS: [u8; 2] = [0x80, 0x86];

/// Largest preload value.
const MAX_PRELOAD: u32 = 0xf_ffff;
/// Ticks of the PCI clock in a microsecond.
const CLOCK: u64 = 33;

/// Effect of an access on the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timing {
    /// No effect.
    GoesOn,
    /// The current stage starts again, or the counter stops if the registers disable it.
    BeginsAnew,
}

/// Effect of the end of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StageEnd {
    /// The next stage begins.
    Next,
    /// The counter stops, and the machine is reset.
    Reset,
    /// The counter stops.
    Stop,
}

/// Saved state of the registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RegistersState {
    config: u16,
    lock: u8,
    preload: [u32; 2],
    /// Number of keys that the driver has written in the right order.
    keys: u8,
    /// True if the counter is in its second stage.
    second: bool,
    timed_out: bool,
}

/// Registers of the watchdog.
#[derive(Debug)]
pub(super) struct Registers(RegistersState);

impl Registers {
    pub(super) fn new() -> Self {
        Self(RegistersState { config: 0, lock: 0, preload: [MAX_PRELOAD; 2], keys: 0, second: false, timed_out: false })
    }

    /// Resets the registers to their values at power-on, except for the timeout flag.
    pub(super) fn reset(&mut self) -> Timing {
        let timed_out = self.0.timed_out;
        *self = Self::new();
        self.0.timed_out = timed_out;
        Timing::BeginsAnew
    }

    /// Returns the duration of the current stage, if the counter runs.
    pub(super) fn stage(&self) -> Option<Duration> {
        (self.0.lock & ENABLE != 0).then(|| {
            let clocks = if self.0.config & FAST == 0 { 1 << 15 } else { 1 << 5 };
            // The stage ends when the counter would fall below zero.
            let ticks = (u64::from(self.0.preload[usize::from(self.0.second)]) + 1) * clocks;
            Duration::from_nanos(ticks * 1_000 / CLOCK)
        })
    }

    /// Ends the current stage.
    pub(super) fn end_stage(&mut self) -> StageEnd {
        if self.0.lock & FREE_RUNNING != 0 {
            return StageEnd::Next;
        }
        if !self.0.second {
            self.0.second = true;
            return StageEnd::Next;
        }
        self.0.second = false;
        self.0.timed_out = true;
        // The bit `LOCKED` stays set until the reset.
        self.0.lock &= !ENABLE;
        if self.0.config & NO_RESET == 0 { StageEnd::Reset } else { StageEnd::Stop }
    }

    /// Copies the registers in the accessed range of configuration space to `data`.
    pub(super) fn read_config(&self, offset: u16, data: &mut [u8]) {
        let [low, high] = self.0.config.to_le_bytes();
        for (register, value) in [(CONFIG, low), (CONFIG + 1, high), (LOCK, self.0.lock)] {
            if let Some(byte) = register.checked_sub(offset).and_then(|place| data.get_mut(usize::from(place))) {
                *byte = value;
            }
        }
    }

    /// Handles a write to configuration space.
    pub(super) fn write_config(&mut self, offset: u16, data: &[u8]) -> Timing {
        let written =
            |register: u16| register.checked_sub(offset).and_then(|place| data.get(usize::from(place))).copied();
        if written(CONFIG).is_some() || written(CONFIG + 1).is_some() {
            let [low, high] = self.0.config.to_le_bytes();
            let bytes = [written(CONFIG).unwrap_or(low), written(CONFIG + 1).unwrap_or(high)];
            self.0.config = u16::from_le_bytes(bytes) & CONFIG_MASK;
        }
        match written(LOCK) {
            Some(value) if self.0.lock & LOCKED == 0 => {
                let before = self.0.lock;
                self.0.lock = value & (FREE_RUNNING | ENABLE | LOCKED);
                if (before ^ self.0.lock) & ENABLE == 0 {
                    return Timing::GoesOn;
                }
                self.0.second = false;
                Timing::BeginsAnew
            }
            _ => Timing::GoesOn,
        }
    }

    /// Reads memory-mapped registers. All their bits except the timeout flag read as 0.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        let mut bytes = [0; 16];
        if self.0.timed_out {
            bytes[0xc..0xe].copy_from_slice(&TIMEOUT.to_le_bytes());
        }
        let place = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, byte) in data.iter_mut().enumerate() {
            *byte = place.checked_add(index).and_then(|place| bytes.get(place)).copied().unwrap_or(0);
        }
    }

    /// Handles a write to memory-mapped registers.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Timing {
        let unlocked = usize::from(self.0.keys) == KEYS.len();
        if offset == RELOAD && !unlocked {
            // Each key is one byte. If a write is wider, only its first byte counts.
            let next = KEYS[usize::from(self.0.keys)];
            let first = KEYS[0];
            self.0.keys = match data.first() {
                Some(byte) if *byte == next => self.0.keys + 1,
                Some(byte) if *byte == first => 1,
                _ => 0,
            };
            return Timing::GoesOn;
        }
        if !unlocked {
            return Timing::GoesOn;
        }
        // The keys unlock only one write.
        self.0.keys = 0;
        if let Some(stage) = PRELOAD.iter().position(|register| *register == offset) {
            let mut bytes = [0; 4];
            bytes.iter_mut().zip(data).for_each(|(byte, written)| *byte = *written);
            self.0.preload[stage] = u32::from_le_bytes(bytes) & MAX_PRELOAD;
            return Timing::GoesOn;
        }
        if offset != RELOAD {
            return Timing::GoesOn;
        }
        let bytes = [data.first().copied().unwrap_or(0), data.get(1).copied().unwrap_or(0)];
        let written = u16::from_le_bytes(bytes);
        self.0.timed_out &= written & TIMEOUT == 0;
        if written & BEGIN == 0 {
            return Timing::GoesOn;
        }
        self.0.second = false;
        Timing::BeginsAnew
    }

    pub(super) fn state(&self) -> RegistersState {
        self.0.clone()
    }

    /// Restores the saved state.
    ///
    /// # Errors
    /// The saved state has values that no guest can cause.
    pub(super) fn restore(&mut self, state: &RegistersState) -> Result<(), StateError> {
        let RegistersState { config, lock, preload, keys, .. } = state;
        let sound = config & !CONFIG_MASK == 0
            && lock & !(FREE_RUNNING | ENABLE | LOCKED) == 0
            && preload.iter().all(|value| *value <= MAX_PRELOAD)
            && usize::from(*keys) <= KEYS.len();
        if !sound {
            return Err(StateError::rule(
                "registers",
                "the saved registers have values that no guest can cause: restore from an unmodified snapshot",
            ));
        }
        self.0 = state.clone();
        Ok(())
    }
}
