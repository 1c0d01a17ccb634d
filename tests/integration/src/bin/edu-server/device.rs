// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Edu device (QEMU, docs/specs/edu.rst), with the registers that the tests' drivers use.

/// Size of BAR 0, in bytes.
pub(crate) const BAR_SIZE: u64 = 1 << 20;
/// Size of configuration space, in bytes.
pub(crate) const CONFIG_SIZE: usize = 256;
/// Address of the device's buffer, as drivers write it to the DMA registers, and length of the buffer.
const BUFFER: u64 = 0x4_0000;
const BUFFER_SIZE: usize = 4096;

const ID: u64 = 0x00;
const LIVENESS: u64 = 0x04;
const INTERRUPT_STATUS: u64 = 0x24;
const INTERRUPT_RAISE: u64 = 0x60;
const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;
const DMA_SOURCE: u64 = 0x80;
const DMA_TARGET: u64 = 0x88;
const DMA_COUNT: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;

const START: u64 = 1;
const TO_MEMORY: u64 = 2;
const INTERRUPT_AFTERWARDS: u64 = 4;
/// Bit that a transfer sets in the interrupt status.
const DMA_INTERRUPT: u32 = 0x100;

/// DMA transfer that the driver has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// True for a transfer to memory, false for a transfer from memory.
    pub(crate) to_memory: bool,
    /// DMA address of the memory.
    pub(crate) address: u64,
    /// Offset in the device's buffer.
    pub(crate) offset: usize,
    /// Length in bytes.
    pub(crate) len: usize,
}

/// Edu device.
pub(crate) struct Edu {
    pub(crate) config: [u8; CONFIG_SIZE],
    mask: u64,
    liveness: u32,
    interrupts: u32,
    source: u64,
    target: u64,
    count: u64,
    command: u64,
    pub(crate) buffer: [u8; BUFFER_SIZE],
}

impl Edu {
    /// Creates the device in its power-on state. The device ignores those bits of DMA addresses that are not in `mask`.
    pub(crate) fn new(mask: u64) -> Self {
        let mut config = [0; CONFIG_SIZE];
        let mut set = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        // The first write sets the vendor and device IDs, the status (the device has a capability list), the revision, and the
        // class (other). The next two writes set the start of the capability list and the interrupt pin.
        set(0x00, &[0x34, 0x12, 0xe8, 0x11, 0, 0, 0x10, 0, 0x10, 0, 0xff, 0]);
        set(0x34, &[0x40]);
        set(0x3d, &[1]);
        // MSI with one vector and a 64-bit address.
        set(0x40, &[0x05, 0, 0x80, 0]);
        let (liveness, interrupts, source, target, count, command) = (0, 0, 0, 0, 0, 0);
        Self { config, mask, liveness, interrupts, source, target, count, command, buffer: [0; BUFFER_SIZE] }
    }

    /// Reads from BAR 0.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let (register, within) =
            if offset < DMA_SOURCE { (offset & !3, offset & 3) } else { (offset & !7, offset & 7) };
        let value = match register {
            ID => 0x0100_00ed,
            LIVENESS => u64::from(!self.liveness),
            INTERRUPT_STATUS => u64::from(self.interrupts),
            DMA_SOURCE => self.source,
            DMA_TARGET => self.target,
            DMA_COUNT => self.count,
            DMA_COMMAND => self.command,
            _ => 0,
        };
        let bytes = value.to_le_bytes();
        for (byte, value) in data.iter_mut().zip(bytes.iter().skip(usize::try_from(within).unwrap_or(8))) {
            *byte = *value;
        }
    }

    /// Writes to BAR 0. Returns true if an interrupt must be raised.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> bool {
        let mut bytes = [0; 8];
        let len = data.len().min(8);
        bytes[..len].copy_from_slice(&data[..len]);
        let value = u64::from_le_bytes(bytes);
        let [low, ..] = bytes.as_chunks::<4>().0 else { return false };
        let half = u32::from_le_bytes(*low);
        match offset {
            LIVENESS => self.liveness = half,
            INTERRUPT_RAISE => {
                self.interrupts |= half;
                return true;
            }
            INTERRUPT_ACKNOWLEDGE => self.interrupts &= !half,
            _ => {
                let register = match offset & !7 {
                    DMA_SOURCE => &mut self.source,
                    DMA_TARGET => &mut self.target,
                    DMA_COUNT => &mut self.count,
                    DMA_COMMAND => &mut self.command,
                    _ => return false,
                };
                *register = match (offset & 7, data.len()) {
                    (0, 8) => value,
                    (0, _) => (*register & !u64::from(u32::MAX)) | u64::from(half),
                    _ => (*register & u64::from(u32::MAX)) | (u64::from(half) << 32),
                };
            }
        }
        false
    }

    /// Returns the started transfer, if any. A transfer beyond the buffer is cancelled.
    pub(crate) fn started(&mut self) -> Option<Transfer> {
        if self.command & START == 0 {
            return None;
        }
        let to_memory = self.command & TO_MEMORY != 0;
        let (address, place) = if to_memory { (self.target, self.source) } else { (self.source, self.target) };
        let offset = place.checked_sub(BUFFER).and_then(|offset| usize::try_from(offset).ok());
        let len = usize::try_from(self.count).ok();
        let fits = |offset: usize, len: usize| offset.checked_add(len).is_some_and(|end| end <= BUFFER_SIZE);
        match (offset, len) {
            (Some(offset), Some(len)) if fits(offset, len) => {
                Some(Transfer { to_memory, address: address & self.mask, offset, len })
            }
            _ => {
                self.command &= !START;
                None
            }
        }
    }

    /// Ends the transfer. Returns true if an interrupt must be raised.
    pub(crate) fn finish(&mut self) -> bool {
        let interrupt = self.command & INTERRUPT_AFTERWARDS != 0;
        self.command &= !START;
        if interrupt {
            self.interrupts |= DMA_INTERRUPT;
        }
        interrupt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_of_64_bits_are_written_whole_or_by_halves() {
        let mut edu = Edu::new(u64::MAX);
        edu.write(DMA_SOURCE, &0x1122_3344_5566_7788u64.to_le_bytes());
        edu.write(DMA_TARGET, &0x5566_7788u32.to_le_bytes());
        edu.write(DMA_TARGET + 4, &0x1122_3344u32.to_le_bytes());
        for register in [DMA_SOURCE, DMA_TARGET] {
            let (mut whole, mut high) = ([0; 8], [0; 4]);
            edu.read(register, &mut whole);
            edu.read(register + 4, &mut high);
            assert_eq!((u64::from_le_bytes(whole), u32::from_le_bytes(high)), (0x1122_3344_5566_7788, 0x1122_3344));
        }
        edu.write(LIVENESS, &0xffu32.to_le_bytes());
        let mut data = [0; 4];
        edu.read(LIVENESS, &mut data);
        assert_eq!(u32::from_le_bytes(data), !0xff);
    }

    #[test]
    fn transfer_stays_in_the_buffer_and_within_the_address_bits() {
        let mut edu = Edu::new((1 << 28) - 1);
        edu.write(DMA_SOURCE, &(0xf_1234_5000u64).to_le_bytes());
        edu.write(DMA_TARGET, &(BUFFER + 96).to_le_bytes());
        edu.write(DMA_COUNT, &4000u64.to_le_bytes());
        assert_eq!(edu.started(), None);
        edu.write(DMA_COMMAND, &(START | INTERRUPT_AFTERWARDS).to_le_bytes());
        let transfer = Transfer { to_memory: false, address: 0x234_5000, offset: 96, len: 4000 };
        assert_eq!(edu.started(), Some(transfer));
        assert!(edu.finish());
        assert_eq!(edu.started(), None);
        edu.write(DMA_COUNT, &4001u64.to_le_bytes());
        edu.write(DMA_COMMAND, &START.to_le_bytes());
        assert_eq!(edu.started(), None);
    }
}
