// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver that takes its steps from the fuzzer's bytes, for fuzzing the whole device and for replaying fuzzer findings.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use iommu_bounce::spec::feature;
use iommu_bounce::test_utils::{MapperProbe, RecordingMapper};
use iommu_bounce::{EngineConfig, Fault, FaultReason, Permissions, WindowConfig};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{IommuHandle, IommuParams, RingFeatures, WindowRegion, create};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY};
use crate::platform::{HostRange, MemorySlots, MsiAllocator, MsiMessage, MsiVectors};
use crate::ram::Ram;
use crate::state::DeviceState;
use crate::virtio::VirtioPciDevice;
use crate::virtio::byte_driver::set_up;

const RAM: usize = 0x2_0000;
const CHUNK: u64 = 0x4000;
const APERTURE: u64 = 0xe000_0000;
const ENDPOINT: u32 = 8;
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
/// All features that the device offers.
const ALL: u64 = feature::INPUT_RANGE
    | feature::DOMAIN_RANGE
    | feature::MAP_UNMAP
    | feature::PROBE
    | feature::BYPASS_CONFIG
    | feature::BOUNCE_WINDOW
    | INDIRECT_DESC
    | EVENT_IDX;

/// Addresses of each queue's descriptor table, available ring and used ring.
const RINGS: [[u64; 3]; 2] = [[0x1000, 0x2000, 0x3000], [0x4000, 0x5000, 0x6000]];
/// Addresses of the request and of the reply in well-formed chains.
const REQUEST: u64 = 0x8000;
const REPLY: u64 = 0x9000;
/// Address of an indirect descriptor table.
const TABLE: u64 = 0xa000;

/// Platform whose operations all succeed and have no effect.
#[derive(Default)]
struct Platform(AtomicU32);

impl MsiVectors for Platform {
    fn count(&self) -> u16 {
        3
    }
    fn event(&self, _: u16) -> Option<&EventFd> {
        None
    }
    fn route(&self, _: u16, _: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }
    fn trigger(&self, _: u16) -> io::Result<()> {
        Ok(())
    }
}

impl MsiAllocator for Platform {
    fn allocate(&self, _: u16) -> io::Result<Arc<dyn MsiVectors>> {
        Ok(Arc::new(Self::default()))
    }
}

impl MemorySlots for Platform {
    unsafe fn insert(&self, _: u64, _: HostRange, _: bool) -> io::Result<u32> {
        Ok(self.0.fetch_add(1, Ordering::Relaxed))
    }
    fn remove(&self, _: u32) -> io::Result<()> {
        Ok(())
    }
}

struct Machine {
    memory: Arc<Ram>,
    function: Arc<VirtioPciDevice>,
    handle: Arc<IommuHandle>,
    mapper: MapperProbe,
    available: u16,
}

/// Splits off a little-endian 16-bit number from the start of `data`. Returns the number and the rest.
fn word(data: &[u8]) -> Option<(u16, &[u8])> {
    let (bytes, rest) = data.split_first_chunk()?;
    Some((u16::from_le_bytes(*bytes), rest))
}

impl Machine {
    fn new() -> Self {
        let memory = Ram::from_ranges(&[(GuestAddress(0), RAM)]).expect("the RAM is small");
        let memory = Arc::new(memory);
        let platform = Arc::new(Platform::default());
        let window = WindowConfig {
            aperture: APERTURE..=APERTURE + 8 * CHUNK - 1,
            budget: 3 * CHUNK,
            threshold: 0,
            threshold_write: 0,
        };
        let params = IommuParams {
            id: "_iommu".into(),
            memory: memory.clone(),
            msi: platform.clone(),
            engine: EngineConfig { window: Some(window), ..EngineConfig::default() },
            windows: Some(WindowRegion { size: 4 * CHUNK, chunk_size: CHUNK, hugepages: false, slots: platform }),
            rings: RingFeatures { indirect_desc: true, event_idx: true },
            poll: false,
            devices: None,
            mmio: false,
            observer: None,
        };
        let (function, handle) = create(params).expect("the configuration is valid");
        let mapper = RecordingMapper::new();
        let probe = mapper.probe();
        handle.add_endpoint(ENDPOINT, Box::new(mapper)).expect("this is the first endpoint");
        function.bar_moved(2, 1 << 40).expect("no operation of the platform fails");
        Self { memory, function, handle, mapper: probe, available: 0 }
    }

    fn register(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    /// Initialises the device up to `DRIVER_OK`.
    fn start(&mut self, features: u64) {
        self.function.write_config(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY).to_le_bytes());
        self.available = 0;
        self.memory.write_slice(&[0; 0x6000], GuestAddress(0x1000)).expect("the range is RAM");
        self.register(20, &[0]);
        // This driver continues even if the device rejects the features.
        set_up(&self.function, features, [0, 1].map(|queue| (queue, 16, RINGS[usize::from(queue)])));
    }

    /// Adds a request to the queue and notifies the device. `room` is the size of the reply buffer. If `in_table` is true, the request uses
    /// an indirect descriptor table.
    fn send(&mut self, request: &[u8], room: u32, in_table: bool) {
        let put = |address: u64, data: &[u8]| {
            self.memory.write_slice(data, GuestAddress(address)).expect("the range is RAM");
        };
        put(REQUEST, request);
        let len = u32::try_from(request.len()).unwrap_or(0);
        let [ring, available, _] = RINGS[0];
        let describe = |at: u64, address: u64, len: u32, flags: u16| {
            put(at, &address.to_le_bytes());
            put(at + 8, &len.to_le_bytes());
            put(at + 12, &flags.to_le_bytes());
            put(at + 14, &1u16.to_le_bytes());
        };
        let table = if in_table { TABLE } else { ring };
        describe(table, REQUEST, len, 1);
        describe(table + 16, REPLY, room, 2);
        if in_table {
            describe(ring, TABLE, 32, 4);
        }
        put(available + 4 + 2 * u64::from(self.available % 16), &[0, 0]);
        self.available = self.available.wrapping_add(1);
        put(available + 2, &self.available.to_le_bytes());
        self.register(0x3000, &[0, 0]);
    }

    /// Does one step of kind `kind` with arguments from the start of `data`. Returns the rest, or `None` if `data` is too short.
    fn step<'d>(&mut self, kind: u8, data: &'d [u8]) -> Option<&'d [u8]> {
        let (number, rest) = word(data)?;
        let [low, high] = number.to_le_bytes();
        let len = rest.len().min(usize::from(high & 0x7f));
        let (bytes, behind) = rest.split_at(len);
        match kind {
            0..=119 => {
                self.send(bytes, u32::from(low) * 4, false);
                return Some(behind);
            }
            250..=255 => {
                self.send(bytes, u32::from(low) * 4, true);
                return Some(behind);
            }
            120..=159 => {
                // Writes raw bytes to the rings, descriptors or buffers.
                let address = GuestAddress(0x1000 + 64 * u64::from(low));
                self.memory.write_slice(bytes, address).expect("the range is RAM");
                return Some(behind);
            }
            160..=179 => self.register(u64::from(number) & 0x4fff, &rest[..rest.len().min(usize::from(kind & 7))]),
            180..=199 => self.function.read_bar(0, u64::from(number), &mut [0; 8][..usize::from(kind & 7)]),
            200..=219 => self.register(0x3000 + 4 * u64::from(low & 3), &[0, 0]),
            220..=229 => {
                let (endpoint, address) = (ENDPOINT + u32::from(low & 1), Some(number.into()));
                let fault = Fault { reason: FaultReason::Mapping, endpoint, address, access: Permissions::READ };
                self.handle.report_fault(fault);
            }
            230..=239 => {
                self.handle.set_budget(u64::from(low & 3) * CHUNK).expect("the budget fits into the region");
                let pages = Some(u64::from(low >> 2)).filter(|pages| *pages != 0);
                self.handle.set_max_mapped_bytes(pages.map(|pages| pages << 12)).expect("the limit is not 0");
            }
            240..=244 => self.function.reset().expect("no operation of the platform fails"),
            _ => self.start(if low & 1 == 0 { ALL } else { u64::from(low) }),
        }
        Some(rest)
    }
}

/// Runs a device with the steps in `data`. Each step consists of one byte for its kind, two bytes for a length or an argument, and the
/// step's data.
///
/// # Panics
/// The device uses more window memory than its budget allows, or keeps a mapping or window memory after the last driver has stopped.
pub fn device(data: &[u8]) {
    let mut machine = Machine::new();
    machine.start(ALL);
    let mut rest = data;
    while let [kind, more @ ..] = rest {
        let Some(behind) = machine.step(*kind, more) else { break };
        rest = behind;
        assert!(machine.handle.counters().window_bytes <= 3 * CHUNK);
    }
    // The reset ends bypass mode. The start of a driver without windows then frees the parked chunks.
    machine.function.reset().expect("no operation of the platform fails");
    machine.start(feature::MAP_UNMAP);
    machine.register(20, &[0]);
    assert!(machine.mapper.is_empty(), "something is still mapped");
    assert_eq!(machine.handle.counters().window_bytes, 0);
}

/// Restores a saved state from `data`. The device may accept or reject the state. In both cases, the device must work for the next driver.
///
/// # Panics
/// The device does not work for the next driver, or uses more window memory than the size of its memory region. Or a restored state changes
/// when the state is saved and restored again.
pub fn state(data: &[u8]) {
    let Ok(state) = serde_json::from_slice::<DeviceState>(data) else { return };
    let mut machine = Machine::new();
    machine.function.pause();
    if machine.function.restore(&state).is_ok() {
        let saved = machine.function.save().expect("the state was just restored");
        let other = Machine::new();
        other.function.pause();
        other.function.restore(&saved).expect("the state was just saved");
        assert_eq!(other.function.save().expect("the state was just restored"), saved);
        assert!(machine.handle.counters().window_bytes <= 4 * CHUNK);
        machine.function.resume();
        for queue in 0..2u64 {
            machine.register(0x3000 + 4 * queue, &[0, 0]);
        }
        machine.function.pause();
    }
    machine.function.reset().expect("no operation of the platform fails");
    machine.function.resume();
    machine.start(feature::MAP_UNMAP);
    machine.register(20, &[0]);
    assert!(machine.mapper.is_empty(), "something is still mapped");
    assert_eq!(machine.handle.counters().window_bytes, 0);
}

#[cfg(test)]
mod tests {
    use iommu_bounce::test_utils::{attach, map, replay, window_add};
    use proptest::prelude::*;

    use super::*;
    use crate::virtio::test_support::spoil;

    /// Returns the state of a device that has served a driver. The device has a mapping, two window chunks and a pending fault.
    fn lived() -> DeviceState {
        let mut machine = Machine::new();
        machine.start(ALL);
        machine.send(&attach(ENDPOINT, 1), 4, false);
        machine.send(&map(1, 0x1000, 0x1fff, 0x8000, 3), 4, false);
        for index in 0..2 {
            machine.send(&window_add(1, 3, APERTURE + index * CHUNK), 12, true);
        }
        let fault =
            Fault { reason: FaultReason::Mapping, endpoint: ENDPOINT, address: Some(1), access: Permissions::READ };
        machine.handle.report_fault(fault);
        let counters = machine.handle.counters();
        assert_eq!((counters.requests.map, counters.window_bytes), (1, 2 * CHUNK));
        machine.function.pause();
        machine.function.save().unwrap()
    }

    #[test]
    fn good_state_breaks_no_promise() {
        state(&serde_json::to_vec(&lived()).unwrap());
    }

    proptest! {
        #[test]
        fn spoiled_state_breaks_no_promise(changes in prop::collection::vec((any::<usize>(), any::<u64>()), 1..4)) {
            let mut value = serde_json::to_value(lived()).unwrap();
            for (place, with) in changes {
                spoil(&mut value, place, with);
            }
            state(&serde_json::to_vec(&value).unwrap());
        }
    }

    #[test]
    fn stored_inputs_break_no_promise() {
        replay(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/device"), 20, device);
    }

    #[test]
    fn stored_states_break_no_promise() {
        replay(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/state"), 1, state);
    }

    #[test]
    fn bytes_reach_the_engine() {
        let mut machine = Machine::new();
        machine.start(ALL);
        let attach = attach(ENDPOINT, 1);
        let mut data = vec![1, u8::try_from(attach.len()).unwrap()];
        data.extend(&attach);
        assert_eq!(machine.step(0, &data), Some(&[][..]));
        let counters = machine.handle.counters();
        assert_eq!((counters.requests.attach, counters.failed.attach), (1, 0));
    }
}
