// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest's view of a device's configuration space. Some bits are emulated. The guest reads and writes all other bits in the device.

use super::host_function::ConfigAccess;
use crate::pci::{Bar, ConfigSpace, Identity, regs};

const SIZE: usize = regs::CONFIG_SIZE as usize;

/// Emulated bits of configuration space, and their values.
#[derive(Clone, Debug)]
pub(crate) struct ConfigView {
    /// Values of the emulated bits as the guest reads them, and a mask of the emulated bits that the guest may write.
    space: ConfigSpace,
    emulated: Vec<u8>,
    /// Values that Carom writes to the device in emulated bits. Carom always writes whole bytes to the device. If a byte contains emulated
    /// bits and device bits, Carom replaces the guest's values of the emulated bits by these values.
    host: Vec<u8>,
}

impl ConfigView {
    /// Creates a view that emulates only the BARs and the bits of the command register that enable decoding of the BARs.
    pub(crate) fn new(bars: &[Bar]) -> Self {
        let nobody = Identity { vendor: 0, device: 0, subsystem_vendor: 0, subsystem: 0, class: 0, revision: 0 };
        let mut view = Self { space: ConfigSpace::new(nobody), emulated: vec![0; SIZE], host: vec![0; SIZE] };
        let decoding = regs::COMMAND_IO | regs::COMMAND_MEMORY;
        view.mark(regs::COMMAND, &decoding.to_le_bytes());
        view.mark(regs::BAR0, &[0xff; 24]);
        for bar in bars {
            view.space.add_bar(*bar);
        }
        view
    }

    fn mark(&mut self, offset: u16, mask: &[u8]) {
        for (bits, more) in self.emulated.iter_mut().skip(offset.into()).zip(mask) {
            *bits |= more;
        }
    }

    /// Emulates the bits of `mask` from `offset` on. The guest reads these bits as in `value`, and may write the bits of `writable`.
    pub(crate) fn emulate(&mut self, offset: u16, mask: &[u8], value: &[u8], writable: &[u8]) {
        let mut bytes = vec![0; mask.len()];
        self.space.read(offset, &mut bytes);
        for ((byte, mask), value) in bytes.iter_mut().zip(mask).zip(value) {
            *byte = (*byte & !mask) | (value & mask);
        }
        self.space.preset(offset, &bytes);
        self.space.allow(offset, writable);
        self.mark(offset, mask);
    }

    /// Emulates the bytes from `offset` on. The guest reads `value`, and cannot change these bytes.
    pub(crate) fn fix(&mut self, offset: u16, value: &[u8]) {
        self.emulate(offset, &vec![0xff; value.len()], value, &[]);
    }

    /// Sets the values that Carom writes to the device in emulated bits, for the bytes from `offset` on. These values matter only in bytes
    /// that also have device bits.
    pub(crate) fn pin(&mut self, offset: u16, value: &[u8]) {
        for (byte, value) in self.host.iter_mut().skip(offset.into()).zip(value) {
            *byte = *value;
        }
    }

    /// Returns the 16 bits that [`pin`](Self::pin) has set at `offset`.
    pub(crate) fn pinned(&self, offset: u16) -> u16 {
        let at = usize::from(offset);
        u16::from_le_bytes([self.host[at], self.host[at + 1]])
    }

    /// Serves a read by the guest.
    pub(crate) fn read(&self, config: &dyn ConfigAccess, offset: u16, data: &mut [u8]) {
        let range = usize::from(offset)..usize::from(offset) + data.len();
        let Some(masks) = self.emulated.get(range) else { return };
        data.fill(0xff);
        if masks.iter().any(|mask| *mask != 0xff) {
            config.read_config(offset, data);
        }
        let mut emulated = vec![0; data.len()];
        self.space.read(offset, &mut emulated);
        for ((byte, value), mask) in data.iter_mut().zip(emulated).zip(masks) {
            *byte = (*byte & !mask) | (value & mask);
        }
    }

    /// Serves a write by the guest. Emulated bits change in this view. All other bits change in the device. Carom writes consecutive bytes
    /// to the device in one access. A byte whose bits are all emulated is not written, and splits the access.
    pub(crate) fn write(&mut self, config: &dyn ConfigAccess, offset: u16, data: &[u8]) {
        let start = usize::from(offset);
        let (Some(masks), Some(host)) =
            (self.emulated.get(start..start + data.len()), self.host.get(start..start + data.len()))
        else {
            return;
        };
        let passed: Vec<u8> =
            data.iter().zip(masks).zip(host).map(|((byte, mask), host)| (byte & !mask) | (host & mask)).collect();
        let mut at = 0;
        for run in masks.chunk_by(|a, b| (*a == 0xff) == (*b == 0xff)) {
            let end = at + run.len();
            if let (true, Ok(place)) = (run[0] != 0xff, u16::try_from(start + at)) {
                config.write_config(place, &passed[at..end]);
            }
            at = end;
        }
        self.space.write(offset, data);
    }

    /// Returns the emulated bits of a 16-bit register.
    pub(crate) fn word(&self, offset: u16) -> u16 {
        self.space.word(offset)
    }

    /// Returns the emulated bits of a 32-bit register.
    pub(crate) fn dword(&self, offset: u16) -> u32 {
        self.space.dword(offset)
    }

    /// Sets the address of BAR `index`, as firmware would do.
    pub(crate) fn assign_bar(&mut self, index: u8, address: u64) {
        self.space.assign_bar(index, address);
    }

    /// Returns the address where BAR `index` is decoded.
    pub(crate) fn bar_address(&self, index: u8) -> Option<u64> {
        self.space.bar_address(index)
    }
}
