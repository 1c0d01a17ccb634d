// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration space of a function that Carom emulates.

use serde::{Deserialize, Serialize};

use super::regs::{
    BAR0, CAPABILITIES, COMMAND, COMMAND_BUS_MASTER, COMMAND_INTX_DISABLE, COMMAND_IO, COMMAND_MEMORY, CONFIG_SIZE,
    EXTENDED, HEADER_END, INTERRUPT_LINE, REVISION, STATUS, STATUS_CAPABILITIES, SUBSYSTEM_ID, SUBSYSTEM_VENDOR_ID,
    VENDOR_ID,
};
use super::{Bar, BarKind};
use crate::state::StateError;

/// Identity of a function.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// Vendor ID.
    pub vendor: u16,
    /// Device ID.
    pub device: u16,
    /// Subsystem vendor ID.
    pub subsystem_vendor: u16,
    /// Subsystem ID.
    pub subsystem: u16,
    /// Class, subclass and programming interface, as 24 bits.
    pub class: u32,
    /// Revision.
    pub revision: u8,
}

/// Capability to add: its ID, the bytes after the two header bytes, and a mask of the bits that the guest may write.
#[derive(Clone, Copy, Debug)]
pub struct Capability<'a> {
    /// Capability ID.
    pub id: u8,
    /// Bytes from offset 2 of the capability on.
    pub body: &'a [u8],
    /// Writable bits of `body`. If `writable` is shorter than `body`, the rest of `body` is read-only.
    pub writable: &'a [u8],
}

/// Bytes of a configuration space that the guest can change. The code of the function determines all other bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigState {
    /// All bytes with bits that the guest may write, in ascending order of their offsets.
    pub registers: Vec<WrittenBytes>,
}

/// Consecutive bytes of configuration space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrittenBytes {
    /// Offset of the first byte.
    pub offset: u16,
    /// Values of the bytes. Bits that the guest may not write are 0.
    pub bytes: Vec<u8>,
}

/// Bytes of configuration space, with a mask of the bits that the guest may write.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: Vec<u8>,
    writable: Vec<u8>,
    bars: Vec<Bar>,
    next_capability: u16,
    last_capability: Option<u16>,
}

impl ConfigSpace {
    /// Creates an endpoint (header type 0) with no BAR and no capability.
    pub fn new(identity: Identity) -> Self {
        let mut space = Self {
            bytes: vec![0; CONFIG_SIZE.into()],
            writable: vec![0; CONFIG_SIZE.into()],
            bars: Vec::new(),
            next_capability: HEADER_END,
            last_capability: None,
        };
        space.preset(VENDOR_ID, &identity.vendor.to_le_bytes());
        space.preset(VENDOR_ID + 2, &identity.device.to_le_bytes());
        let class = (identity.class << 8) | u32::from(identity.revision);
        space.preset(REVISION, &class.to_le_bytes());
        space.preset(SUBSYSTEM_VENDOR_ID, &identity.subsystem_vendor.to_le_bytes());
        space.preset(SUBSYSTEM_ID, &identity.subsystem.to_le_bytes());
        space.allow(COMMAND, &COMMAND_INTX_DISABLE.to_le_bytes());
        space.allow(COMMAND, &COMMAND_BUS_MASTER.to_le_bytes());
        space.allow(INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Sets bytes, even if the guest may not write them. Ignores bytes beyond the space.
    pub fn preset(&mut self, offset: u16, data: &[u8]) {
        for (byte, value) in self.bytes.iter_mut().skip(offset.into()).zip(data) {
            *byte = *value;
        }
    }

    /// Lets the guest write the bits of `mask` from `offset` on. Bits that were writable before stay writable.
    pub fn allow(&mut self, offset: u16, mask: &[u8]) {
        for (byte, value) in self.writable.iter_mut().skip(offset.into()).zip(mask) {
            *byte |= *value;
        }
    }

    /// Adds a base address register. The command bit that enables decoding of this BAR becomes writable.
    ///
    /// # Panics
    /// If the register is already in use, or the size is too small or not a power of two. Only a bug of the device's code causes this.
    pub fn add_bar(&mut self, bar: Bar) {
        let minimum = if bar.kind == BarKind::Io { 4 } else { 16 };
        let last = bar.index + u8::from(bar.kind.is_64bit());
        assert!(bar.size.is_power_of_two() && bar.size >= minimum && last <= 5, "impossible BAR: {bar:?}");
        let taken = |b: &Bar| bar.index <= b.index + u8::from(b.kind.is_64bit()) && b.index <= last;
        assert!(!self.bars.iter().any(taken), "BAR register taken: {bar:?}");
        let offset = BAR0 + 4 * u16::from(bar.index);
        self.preset(offset, &bar.kind.flags().to_le_bytes());
        let mask = !(bar.size - 1);
        let bytes = mask.to_le_bytes();
        self.allow(offset, if bar.kind.is_64bit() { &bytes } else { &bytes[..4] });
        let command = if bar.kind == BarKind::Io { COMMAND_IO } else { COMMAND_MEMORY };
        self.allow(COMMAND, &command.to_le_bytes());
        self.bars.push(bar);
    }

    /// Adds a capability to the end of the list. Returns its offset.
    ///
    /// # Panics
    /// If the 192 bytes for capabilities do not suffice. Only a bug of the device's code causes this.
    pub fn add_capability(&mut self, capability: Capability<'_>) -> u16 {
        let offset = self.next_capability;
        let len = u16::try_from(capability.body.len()).expect("a capability is smaller than 256 bytes") + 2;
        assert!(offset + len <= EXTENDED, "no room for capability {:#x}", capability.id);
        let link = self.last_capability.map_or(CAPABILITIES, |last| last + 1);
        self.preset(link, &[u8::try_from(offset).expect("below 256, checked above")]);
        self.preset(offset, &[capability.id, 0]);
        self.preset(offset + 2, capability.body);
        self.allow(offset + 2, capability.writable);
        self.preset(STATUS, &STATUS_CAPABILITIES.to_le_bytes());
        self.last_capability = Some(offset);
        self.next_capability = (offset + len).next_multiple_of(4);
        offset
    }

    /// Reads bytes. `data` beyond the space stays unchanged.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        for (value, byte) in data.iter_mut().zip(self.bytes.iter().skip(offset.into())) {
            *value = *byte;
        }
    }

    /// Writes bytes as the guest does. Bits that the guest may not write keep their value.
    pub fn write(&mut self, offset: u16, data: &[u8]) {
        let start = usize::from(offset);
        for (at, value) in (start..self.bytes.len()).zip(data) {
            let mask = self.writable[at];
            self.bytes[at] = (self.bytes[at] & !mask) | (value & mask);
        }
    }

    /// Returns a 16-bit register, or 0 beyond the space.
    pub fn word(&self, offset: u16) -> u16 {
        let mut bytes = [0; 2];
        self.read(offset, &mut bytes);
        u16::from_le_bytes(bytes)
    }

    /// Returns a 32-bit register, or 0 beyond the space.
    pub fn dword(&self, offset: u16) -> u32 {
        let mut bytes = [0; 4];
        self.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Returns the base address registers.
    pub fn bars(&self) -> &[Bar] {
        &self.bars
    }

    /// Sets the address in BAR `index`, as firmware would.
    pub fn assign_bar(&mut self, index: u8, address: u64) {
        let Some(bar) = self.bars.iter().find(|bar| bar.index == index).copied() else { return };
        let value = (address & !(bar.size - 1)) | u64::from(bar.kind.flags());
        let bytes = value.to_le_bytes();
        let len = if bar.kind.is_64bit() { 8 } else { 4 };
        self.preset(BAR0 + 4 * u16::from(index), &bytes[..len]);
    }

    /// Returns the address where BAR `index` is decoded. Returns `None` if decoding of its address space is off or the BAR
    /// does not exist.
    pub fn bar_address(&self, index: u8) -> Option<u64> {
        let bar = self.bars.iter().find(|bar| bar.index == index)?;
        let needed = if bar.kind == BarKind::Io { COMMAND_IO } else { COMMAND_MEMORY };
        if self.word(COMMAND) & needed == 0 {
            return None;
        }
        let offset = BAR0 + 4 * u16::from(index);
        let high = if bar.kind.is_64bit() { u64::from(self.dword(offset + 4)) << 32 } else { 0 };
        Some((high | u64::from(self.dword(offset))) & !(bar.size - 1))
    }

    /// Returns the bytes that the guest can change.
    pub fn state(&self) -> ConfigState {
        let written: Vec<(u16, u8)> = (0..CONFIG_SIZE)
            .zip(self.bytes.iter().zip(&self.writable))
            .filter(|(_, (_, mask))| **mask != 0)
            .map(|(offset, (byte, mask))| (offset, byte & mask))
            .collect();
        let runs = written.chunk_by(|before, after| before.0 + 1 == after.0);
        let run =
            |run: &[(u16, u8)]| WrittenBytes { offset: run[0].0, bytes: run.iter().map(|(_, byte)| *byte).collect() };
        ConfigState { registers: runs.map(run).collect() }
    }

    /// Restores the bytes that the guest can change. The caller must apply the effects of these bytes, such as the decoding of BARs.
    ///
    /// # Errors
    /// The state belongs to a function with other registers. In this case nothing has changed.
    pub fn restore(&mut self, state: &ConfigState) -> Result<(), StateError> {
        let shape = |state: &ConfigState| -> Vec<(u16, usize)> {
            state.registers.iter().map(|run| (run.offset, run.bytes.len())).collect()
        };
        if shape(state) != shape(&self.state()) {
            return Err(StateError::rule(
                "registers",
                "the saved registers differ from the registers that a guest may write in this function: restore with the configuration that was saved",
            ));
        }
        let bytes = state.registers.iter().flat_map(|run| (run.offset..).zip(&run.bytes));
        if let Some((offset, _)) =
            bytes.clone().find(|(offset, byte)| **byte & !self.writable[usize::from(*offset)] != 0)
        {
            let rule = "the saved byte has bits that the guest may not write: restore from an unmodified snapshot";
            return Err(StateError::rule(format!("registers: byte at {offset:#x}"), rule));
        }
        bytes.for_each(|(offset, byte)| self.write(offset, &[*byte]));
        Ok(())
    }

    /// True if the function may do DMA.
    pub fn is_bus_master(&self) -> bool {
        self.word(COMMAND) & COMMAND_BUS_MASTER != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::regs::CAP_VENDOR;

    fn space() -> ConfigSpace {
        let mut space = ConfigSpace::new(Identity {
            vendor: 0x1af4,
            device: 0x1057,
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
            class: 0x08_8000,
            revision: 1,
        });
        space.add_bar(Bar { index: 0, kind: BarKind::Memory32 { prefetchable: false }, size: 0x1000 });
        space.add_bar(Bar { index: 2, kind: BarKind::Memory64 { prefetchable: true }, size: 1 << 33 });
        space
    }

    #[test]
    fn bar_written_with_ones_reads_its_size() {
        let mut space = space();
        space.write(BAR0, &[0xff; 4]);
        space.write(BAR0 + 8, &[0xff; 8]);
        assert_eq!(space.dword(BAR0), 0xffff_f000);
        assert_eq!(space.dword(BAR0 + 8), 0x0000_000c);
        assert_eq!(space.dword(BAR0 + 12), 0xffff_fffe);
    }

    #[test]
    fn bar_is_decoded_only_while_memory_space_is_on() {
        let mut space = space();
        space.assign_bar(2, 0x40_0000_0000);
        assert_eq!(space.bar_address(2), None);
        space.write(COMMAND, &COMMAND_MEMORY.to_le_bytes());
        assert_eq!(space.bar_address(2), Some(0x40_0000_0000));
        assert_eq!(space.bar_address(1), None);
    }

    #[test]
    fn read_only_registers_keep_their_value() {
        let mut space = space();
        space.write(VENDOR_ID, &[0, 0, 0, 0]);
        assert_eq!(space.dword(VENDOR_ID), 0x1057_1af4);
        space.write(COMMAND, &[0xff, 0xff]);
        assert_eq!(space.word(COMMAND), COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE);
    }

    #[test]
    fn capabilities_form_a_list() {
        let mut space = space();
        let first = space.add_capability(Capability { id: CAP_VENDOR, body: &[5, 1, 2], writable: &[0, 0xff] });
        let second = space.add_capability(Capability { id: CAP_VENDOR, body: &[7; 6], writable: &[] });
        let mut bytes = [0; 1];
        space.read(CAPABILITIES, &mut bytes);
        assert_eq!(u16::from(bytes[0]), first);
        space.read(first + 1, &mut bytes);
        assert_eq!(u16::from(bytes[0]), second);
        assert_ne!(space.word(STATUS) & STATUS_CAPABILITIES, 0);
        space.write(first + 2, &[9, 9, 9]);
        let mut body = [0; 3];
        space.read(first + 2, &mut body);
        assert_eq!(body, [5, 9, 2]);
    }

    #[test]
    fn restored_space_reads_as_the_one_that_was_saved() {
        let mut old = space();
        old.add_capability(Capability { id: CAP_VENDOR, body: &[5, 1, 2], writable: &[0, 0x0f] });
        let mut new = old.clone();
        old.assign_bar(0, 0xe000_0000);
        old.assign_bar(2, 0x40_0000_0000);
        old.write(COMMAND, &COMMAND_MEMORY.to_le_bytes());
        old.write(HEADER_END + 3, &[0xff]);
        let text = serde_json::to_string(&old.state()).unwrap();
        new.restore(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(new.state(), old.state());
        assert_eq!(new.bytes, old.bytes);
        assert_eq!(new.bar_address(2), Some(0x40_0000_0000));
    }

    #[test]
    fn impossible_state_is_refused_and_leaves_space_unchanged() {
        let mut space = space();
        let good = space.state();
        let spoil = |change: fn(&mut ConfigState)| {
            let mut state = good.clone();
            change(&mut state);
            state
        };
        for state in [
            ConfigState::default(),
            spoil(|state| drop(state.registers.pop())),
            spoil(|state| state.registers[0].offset += 1),
            spoil(|state| state.registers[0].bytes.push(0)),
            spoil(|state| state.registers[0].bytes[0] = 0xff),
            spoil(|state| state.registers.last_mut().unwrap().offset = u16::MAX),
            spoil(|state| state.registers.reverse()),
        ] {
            assert!(space.restore(&state).is_err(), "{state:?}");
            assert_eq!(space.state(), good);
        }
    }

    #[test]
    fn accesses_beyond_the_space_are_dropped() {
        let mut space = space();
        space.write(4095, &[1, 2, 3, 4]);
        let mut bytes = [0xee; 4];
        space.read(4095, &mut bytes);
        assert_eq!(bytes, [0, 0xee, 0xee, 0xee]);
    }
}
