// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of bus use: bus mastering, power states and pauses of the VM.

use super::{COMMON, Harness};
use crate::pci::PciDevice;
use crate::pci::regs::{CAP_PM, COMMAND_BUS_MASTER, COMMAND_MEMORY, PM_CONTROL};
use crate::sync::lock;

const ON: u16 = COMMAND_MEMORY | COMMAND_BUS_MASTER;
const D0: u8 = 0;
const D3HOT: u8 = 3;
const NONE: [bool; 0] = [];

impl Harness {
    /// Returns the calls of `pause` (true) and `resume` (false) since the last call of this function.
    fn pauses(&self) -> Vec<bool> {
        std::mem::take(&mut lock(&self.recorder.pauses))
    }

    fn set_power_state(&self, state: u8) {
        self.function.write_config(self.capabilities(CAP_PM)[0] + PM_CONTROL, &[state]);
    }
}

#[test]
fn device_is_paused_while_bus_mastering_is_off() {
    let harness = Harness::new();
    assert_eq!(harness.pauses(), [true, false], "off at power-on, then turned on");
    harness.start();
    harness.write_command(COMMAND_MEMORY);
    harness.write_command(COMMAND_MEMORY);
    assert_eq!(harness.pauses(), [true]);
    harness.write_command(ON);
    harness.write_command(ON);
    assert_eq!(harness.pauses(), [false]);
    harness.function.reset().unwrap();
    assert_eq!(harness.pauses(), [true], "off after a reset");
}

#[test]
fn device_is_paused_outside_of_d0() {
    let harness = Harness::new();
    harness.start();
    harness.pauses();
    harness.set_power_state(D3HOT);
    assert_eq!(harness.pauses(), [true]);
    harness.write_command(COMMAND_MEMORY);
    harness.set_power_state(D0);
    assert_eq!(harness.pauses(), NONE, "bus mastering is off");
    harness.set_power_state(D3HOT);
    harness.write_command(ON);
    assert_eq!(harness.pauses(), NONE, "the device is in D3hot");
    harness.set_power_state(D0);
    assert_eq!(harness.pauses(), [false]);
}

#[test]
fn resumed_vm_leaves_a_device_off_the_bus_paused() {
    let harness = Harness::new();
    harness.start();
    harness.write_command(COMMAND_MEMORY);
    harness.pauses();
    harness.function.pause();
    harness.function.resume();
    assert_eq!((harness.pauses(), *lock(&harness.recorder.vm_resumes)), (vec![], 1));
    harness.function.pause();
    harness.write_command(ON);
    assert_eq!(harness.pauses(), NONE, "the VM is paused");
    harness.function.resume();
    assert_eq!((harness.pauses(), *lock(&harness.recorder.vm_resumes)), (vec![false], 2));
}

#[test]
fn restored_device_follows_its_command_register() {
    for (command, resumed) in [(COMMAND_MEMORY, vec![]), (ON, vec![false])] {
        let old = Harness::new();
        old.start();
        old.write_command(command);
        old.function.pause();
        let state = old.function.save().unwrap();
        let new = Harness::new();
        new.function.reset().unwrap();
        new.function.restore(&state).unwrap();
        new.pauses();
        new.function.resume();
        assert_eq!(new.pauses(), resumed, "{command:#x}");
        assert_eq!(new.function.save().unwrap(), state);
    }
}

#[test]
fn interrupts_wait_while_the_device_is_off_the_bus() {
    for off in
        [(|harness| harness.write_command(COMMAND_MEMORY)) as fn(&Harness), |harness| harness.set_power_state(D3HOT)]
    {
        let harness = Harness::new();
        harness.start();
        harness.enable_msix();
        harness.write(COMMON + 16, &2u16.to_le_bytes());
        harness.write(COMMON + 22, &0u16.to_le_bytes());
        harness.write(COMMON + 26, &1u16.to_le_bytes());
        off(&harness);
        harness.interrupt().queue_used(0);
        harness.interrupt().config_changed(true);
        assert_eq!([1, 2].map(|vector| harness.vectors.raised(vector)), [0, 0]);
        harness.set_power_state(D0);
        harness.write_command(ON);
        assert_eq!([1, 2].map(|vector| harness.vectors.raised(vector)), [1, 1]);
    }
}
