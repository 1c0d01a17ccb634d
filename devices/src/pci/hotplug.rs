// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers for hotplug on the root buses. The guest's ACPI methods read two registers to learn which devices were added or must be
//! removed. The methods write another register to release devices.
//!
//! | offset | register | access |
//! | --- | --- | --- |
//! | 0 | devices added since the last read; a read clears the register | read |
//! | 4 | devices whose removal was requested since the last read; a read clears the register | read |
//! | 8 | devices that the guest has released | write |
//!
//! Each register has 32 bits, bit n for device n of the bus, and accepts only 32-bit accesses. Each segment has its own registers, a
//! [`HotplugBank`]. All segments share one interrupt line. The line is active while the first or second register of any segment has a
//! bit set. So a guest that enables the interrupt late misses no event.

use std::sync::{Arc, Mutex};

use log::{debug, info};
use serde::{Deserialize, Serialize};

use super::{PciAddress, PciRoot};
use crate::platform::{BusDevice, InterruptLine};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;

/// Offset of the register of added devices.
const CAME: u64 = 0;
/// Offset of the register of devices that must be removed.
const TO_GO: u64 = 4;
/// Offset of the register of devices that the guest has released.
const EJECT: u64 = 8;

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("pci-hotplug", 1);

/// Saved state: added devices whose bits the guest has not read yet.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HotplugState {
    /// Devices of segment 0. Bit n is set if device n was added.
    came: u32,
    /// Devices of segments 1 and up, with one mask for each segment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    came_on_others: Vec<u32>,
}

/// Registers of a segment.
#[derive(Clone, Default)]
struct State {
    came: u32,
    to_go: u32,
    /// Devices that must be removed and that the guest has not released yet.
    leaving: u32,
    /// Devices that have left the bus and that [`HotplugRegisters::take_gone`] has not returned yet.
    gone: u32,
}

/// Registers of all segments.
pub struct HotplugRegisters {
    /// Registers of each segment. Lock this mutex before the locks of the bus. The bus never calls back into this type.
    states: Mutex<Vec<State>>,
    root: Arc<PciRoot>,
    line: Box<dyn InterruptLine>,
    /// Called on a vCPU's thread after a device has left the bus.
    left: Box<dyn Fn() + Send + Sync>,
}

/// Returns the bit of a device, or 0 if the number is too large.
fn bit(device: u8) -> u32 {
    1u32.checked_shl(device.into()).unwrap_or(0)
}

fn devices(mask: u32) -> impl Iterator<Item = u8> {
    (0..32).filter(move |device| mask & bit(*device) != 0)
}

impl HotplugRegisters {
    /// Size of the registers of a segment, in bytes.
    pub const LEN: u64 = 12;

    /// Creates registers for the devices of `root`. `left` is called on a vCPU's thread after the guest has released a device and the
    /// device has left the bus.
    pub fn new(root: Arc<PciRoot>, line: Box<dyn InterruptLine>, left: Box<dyn Fn() + Send + Sync>) -> Self {
        let states = Mutex::new(vec![State::default(); root.segments().into()]);
        Self { states, root, line, left }
    }

    /// Notifies the guest that the device at `address` was added to its bus.
    pub fn announce(&self, address: PciAddress) {
        let mut states = lock(&self.states);
        if let Some(state) = states.get_mut(usize::from(address.segment)) {
            state.came |= bit(address.device);
            self.drive(&states);
        }
    }

    /// Asks the guest to release the device at `address`, even if the guest was asked before. Does nothing if no device is at this address.
    /// In this case the guest has already released the device, and the request must not affect the next device at this address.
    pub fn request(&self, address: PciAddress) {
        // The lock is also held while a device leaves the bus, so the device cannot leave between the check and the request.
        let mut states = lock(&self.states);
        if !self.root.devices().iter().any(|(at, _)| *at == address) {
            return;
        }
        if let Some(state) = states.get_mut(usize::from(address.segment)) {
            state.to_go |= bit(address.device);
            state.leaving |= bit(address.device);
            self.drive(&states);
        }
    }

    /// Returns the addresses of the devices that have left their bus since the last call.
    pub fn take_gone(&self) -> Vec<PciAddress> {
        let of_segment = |(segment, state): (u16, &mut State)| {
            devices(std::mem::take(&mut state.gone)).map(move |device| PciAddress::on_segment(segment, device))
        };
        (0..).zip(lock(&self.states).iter_mut()).flat_map(of_segment).collect()
    }

    /// Resets the registers to their values at power-on. All devices that must be removed leave the bus, because no guest uses them any
    /// more. Call this function while all vCPUs are stopped.
    pub fn reset(&self) {
        let mut states = lock(&self.states);
        for (segment, state) in (0..).zip(states.iter_mut()) {
            self.remove(segment, state, state.leaving);
            *state = State { gone: state.gone, ..State::default() };
        }
        self.drive(&states);
    }

    /// Returns the state of the registers. Call this function while all vCPUs are stopped.
    ///
    /// # Errors
    /// A device is being removed. The guest still uses the device, but the restored VM would not have it.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        let states = lock(&self.states);
        if states.iter().any(|state| state.leaving | state.gone != 0) {
            return Err(StateError::Unsupported(
                "the VM cannot be saved while a device is being removed; save the VM after the guest has released the device",
            ));
        }
        let mut came = states.iter().map(|state| state.came);
        let came = HotplugState { came: came.next().unwrap_or(0), came_on_others: came.collect() };
        DeviceState::new(STATE.0, STATE.1, &came)
    }

    /// Restores `saved` into registers that were just created or reset, and sets the interrupt line. Before this call, the interrupt
    /// controllers must be restored, and all devices must be on the bus.
    ///
    /// # Errors
    /// The saved state is invalid, or does not match the bus. In this case nothing has changed.
    pub fn restore(&self, saved: &DeviceState) -> Result<(), StateError> {
        let HotplugState { came, came_on_others } = saved.payload(STATE.0, STATE.1)?;
        let came: Vec<u32> = [came].into_iter().chain(came_on_others).collect();
        let mut states = lock(&self.states);
        if came.len() != states.len() {
            let rule = format!(
                "the saved state has {} PCI segments, but this VM has {}: restore with the configuration that was saved",
                came.len(),
                states.len()
            );
            return Err(StateError::rule("came", rule));
        }
        let there = self.root.devices();
        for (segment, came) in (0..).zip(&came) {
            let here = there.iter().filter(|(address, _)| address.segment == segment);
            let on_bus = here.fold(0, |mask, (address, _)| mask | bit(address.device));
            if came & !on_bus != 0 {
                let rule = format!(
                    "the saved bits {:#x} belong to devices that are not on the bus: restore from an unmodified snapshot",
                    came & !on_bus
                );
                return Err(StateError::rule("came", rule));
            }
        }
        states.iter_mut().zip(came).for_each(|(state, came)| state.came = came);
        self.drive(&states);
        Ok(())
    }

    /// Removes devices from their bus.
    fn remove(&self, segment: u16, state: &mut State, mask: u32) {
        for device in devices(mask) {
            if let Some(function) = self.root.remove(PciAddress::on_segment(segment, device)) {
                info!("{}: removed from the bus", function.id());
            }
        }
        state.came &= !mask;
        state.to_go &= !mask;
        state.leaving &= !mask;
        state.gone |= mask;
    }

    fn drive(&self, states: &[State]) {
        let active = states.iter().any(|state| state.came | state.to_go != 0);
        if let Err(error) = self.line.set(active) {
            // Log this at debug level, because a guest could flood the log with warnings.
            debug!("hotplug: cannot set the interrupt line: {error}");
        }
    }
}

/// Registers of one segment, for the guest.
pub struct HotplugBank {
    registers: Arc<HotplugRegisters>,
    segment: u16,
}

impl HotplugBank {
    /// Creates the registers of `segment`.
    pub fn new(registers: Arc<HotplugRegisters>, segment: u16) -> Self {
        Self { registers, segment }
    }
}

impl BusDevice for HotplugBank {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return };
        let mut states = lock(&self.registers.states);
        let Some(state) = states.get_mut(usize::from(self.segment)) else { return };
        let register = match offset {
            CAME => &mut state.came,
            TO_GO => &mut state.to_go,
            _ => return,
        };
        *data = std::mem::take(register).to_le_bytes();
        self.registers.drive(&states);
    }

    /// Removes the devices that the guest releases. A device whose removal was not requested stays, because the guest cannot change the
    /// VM's configuration.
    fn write(&self, offset: u64, data: &[u8]) {
        let (EJECT, Ok(data)) = (offset, <[u8; 4]>::try_from(data)) else { return };
        let mut states = lock(&self.registers.states);
        let Some(state) = states.get_mut(usize::from(self.segment)) else { return };
        let mask = u32::from_le_bytes(data) & state.leaving;
        self.registers.remove(self.segment, state, mask);
        self.registers.drive(&states);
        drop(states);
        if mask != 0 {
            (self.registers.left)();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;

    use super::*;
    use crate::pci::tests::{Function, machine};
    use crate::platform::test_support::FakeLine;

    struct Rig {
        registers: Arc<HotplugRegisters>,
        root: Arc<PciRoot>,
        line: FakeLine,
        left: Arc<AtomicUsize>,
    }

    fn rig() -> Rig {
        let (line, left) = (FakeLine::default(), Arc::new(AtomicUsize::new(0)));
        let root = machine().root;
        let count = left.clone();
        let called = Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        let registers = Arc::new(HotplugRegisters::new(root.clone(), Box::new(line.clone()), called));
        Rig { registers, root, line, left }
    }

    impl Rig {
        fn plug(&self, device: u8) {
            self.plug_on(0, device);
        }

        fn plug_on(&self, segment: u16, device: u8) {
            let address = PciAddress::on_segment(segment, device);
            self.root.add(address, Function::new(device, &[])).unwrap();
            self.registers.announce(address);
        }

        fn request(&self, device: u8) {
            self.registers.request(PciAddress::on_root_bus(device));
        }

        /// Returns the devices of segment 0 that have left the bus.
        fn gone(&self) -> Vec<u8> {
            self.registers.take_gone().iter().map(|address| address.device).collect()
        }

        fn bank(&self, segment: u16) -> HotplugBank {
            HotplugBank::new(self.registers.clone(), segment)
        }

        fn read(&self, offset: u64) -> u32 {
            let mut data = [0xff; 4];
            self.bank(0).read(offset, &mut data);
            u32::from_le_bytes(data)
        }

        fn eject(&self, mask: u32) {
            self.bank(0).write(EJECT, &mask.to_le_bytes());
        }

        fn is_up(&self) -> bool {
            self.line.is_up()
        }

        /// Returns the devices on the bus except the host bridge.
        fn on_bus(&self) -> Vec<u8> {
            self.root.devices().iter().map(|(address, _)| address.device).filter(|device| *device != 0).collect()
        }
    }

    #[test]
    fn line_is_up_until_the_guest_has_read_everything() {
        let rig = rig();
        rig.plug(2);
        rig.plug(31);
        rig.request(2);
        assert!(rig.is_up());
        assert_eq!(rig.read(CAME), (1 << 2) | (1 << 31));
        assert!(rig.is_up(), "a device must be removed");
        assert_eq!(rig.read(TO_GO), 1 << 2);
        assert!(!rig.is_up());
        assert_eq!((rig.read(CAME), rig.read(TO_GO), rig.read(EJECT)), (0, 0, 0));
        assert_eq!(rig.on_bus(), [2, 31], "the guest has not released device 2");
    }

    #[test]
    fn only_a_device_that_the_guest_releases_leaves() {
        let rig = rig();
        rig.plug(2);
        rig.plug(3);
        rig.request(3);
        rig.eject(u32::MAX);
        assert_eq!(rig.on_bus(), [2]);
        assert_eq!((rig.gone(), rig.left.load(Ordering::Relaxed)), (vec![3], 1));
        rig.eject(u32::MAX);
        assert_eq!((rig.gone(), rig.left.load(Ordering::Relaxed)), (vec![], 1));
        // A new device gets the address. The removal of the new device was not requested.
        rig.plug(3);
        rig.eject(1 << 3);
        assert_eq!(rig.on_bus(), [2, 3]);
    }

    #[test]
    fn removal_request_is_repeated_until_the_guest_releases() {
        let rig = rig();
        rig.plug(4);
        for _ in 0..3 {
            rig.request(4);
            assert_eq!((rig.is_up(), rig.read(TO_GO)), (true, 1 << 4));
        }
        rig.eject(1 << 4);
        assert!(rig.on_bus().is_empty());
        rig.read(CAME);
        assert!(!rig.is_up());
    }

    /// The guest has released a device. The caller does not know this yet, and repeats the request.
    #[test]
    fn late_removal_request_does_not_affect_next_device_in_slot() {
        let rig = rig();
        rig.plug(3);
        rig.read(CAME);
        rig.request(3);
        rig.eject(1 << 3);
        rig.request(3);
        assert_eq!((rig.is_up(), rig.read(TO_GO)), (false, 0), "no device to release");
        assert_eq!(rig.gone(), [3]);
        rig.registers.save().unwrap();
        rig.plug(3);
        rig.eject(1 << 3);
        assert_eq!((rig.on_bus(), rig.gone()), (vec![3], vec![]));
        rig.registers.reset();
        assert_eq!((rig.on_bus(), rig.gone()), (vec![3], vec![]));
    }

    #[test]
    fn reset_completes_requested_removals() {
        let rig = rig();
        rig.plug(2);
        rig.plug(3);
        rig.request(3);
        rig.registers.reset();
        assert!(!rig.is_up());
        assert_eq!((rig.on_bus(), rig.gone()), (vec![2], vec![3]));
        assert_eq!((rig.read(CAME), rig.read(TO_GO)), (0, 0));
    }

    #[test]
    fn restored_hotplug_registers_report_pending_arrivals() {
        let old = rig();
        old.plug(2);
        let state = old.registers.save().unwrap();
        let new = rig();
        let refused = new.registers.restore(&state).unwrap_err().to_string();
        assert_eq!(
            refused,
            "came: the saved bits 0x4 belong to devices that are not on the bus: restore from an unmodified snapshot"
        );
        assert!(!new.is_up());
        new.root.add(PciAddress::on_root_bus(2), Function::new(2, &[])).unwrap();
        new.registers.restore(&state).unwrap();
        assert_eq!(new.registers.save().unwrap(), state);
        assert!(new.is_up());
        assert_eq!(new.read(CAME), 1 << 2);
        old.request(2);
        assert!(old.registers.save().is_err(), "a device must be removed");
    }

    #[test]
    fn accesses_of_other_widths_and_places_do_nothing() {
        let rig = rig();
        rig.plug(2);
        rig.request(2);
        for len in [0, 1, 2, 3, 8] {
            let mut data = vec![0xff; len];
            rig.bank(0).read(CAME, &mut data);
            assert_eq!(data, vec![0; len]);
            rig.bank(0).write(EJECT, &vec![0xff; len]);
        }
        for offset in [0, 1, 4, 7, 9, 12, u64::MAX] {
            rig.bank(0).write(offset, &[0xff; 4]);
        }
        assert_eq!((rig.on_bus(), rig.read(CAME)), (vec![2], 1 << 2));
    }

    #[test]
    fn segments_have_own_registers_and_share_one_line() {
        let rig = rig();
        rig.plug(2);
        rig.plug_on(1, 2);
        let bank = rig.bank(1);
        let read = |offset| {
            let mut data = [0; 4];
            bank.read(offset, &mut data);
            u32::from_le_bytes(data)
        };
        let state = rig.registers.save().unwrap();
        assert_eq!(read(CAME), 1 << 2);
        assert!(rig.is_up(), "segment 0 has a new device");
        assert_eq!((rig.read(CAME), rig.is_up()), (1 << 2, false));
        rig.registers.restore(&state).unwrap();
        assert_eq!((rig.read(CAME), rig.is_up()), (1 << 2, true));
        assert_eq!((read(CAME), rig.is_up()), (1 << 2, false));
        let place = PciAddress::on_segment(1, 2);
        rig.registers.request(place);
        rig.eject(1 << 2);
        assert_eq!((rig.registers.take_gone(), read(TO_GO)), (vec![], 1 << 2), "the eject was for segment 0");
        bank.write(EJECT, &(1u32 << 2).to_le_bytes());
        assert_eq!(rig.registers.take_gone(), [place]);
        assert_eq!(rig.on_bus(), [2]);
        // Segment 2 does not exist.
        let mut data = [0xff; 4];
        rig.bank(2).read(CAME, &mut data);
        rig.bank(2).write(EJECT, &[0xff; 4]);
        assert_eq!(data, [0; 4]);
    }

    proptest! {
        /// Checks that no sequence of guest reads and writes removes a device whose removal was not requested.
        #[test]
        fn guest_decides_only_when_a_device_leaves(
            steps in prop::collection::vec((0u8..4, 2u8..6, any::<u32>(), 0u64..13), 0..60),
        ) {
            let rig = rig();
            let mut there = std::collections::BTreeSet::new();
            let mut leaving = std::collections::BTreeSet::new();
            for (step, device, value, offset) in steps {
                match step {
                    0 if there.insert(device) => rig.plug(device),
                    1 => {
                        rig.request(device);
                        if there.contains(&device) {
                            leaving.insert(device);
                        }
                    }
                    2 => drop(rig.read(offset)),
                    3 => {
                        rig.bank(0).write(offset, &value.to_le_bytes());
                        if offset == EJECT {
                            let going: Vec<u8> = leaving.iter().copied().filter(|at| value & bit(*at) != 0).collect();
                            going.iter().for_each(|at| {
                                there.remove(at);
                                leaving.remove(at);
                            });
                            prop_assert_eq!(rig.gone(), going);
                        }
                    }
                    _ => {}
                }
                prop_assert_eq!(rig.on_bus(), there.iter().copied().collect::<Vec<_>>());
            }
        }
    }
}
