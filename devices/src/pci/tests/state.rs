// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of saving and restoring a bus.

use super::*;
use crate::pci::FunctionState;

/// Creates a bus with two functions.
fn bus() -> (Machine, [Arc<Function>; 2]) {
    let machine = machine();
    let functions = [Function::new(2, &[SMALL, LARGE]), Function::new(5, &[SMALL, PORTS])];
    for (function, device) in functions.iter().zip([2, 5]) {
        machine.root.add(PciAddress::on_root_bus(device), function.clone()).unwrap();
    }
    (machine, functions)
}

/// Makes a function decode its BARs, with BAR 0 at `address`.
fn decode(machine: &Machine, device: u8, address: u32) {
    let place = PciAddress::on_root_bus(device);
    machine.root.write_config(place, regs::BAR0, &address.to_le_bytes());
    machine.root.write_config(place, regs::COMMAND, &(regs::COMMAND_MEMORY | regs::COMMAND_IO).to_le_bytes());
}

/// Returns the error that another bus reports when it restores `states`.
fn refusal(states: &[FunctionState]) -> String {
    bus().0.root.restore(states).unwrap_err().to_string()
}

#[test]
fn restored_bus_decodes_the_saved_addresses() {
    let (old, _) = bus();
    decode(&old, 2, 0xc001_0000);
    let states = old.root.save().unwrap();
    let text = serde_json::to_string(&states).unwrap();
    let (new, functions) = bus();
    let states: Vec<FunctionState> = serde_json::from_str(&text).unwrap();
    new.root.restore(&states).unwrap();
    assert_eq!(new.root.save().unwrap(), states);
    assert_eq!(new.map.ranges(), old.map.ranges());
    assert_eq!(new.map.read(0xc001_0003), 5);
    let mut moves = functions[0].moves();
    moves.sort_unstable();
    assert_eq!(moves.len(), 2, "each decoded BAR moves once");
    assert_eq!(moves[0], (0, Some(0xc001_0000)));
    // The guest can still move the BARs of the other function.
    decode(&new, 5, 0xc001_1000);
    assert_eq!(new.map.read(0xc001_1000), 5);
}

#[test]
fn state_of_another_bus_is_refused_and_names_what_differs() {
    let good = bus().0.root.save().unwrap();
    let mut fewer = good.clone();
    fewer.pop();
    assert_eq!(
        refusal(&fewer),
        "functions: this VM has _host_bridge at 0000:00:00.0, function at 0000:00:02.0, function at 0000:00:05.0, \
         _host_bridge1 at 0001:00:00.0, but the saved state has _host_bridge at 0000:00:00.0, function at 0000:00:02.0, function at \
         0000:00:05.0: restore with the configuration that was saved"
    );
    let mut twice = good.clone();
    twice.push(good[1].clone());
    assert!(refusal(&twice).starts_with("functions: "));
    let mut elsewhere = good.clone();
    elsewhere[2].device = 6;
    assert!(refusal(&elsewhere).contains("function at 0000:00:06.0"));
    let mut elsewhere = good.clone();
    elsewhere[2].segment = 1;
    assert!(refusal(&elsewhere).contains("function at 0001:00:05.0"));
    let mut other = good;
    other[2].state.kind = "serial".into();
    assert_eq!(
        refusal(&other),
        "function: the saved state is of kind 'serial', but the device needs kind 'function': restore with the configuration that was saved"
    );
}

#[test]
fn bars_that_overlap_or_leave_their_windows_are_refused() {
    let (old, _) = bus();
    decode(&old, 2, 0xc001_0000);
    decode(&old, 5, 0xc001_1000);
    let good = old.root.save().unwrap();
    let at = |address: u32| {
        let mut states = good.clone();
        let registers = &mut states[2].state.payload["registers"];
        let bar = registers.as_array_mut().unwrap().iter_mut().find(|run| run["offset"] == 0x11).unwrap();
        bar["bytes"] = address.to_le_bytes()[1..].to_vec().into();
        refusal(&states)
    };
    assert_eq!(
        at(0xc001_0000),
        "function: BAR 0: cannot be at 0xc0010000: BAR 0 of function overlaps the requested range"
    );
    assert!(at(0xfee0_0000).contains("cannot be at 0xfee00000: the BAR would lie outside of the address windows"));
}

#[test]
fn bus_with_a_bar_moved_to_a_forbidden_address_is_not_saved() {
    let (machine, _) = bus();
    decode(&machine, 2, 0xc001_0000);
    decode(&machine, 2, 0xfee0_0000);
    let refused = machine.root.save().unwrap_err().to_string();
    assert_eq!(
        refused,
        "function: BAR 0: the VM cannot be saved, because the guest has requested the forbidden address 0xfee00000 for this BAR; reset the VM first"
    );
}

#[test]
fn function_that_cannot_be_saved_is_named() {
    struct Stuck(Arc<Function>);
    impl PciDevice for Stuck {
        fn id(&self) -> &str {
            "vfio0"
        }
        fn read_config(&self, offset: u16, data: &mut [u8]) {
            self.0.read_config(offset, data);
        }
        fn reset(&self) -> io::Result<()> {
            Ok(())
        }
    }
    let (machine, _) = bus();
    machine.root.add(PciAddress::on_root_bus(7), Arc::new(Stuck(Function::new(7, &[])))).unwrap();
    assert!(machine.root.save().unwrap_err().to_string().starts_with("vfio0: the state of host devices and"));
}
