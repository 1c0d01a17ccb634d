// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the PCI root bus and its functions. The tests access the functions as a guest does, through ECAM and the configuration ports.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use super::{
    Bar, BarKind, BarWindows, ConfigPorts, ConfigSpace, Ecam, FunctionConfig, HostBridgeKind, Identity, PciAddress,
    PciDevice, PciError, PciRoot, regs,
};
use crate::platform::{AddressSpace, BusDevice, Space};
use crate::state::{DeviceState, StateError};

mod state;

const MEM32: u64 = 0xc000_0000;
const MEM64: u64 = 0x40_0000_0000;

type Entry = (Space, u64, u64, Arc<dyn BusDevice>);

/// Contents of the guest's address spaces: space, base, length, device.
#[derive(Default)]
struct Map(Mutex<Vec<Entry>>);

impl Map {
    fn ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<_> = self.0.lock().unwrap().iter().map(|(_, base, len, _)| (*base, *len)).collect();
        ranges.sort_unstable();
        ranges
    }

    fn at(&self, address: u64) -> Option<(u64, Arc<dyn BusDevice>)> {
        let map = self.0.lock().unwrap();
        let holds = |base: u64, len: u64| address.checked_sub(base).is_some_and(|at| at < len);
        map.iter().find(|(_, base, len, _)| holds(*base, *len)).map(|(_, base, _, d)| (address - base, d.clone()))
    }

    fn read(&self, address: u64) -> u8 {
        let mut byte = [0xff];
        if let Some((offset, device)) = self.at(address) {
            device.read(offset, &mut byte);
        }
        byte[0]
    }
}

impl AddressSpace for Map {
    fn insert(&self, space: Space, base: u64, len: u64, device: Arc<dyn BusDevice>) -> io::Result<()> {
        let mut map = self.0.lock().unwrap();
        let overlaps = |(s, b, l, _): &(Space, u64, u64, _)| *s == space && *b < base + len && base < *b + *l;
        if map.iter().any(overlaps) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        map.push((space, base, len, device));
        Ok(())
    }
    fn remove(&self, space: Space, base: u64) {
        self.0.lock().unwrap().retain(|(s, b, _, _)| (*s, *b) != (space, base));
    }
}

/// Test function that records the moves of its BARs. A read from a BAR returns the sum of `tag` and the offset.
pub(super) struct Function {
    tag: u8,
    config: FunctionConfig,
    moves: Mutex<Vec<(u8, Option<u64>)>>,
    stubborn: bool,
}

impl Function {
    pub(super) fn new(tag: u8, bars: &[Bar]) -> Arc<Self> {
        Arc::new(Self::unshared(tag, bars))
    }

    fn unshared(tag: u8, bars: &[Bar]) -> Self {
        let id = u16::from(tag);
        let identity =
            Identity { vendor: 0x1af4, device: id, subsystem_vendor: 0, subsystem: 0, class: 0xff_0000, revision: tag };
        let mut config = ConfigSpace::new(identity);
        for bar in bars {
            config.add_bar(*bar);
        }
        Self { tag, config: FunctionConfig::new(config), moves: Mutex::default(), stubborn: false }
    }

    fn moves(&self) -> Vec<(u8, Option<u64>)> {
        std::mem::take(&mut self.moves.lock().unwrap())
    }
}

impl PciDevice for Function {
    fn id(&self) -> &str {
        "function"
    }
    fn config(&self) -> Option<&FunctionConfig> {
        Some(&self.config)
    }
    fn bar_moved(&self, index: u8, address: u64) -> io::Result<()> {
        self.moves.lock().unwrap().push((index, Some(address)));
        Ok(())
    }
    fn bar_released(&self, index: u8) -> io::Result<()> {
        if self.stubborn {
            return Err(io::ErrorKind::Other.into());
        }
        self.moves.lock().unwrap().push((index, None));
        Ok(())
    }
    fn read_bar(&self, _: u8, offset: u64, data: &mut [u8]) {
        data.fill(self.tag + offset.to_le_bytes()[0]);
    }
    fn reset(&self) -> io::Result<()> {
        self.config.write(regs::COMMAND, &[0, 0]);
        Ok(())
    }
    fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new("function", 1, &self.config.state())
    }
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        self.config.restore(&state.payload("function", 1)?)
    }
}

const SMALL: Bar = Bar { index: 0, kind: BarKind::Memory32 { prefetchable: false }, size: 0x1000 };
const LARGE: Bar = Bar { index: 2, kind: BarKind::Memory64 { prefetchable: true }, size: 0x10_0000 };
const PORTS: Bar = Bar { index: 4, kind: BarKind::Io, size: 0x20 };

pub(super) struct Machine {
    map: Arc<Map>,
    pub(super) root: Arc<PciRoot>,
    ecam: Ecam,
}

pub(super) fn machine() -> Machine {
    let map = Arc::new(Map::default());
    let windows =
        BarWindows { io: 0xc000..=0xffff, mem32: MEM32..=MEM32 + 0x3f_ffff, mem64: MEM64..=MEM64 + 0xfff_ffff };
    // The windows of the second segment are below the windows of the first segment.
    let others = BarWindows {
        io: 0x8000..=0xbfff,
        mem32: MEM32 - 0x40_0000..=MEM32 - 1,
        mem64: MEM64 - 0x1000_0000..=MEM64 - 1,
    };
    let root = Arc::new(PciRoot::new(map.clone(), vec![windows, others], HostBridgeKind::Generic).unwrap());
    Machine { map, ecam: Ecam::new(root.clone()), root }
}

/// Creates a machine with two functions, as devices 5 and 6. Each function has one BAR and decodes it. The BARs are adjacent.
fn neighbours() -> (Machine, [Arc<Function>; 2]) {
    let m = machine();
    let functions = [1, 2].map(|tag| Function::new(tag, &[SMALL]));
    for (device, function) in (5..).zip(&functions) {
        m.add(device, function);
    }
    m.decode(5, true);
    m.decode(6, true);
    (m, functions)
}

impl Machine {
    fn add(&self, device: u8, function: &Arc<Function>) {
        self.root.add(PciAddress::on_root_bus(device), function.clone()).unwrap();
    }
    fn write(&self, device: u64, offset: u16, data: &[u8]) {
        self.ecam.write(device << 15 | u64::from(offset), data);
    }
    fn read(&self, device: u64, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.ecam.read(device << 15 | u64::from(offset), &mut data);
        u32::from_le_bytes(data)
    }
    fn decode(&self, device: u64, on: bool) {
        self.write(device, regs::COMMAND, &[if on { 3 } else { 0 }, 0]);
    }
    fn set_bar(&self, device: u64, index: u16, address: u64) {
        self.write(device, regs::BAR0 + 4 * index, &u32::try_from(address & 0xffff_ffff).unwrap().to_le_bytes());
        if address >> 32 != 0 {
            self.write(device, regs::BAR0 + 4 * index + 4, &u32::try_from(address >> 32).unwrap().to_le_bytes());
        }
    }
}

#[test]
fn ecam_decodes_device_function_and_register() {
    let m = machine();
    m.add(5, &Function::new(7, &[]));
    m.add(31, &Function::new(9, &[]));
    assert_eq!(m.read(0, 0) & 0xffff, 0x1b36);
    assert_eq!(m.read(0, regs::REVISION) >> 8, 0x06_0000);
    assert_eq!(m.read(5, 0), 0x0007_1af4);
    assert_eq!(m.read(31, 0), 0x0009_1af4);
    assert_eq!(m.read(6, 0), u32::MAX);
    let mut data = [0; 4];
    m.ecam.read(5 << 15 | 1 << 12, &mut data);
    assert_eq!(data, [0xff; 4], "function 1 does not exist");
    m.ecam.read(5 << 15 | 0xffe, &mut data);
    assert_eq!(data, [0, 0, 0xff, 0xff], "bytes beyond the function are all ones");
    data = [0xab; 4];
    m.ecam.read(u64::MAX, &mut data);
    m.ecam.write(m.ecam.size(), &data);
    assert_eq!(data, [0xab; 4], "beyond all possible segments");
    m.ecam.read(m.ecam.size(), &mut data);
    assert_eq!(data, [0xff; 4], "beyond the last segment");
}

#[test]
fn each_segment_has_its_own_bus_and_windows() {
    let m = machine();
    let functions = [Function::new(7, &[SMALL, LARGE]), Function::new(9, &[SMALL, LARGE])];
    for (function, segment) in functions.iter().zip(0..) {
        m.root.add(PciAddress::on_segment(segment, 5), function.clone()).unwrap();
    }
    assert_eq!(m.ecam.size(), 2 * Ecam::SIZE);
    let mut data = [0; 4];
    m.ecam.read(Ecam::SIZE | 5 << 15, &mut data);
    assert_eq!((m.read(5, 0), u32::from_le_bytes(data)), (0x0007_1af4, 0x0009_1af4));
    m.ecam.write(Ecam::SIZE | 5 << 15 | u64::from(regs::COMMAND), &[3, 0]);
    assert_eq!(m.map.ranges(), [(MEM32 - 0x40_0000, 0x1000), (MEM64 - 0x1000_0000, 0x10_0000)]);
    // A BAR cannot move to the window of another segment.
    for address in [MEM32 + 0x1000, MEM32 - 0x1000] {
        let bytes = u32::try_from(address).unwrap().to_le_bytes();
        m.ecam.write(Ecam::SIZE | 5 << 15 | u64::from(regs::BAR0), &bytes);
    }
    assert_eq!(m.map.ranges(), [(MEM32 - 0x1000, 0x1000), (MEM64 - 0x1000_0000, 0x10_0000)]);
    let places: Vec<String> = m.root.devices().iter().map(|(address, _)| address.to_string()).collect();
    assert_eq!(places, ["0000:00:00.0", "0000:00:05.0", "0001:00:00.0", "0001:00:05.0"]);
    assert!(m.root.remove(PciAddress::on_segment(1, 0)).is_none(), "a host bridge stays");
    assert!(m.root.remove(PciAddress::on_segment(2, 5)).is_none());
    assert!(m.root.remove(PciAddress::on_segment(1, 5)).is_some());
    assert!(m.map.ranges().is_empty());
    let beyond = m.root.add(PciAddress::on_segment(2, 1), functions[1].clone());
    assert!(matches!(beyond, Err(PciError::NoSuchPlace(_))));
}

#[test]
fn cloud_hypervisor_host_bridge_has_its_id_across_reset() {
    let windows =
        BarWindows { io: 0x1000..=0xffff, mem32: MEM32..=MEM32 + 0xfff_ffff, mem64: MEM64..=MEM64 + 0xfff_ffff };
    let map: Arc<dyn AddressSpace> = Arc::new(Map::default());
    let root = PciRoot::new(map, vec![windows], HostBridgeKind::CloudHypervisor).unwrap();
    let read = || {
        let mut data = [0; 4];
        root.read_config(PciAddress::on_root_bus(0), 0, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(read(), 0x0d57_8086);
    root.reset().unwrap();
    assert_eq!(read(), 0x0d57_8086);
}

#[test]
fn byte_at_cf9_with_the_reset_bit_resets_the_machine() {
    let m = machine();
    let asked = Arc::new(AtomicU32::new(0));
    let count = asked.clone();
    let ports = ConfigPorts::new(
        m.root.clone(),
        Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        }),
    );
    let after = |offset, data: &[u8]| {
        ports.write(offset, data);
        asked.load(Ordering::Relaxed)
    };
    assert_eq!(after(0, &0x8000_0600u32.to_le_bytes()), 0, "an address of configuration space");
    assert_eq!((after(1, &[0x02]), after(1, &[6, 6]), after(0, &[6]), after(2, &[6])), (0, 0, 0, 0));
    assert_eq!((after(1, &[0x06]), after(1, &[0x0e])), (1, 2));
}

#[test]
fn ports_reach_the_first_256_bytes() {
    let m = machine();
    m.add(5, &Function::new(7, &[]));
    let ports = ConfigPorts::new(m.root.clone(), Box::new(|| panic!("no reset is asked for")));
    let read = |offset, len: usize| {
        let mut data = vec![0xff; len];
        ports.read(offset, &mut data);
        data
    };
    assert_eq!(read(4, 4), [0xff; 4]);
    ports.write(0, &0x8000_2800u32.to_le_bytes());
    assert_eq!(read(0, 4), 0x8000_2800u32.to_le_bytes());
    assert_eq!(read(4, 4), [0xf4, 0x1a, 7, 0]);
    assert_eq!(read(6, 2), [7, 0]);
    assert_eq!(read(5, 1), [0x1a]);
    assert_eq!(read(7, 4), [0, 0xff, 0xff, 0xff]);
    ports.write(0, &[0]);
    ports.write(2, &[0, 0]);
    assert_eq!(read(0, 4), 0x8000_2800u32.to_le_bytes(), "only 32-bit writes reach the address port");
    ports.write(0, &0x8000_283cu32.to_le_bytes());
    ports.write(4, &[9]);
    assert_eq!(m.read(5, 0x3c) & 0xff, 9);
    for address in [0x0000_2800u32, 0x8001_2800, 0x8000_2900, 0x8000_3000] {
        ports.write(0, &address.to_le_bytes());
        assert_eq!(read(4, 4), [0xff; 4], "{address:#x}");
    }
}

#[test]
fn bars_are_assigned_aligned_and_claimed_when_decoded() {
    let m = machine();
    let function = Function::new(7, &[SMALL, LARGE, PORTS]);
    m.add(5, &function);
    assert!(m.map.ranges().is_empty());
    m.decode(5, true);
    assert_eq!(m.map.ranges(), [(0xc000, 0x20), (MEM32, 0x1000), (MEM64, 0x10_0000)]);
    assert_eq!(m.map.read(MEM64 + 3), 10);
    m.decode(5, false);
    assert_eq!(m.map.read(MEM64 + 3), 0xff);
}

#[test]
fn sizing_moves_nothing() {
    let m = machine();
    let function = Function::new(7, &[SMALL, LARGE]);
    m.add(5, &function);
    m.decode(5, true);
    function.moves();
    m.decode(5, false);
    let old = m.read(5, regs::BAR0);
    m.write(5, regs::BAR0, &[0xff; 4]);
    assert_eq!(m.read(5, regs::BAR0), 0xffff_f000);
    m.write(5, regs::BAR0, &old.to_le_bytes());
    m.decode(5, true);
    assert_eq!(m.map.ranges(), [(MEM32, 0x1000), (MEM64, 0x10_0000)]);
    assert_eq!(function.moves(), [(2, Some(MEM64)), (0, Some(MEM32))], "the BARs are still at their old places");
}

#[test]
fn bar_follows_the_guest_within_the_windows() {
    let m = machine();
    let function = Function::new(7, &[LARGE]);
    m.add(5, &function);
    m.decode(5, true);
    function.moves();
    m.set_bar(5, 2, MEM64 + 0x20_0000);
    assert_eq!(m.map.ranges(), [(MEM64 + 0x20_0000, 0x10_0000)]);
    // A 64-bit BAR may also be in the window below 4 GiB. The guest writes the high half of the address last.
    m.decode(5, false);
    m.write(5, regs::BAR0 + 8, &u32::try_from(MEM32).unwrap().to_le_bytes());
    m.write(5, regs::BAR0 + 12, &[0; 4]);
    m.decode(5, true);
    assert_eq!(m.map.ranges(), [(MEM32, 0x10_0000)]);
    assert_eq!(function.moves(), [(2, Some(MEM64 + 0x20_0000)), (2, Some(MEM32))]);
}

#[test]
fn forbidden_place_is_refused() {
    let m = machine();
    let function = Function::new(7, &[SMALL, PORTS]);
    let other = Function::new(8, &[SMALL]);
    m.add(5, &function);
    m.add(6, &other);
    m.decode(5, true);
    m.decode(6, true);
    function.moves();
    let before = m.map.ranges();
    for address in [0, 0x10_0000, MEM32 - 0x1000, MEM32 + 0x40_0000, 0xfee0_0000, 0xffff_f000, MEM32 + 0x1000] {
        m.set_bar(5, 0, address);
        assert_eq!(m.map.ranges(), before, "{address:#x}");
        assert_eq!(m.map.read(MEM32), 7, "the BAR stays at its address");
    }
    m.set_bar(5, 4, 0xcf8);
    assert_eq!(m.map.ranges(), before);
    assert_eq!(function.moves(), []);
    m.set_bar(5, 0, MEM32 + 0x8000);
    assert_eq!(function.moves(), [(0, Some(MEM32 + 0x8000))]);
}

#[test]
fn address_of_a_bar_with_decoding_off_can_be_taken() {
    let (m, [one, two]) = neighbours();
    m.decode(5, false);
    m.decode(6, false);
    one.moves();
    two.moves();
    // The guest swaps the addresses of the two BARs.
    m.set_bar(5, 0, MEM32 + 0x1000);
    m.set_bar(6, 0, MEM32);
    m.decode(5, true);
    assert_eq!((one.moves(), two.moves()), (vec![(0, Some(MEM32 + 0x1000))], vec![(0, None)]));
    m.decode(6, true);
    assert_eq!(two.moves(), [(0, Some(MEM32))]);
    assert_eq!((m.map.read(MEM32), m.map.read(MEM32 + 0x1000)), (2, 1));
}

#[test]
fn bars_that_decode_all_the_time_can_be_swapped() {
    let (m, _) = neighbours();
    m.set_bar(5, 0, MEM32 + 0x1000);
    assert_eq!((m.map.read(MEM32), m.map.read(MEM32 + 0x1000)), (1, 2), "the other BAR is there");
    m.set_bar(6, 0, MEM32);
    assert_eq!((m.map.read(MEM32), m.map.read(MEM32 + 0x1000)), (2, 1));
}

#[test]
fn refused_bar_moves_when_its_place_becomes_free() {
    type Leave = fn(&Machine);
    let leave: [Leave; 3] = [
        |m| m.set_bar(6, 0, MEM32 + 0x9000),
        |m| drop(m.root.remove(PciAddress::on_root_bus(6))),
        |m| {
            m.decode(6, false);
        },
    ];
    for leave in leave {
        let (m, [one, _]) = neighbours();
        m.set_bar(5, 0, MEM32 + 0x1000);
        one.moves();
        leave(&m);
        assert_eq!(one.moves(), [(0, Some(MEM32 + 0x1000))]);
        assert_eq!((m.map.read(MEM32), m.map.read(MEM32 + 0x1000)), (0xff, 1));
        assert!(m.root.save().is_ok(), "every BAR has the address that its function requests");
    }
}

#[test]
fn function_that_cannot_leave_keeps_its_place() {
    let m = machine();
    let one = Function::new(1, &[SMALL]);
    let two = Arc::new(Function { stubborn: true, ..Function::unshared(2, &[SMALL]) });
    m.add(5, &one);
    m.add(6, &two);
    m.decode(6, true);
    m.decode(6, false);
    m.decode(5, true);
    m.set_bar(5, 0, MEM32 + 0x1000);
    assert_eq!(m.map.read(MEM32), 1);
    m.decode(6, true);
    assert_eq!(m.map.read(MEM32 + 0x1000), 2);
}

#[test]
fn reset_sends_bars_home() {
    let m = machine();
    let function = Function::new(7, &[SMALL]);
    m.add(5, &function);
    m.decode(5, true);
    m.set_bar(5, 0, MEM32 + 0x9000);
    m.root.reset().unwrap();
    assert_eq!(m.map.read(MEM32 + 0x9000), 0xff);
    m.decode(5, true);
    assert_eq!(m.map.ranges(), [(MEM32, 0x1000)]);
}

#[test]
fn removed_function_frees_its_addresses_for_the_next() {
    let m = machine();
    let function = Function::new(7, &[SMALL, LARGE, PORTS]);
    m.add(5, &function);
    m.decode(5, true);
    m.set_bar(5, 0, MEM32 + 0x9000);
    function.moves();
    let removed = m.root.remove(PciAddress::on_root_bus(5)).unwrap();
    assert_eq!(removed.id(), "function");
    assert_eq!(m.map.ranges(), []);
    assert_eq!(m.read(5, 0), u32::MAX, "no function responds");
    let mut released = function.moves();
    released.sort_unstable();
    assert_eq!(released, [(0, None), (2, None), (4, None)]);
    assert!(m.root.remove(PciAddress::on_root_bus(5)).is_none());
    drop(removed);
    assert_eq!(Arc::strong_count(&function), 1, "no reference is left");

    m.add(5, &Function::new(8, &[SMALL, LARGE, PORTS]));
    m.decode(5, true);
    assert_eq!(m.map.ranges(), [(0xc000, 0x20), (MEM32, 0x1000), (MEM64, 0x10_0000)]);
}

#[test]
fn host_bridge_and_missing_functions_cannot_be_removed() {
    let m = machine();
    let elsewhere = PciAddress { bus: 1, ..PciAddress::on_root_bus(5) };
    for address in [PciAddress::on_root_bus(0), PciAddress::on_root_bus(5), elsewhere] {
        assert!(m.root.remove(address).is_none(), "{address}");
    }
    assert_eq!(m.root.devices().len(), 2, "the host bridges");
}

#[test]
fn function_that_does_not_fit_takes_no_addresses() {
    let m = machine();
    let huge = Bar { index: 1, kind: BarKind::Memory32 { prefetchable: false }, size: 0x80_0000 };
    let half = Bar { index: 1, kind: BarKind::Memory32 { prefetchable: false }, size: 0x20_0000 };
    let third = Bar { index: 2, kind: BarKind::Memory32 { prefetchable: false }, size: 0x20_0000 };
    let address = PciAddress::on_root_bus(5);
    for bars in [[huge, SMALL].as_slice(), &[half, third, SMALL]] {
        let error = m.root.add(address, Function::new(7, bars)).unwrap_err();
        assert!(matches!(error, PciError::NoSpace { .. }), "{error}");
    }
    // The failed calls have left the whole window free.
    m.add(5, &Function::new(7, &[half, third]));
}

#[test]
fn dropped_machine_drops_its_functions() {
    let m = machine();
    let function = Function::new(7, &[SMALL]);
    m.add(5, &function);
    m.decode(5, true);
    let Machine { map, root, ecam } = m;
    map.insert(Space::Memory, 0xf800_0000, ecam.size(), Arc::new(ecam)).unwrap();
    drop((map, root));
    assert_eq!(Arc::strong_count(&function), 1);
}

#[test]
fn impossible_additions_are_refused() {
    let m = machine();
    let add = |address, bars: &[Bar]| m.root.add(address, Function::new(1, bars)).unwrap_err();
    let place = PciAddress::on_root_bus;
    assert!(matches!(add(place(0), &[]), PciError::Occupied { .. }));
    assert!(matches!(add(place(32), &[]), PciError::NoSuchPlace(_)));
    assert!(matches!(add(PciAddress { function: 1, ..place(3) }, &[]), PciError::NoSuchPlace(_)));
    let huge = Bar { size: 1 << 40, ..LARGE };
    assert!(matches!(add(place(3), &[huge]), PciError::NoSpace { .. }));
    assert_eq!(m.root.free_address(), Some(place(1)));
    let windows = BarWindows { io: 0..=1, mem32: 0..=u64::MAX, mem64: 0..=1 };
    assert!(matches!(
        PciRoot::new(Arc::new(Map::default()), vec![windows], HostBridgeKind::Generic),
        Err(PciError::Window { .. })
    ));
}

mod hostile {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Checks that every claim stays in its window, whatever the guest writes. `Map` itself refuses overlapping claims.
        #[test]
        fn claims_stay_in_their_windows(writes in prop::collection::vec((5u64..8, 0u16..0x30, any::<u32>(), 0usize..9), 0..80)) {
            let m = machine();
            for device in 5..8 {
                m.add(device, &Function::new(device, &[SMALL, LARGE, PORTS]));
            }
            for (device, offset, value, len) in writes {
                let mut data = value.to_le_bytes().to_vec();
                // Move half of the addresses near the windows. Otherwise nearly all addresses would be refused.
                if value & 1 == 0 { data[3] = 0xc0; }
                data.extend([0x40, 0, 0, 0]);
                m.write(device, offset, &data[..len.min(8)]);
                for (base, size) in m.map.ranges() {
                    let inside = [(0xc000, 0xffff), (MEM32, MEM32 + 0x3f_ffff), (MEM64, MEM64 + 0xfff_ffff)];
                    prop_assert!(inside.iter().any(|(first, last)| *first <= base && base + size - 1 <= *last));
                }
            }
        }
    }
}
