// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of saving and restoring the whole device.

use iommu_bounce::spec::feature;
use iommu_bounce::test_utils::{attach, map, unmap, window_add};
use iommu_bounce::{Fault, FaultReason, Permissions};
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::state::DeviceState;

const FEATURES: u64 = BASIC | feature::BOUNCE_WINDOW;

/// Returns a paused guest with a mapping, two window chunks and a pending fault.
fn lived() -> Guest {
    let mut guest = Guest::running(FEATURES);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(guest.simple(&map(1, 0x1000, 0x1fff, 0x8000, 3)), OK);
    for index in 0..2 {
        let (_, reply) = guest.send(&window_add(1, 3, APERTURE + index * CHUNK), 12);
        assert_eq!(reply[8], OK);
    }
    let fault = Fault { reason: FaultReason::Mapping, endpoint: ENDPOINT, address: None, access: Permissions::READ };
    assert!(guest.handle.report_fault(fault));
    guest.function.pause();
    guest
}

/// Returns a device without a driver, whose RAM has the bytes of the RAM of `old`.
fn fresh(old: &Guest) -> Guest {
    let new = Guest::new(true);
    let mut bytes = vec![0; RAM];
    old.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    new.memory.write_slice(&bytes, GuestAddress(0)).unwrap();
    new
}

#[test]
fn restored_device_serves_the_next_request() {
    let old = lived();
    old.handle
        .with_window_chunk(1, |chunk| chunk.write_obj(0x5au8, usize::try_from(CHUNK).unwrap() - 1).unwrap())
        .unwrap();
    let state = old.function.save().unwrap();
    let text = serde_json::to_string(&state).unwrap();
    let mut new = fresh(&old);
    (new.available, new.event_idx) = (old.available, old.event_idx);
    new.function.restore(&serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(new.function.save().unwrap(), state);
    assert_eq!(new.handle.window_chunks(), [0, 1]);
    let mut bytes = vec![0; usize::try_from(CHUNK).unwrap()];
    for index in new.handle.window_chunks() {
        old.handle.with_window_chunk(index, |chunk| chunk.read_slice(&mut bytes, 0).unwrap()).unwrap();
        new.handle.with_window_chunk(index, |chunk| chunk.write_slice(&bytes, 0).unwrap()).unwrap();
    }
    assert_eq!(new.slots.load(BAR + 2 * CHUNK - 1), 0x5a, "the guest sees the chunk at its old address");
    assert_eq!(new.mapper.mapped_bytes(), 2 * CHUNK + 0x1000);
    new.function.resume();
    assert_eq!(new.simple(&unmap(1, 0x1000, 0x1fff)), OK);
    assert_eq!(new.mapper.mapped_bytes(), 2 * CHUNK);
}

#[test]
fn restored_chunks_get_slots_once_their_bar_has_an_address() {
    let old = lived();
    let state = old.function.save().unwrap();
    let (memory, msi, slots) = (old.memory.clone(), Arc::new(FakeMsi::default()), Arc::new(FakeSlots::default()));
    let (function, handle) = create(params(&memory, &msi, &slots, true)).unwrap();
    let mapper = RecordingMapper::new();
    handle.add_endpoint(ENDPOINT, Box::new(mapper)).unwrap();
    function.restore(&state).unwrap();
    assert_eq!(slots.len(), 0);
    function.bar_moved(2, BAR).unwrap();
    assert_eq!(slots.len(), 2);
    assert!(slots.at(BAR + CHUNK).is_some());
    assert!(handle.with_window_chunk(2, |_| ()).is_none());
}

#[test]
fn rejected_state_leaves_a_device_without_mappings() {
    let old = lived();
    let good = old.function.save().unwrap();
    let spoil = |path: &str, value: serde_json::Value| {
        let mut state: DeviceState = good.clone();
        *state.payload.pointer_mut(path).expect(path) = value;
        state
    };
    let engine = "/device/payload";
    for state in [
        spoil("/device/kind", "rng".into()),
        spoil(&format!("{engine}/version"), 9.into()),
        spoil(&format!("{engine}/domains/0/mappings/0/gpa"), (1u64 << 50).into()),
        spoil(&format!("{engine}/domains/0/chunks/1/index"), 0.into()),
        spoil(&format!("{engine}/domains/0/chunks/1/index"), u32::MAX.into()),
        spoil(&format!("{engine}/window/budget"), u64::MAX.into()),
        spoil(&format!("{engine}/faults/0/access"), 8.into()),
        spoil("/common/queues/0/served/next_avail", "x".into()),
    ] {
        let new = fresh(&old);
        assert!(new.function.restore(&state).is_err(), "{state:?}");
        new.function.reset().unwrap();
        assert!(new.mapper.is_empty());
        assert_eq!(new.handle.counters().window_bytes, 0);
    }
}
