// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of two devices behind one engine, and of the memory that each device can access while the devices are attached, moved and removed.

use std::sync::{Arc, Mutex};

use devices::guest_visible::GuestVisibleMemory;
use devices::pci::{PciDevice, regs};
use devices::virtio::iommu::RamView;
use iommu_bounce::spec::Status;
use iommu_bounce::test_utils::{self, TestRam};
use iommu_bounce::{Engine, EngineConfig, GuestRam};
use vm_memory::{Bytes, GuestAddress};

use crate::hardware::*;

/// Two edu devices behind an engine. In domain n (1 or 2), [`map`](Self::map) maps RAM page n - 1 at `SOURCE`, and RAM page n + 1 at
/// `TARGET`. RAM page n - 1 is filled with the byte n.
struct Pair {
    edus: [Edu; 2],
    engine: Engine,
    ram: Arc<TestRam>,
}

impl Pair {
    const SOURCE: u32 = 0x10_0000;
    const TARGET: u32 = 0x20_0000;

    fn open() -> Self {
        let host = host();
        let edus = ["CAROM_EDU", "CAROM_EDU2"].map(|variable| Edu::open_by(&host, variable));
        let ram = Arc::new(TestRam::new(&[(0, 4 * 4096)]));
        let config = EngineConfig { input_range: 0..=0xffff_ffff, ..Default::default() };
        let mut engine = Engine::new(config, ram.clone(), None).unwrap();
        for (endpoint, edu) in (1..).zip(&edus) {
            engine.add_endpoint(endpoint, Box::new(edu.0.mapper(endpoint, ram.clone()))).unwrap();
        }
        engine.accept_features(engine.features());
        let pair = Self { edus, engine, ram };
        pair.fill(0, 1);
        pair.fill(1, 2);
        pair
    }

    fn fill(&self, page: u64, byte: u8) {
        self.ram.slice(page * PAGE, PAGE).unwrap().copy_from(&[byte; 4096]);
    }

    fn request(&mut self, request: &[u8]) {
        let mut reply = [0xff; 4];
        assert_eq!(self.engine.handle(request, &mut reply), 4);
        assert_eq!(reply[0], 0, "{request:x?}");
    }

    fn attach(&mut self, endpoint: u32, domain: u32) {
        self.request(&test_utils::attach(endpoint, domain));
    }

    fn detach(&mut self, endpoint: u32, domain: u32) {
        self.request(&test_utils::detach(endpoint, domain));
    }

    fn map(&mut self, domain: u32) {
        for (iova, page) in [(Self::SOURCE, domain - 1), (Self::TARGET, domain + 1)] {
            let (start, gpa) = (u64::from(iova), u64::from(page) * PAGE);
            self.request(&test_utils::map(domain, start, start + PAGE - 1, gpa, 3));
        }
    }

    /// Returns the byte that `endpoint` copies from `SOURCE` to `TARGET`, and the domain whose page receives the byte. Returns `None` if no
    /// page receives a byte.
    fn carried(&self, endpoint: u32) -> Option<(u8, u32)> {
        self.fill(2, 0);
        self.fill(3, 0);
        let edu = &self.edus[endpoint as usize - 1];
        edu.copy(Self::SOURCE, true);
        edu.copy(Self::TARGET, false);
        let arrived = |domain: u32| {
            let mut data = [0; 2048];
            self.ram.slice(u64::from(domain + 1) * PAGE, 2048).unwrap().copy_to(&mut data);
            assert_eq!(data, [data[0]; 2048]);
            (data[0] != 0).then_some((data[0], domain))
        };
        let all: Vec<_> = [1, 2].into_iter().filter_map(arrived).collect();
        assert!(all.len() < 2, "the endpoint can access both domains");
        all.first().copied()
    }

    /// Checks that each endpoint can access only the domain that it is attached to.
    fn assert_in(&self, domains: [Option<u32>; 2]) {
        for (endpoint, domain) in (1..).zip(domains) {
            let wanted = domain.map(|domain| (u8::try_from(domain).unwrap(), domain));
            assert_eq!(self.carried(endpoint), wanted, "endpoint {endpoint} of {domains:?}");
        }
    }
}

#[test]
fn device_reaches_peer_registers_only_while_guest_sees_them() {
    const BAR: u64 = 0xc000_0000;
    const REGISTERS: u64 = 0x30_0000;
    let host = host();
    let edu = Edu::open_by(&host, "CAROM_EDU");
    let platform = Arc::new(Platform::default());
    let visible = Arc::new(GuestVisibleMemory::new(platform.clone()));
    let peer = open_with(&host, "CAROM_EDU2", platform, visible.clone());
    peer.command(regs::COMMAND_MEMORY);
    peer.device.bar_moved(0, BAR).unwrap();

    let memory = memory();
    let ram = Arc::new(RamView::new(memory.clone(), Some(visible.clone()), true));
    let config = EngineConfig { input_range: 0..=0xffff_ffff, ..Default::default() };
    let engine = Arc::new(Mutex::new(Engine::new(config, ram, None).unwrap()));
    engine.lock().unwrap().add_endpoint(1, Box::new(edu.0.mapper(1, memory.clone()))).unwrap();
    let features = engine.lock().unwrap().features();
    engine.lock().unwrap().accept_features(features);
    let revoking = engine.clone();
    visible.set_revoke(Box::new(move |gpa, len| revoking.lock().unwrap().revoke_device_memory(gpa, len)));

    let status = |request: &[u8]| {
        let mut reply = [0xff; 4];
        assert_eq!(engine.lock().unwrap().handle(request, &mut reply), 4);
        reply[0]
    };
    let map_registers = |bar| test_utils::map(1, REGISTERS, REGISTERS + PAGE - 1, bar, 2 | 4);
    assert_eq!(status(&test_utils::attach(1, 1)), 0);
    assert_eq!(status(&test_utils::map(1, 0x10_0000, 0x10_0fff, 0, 1)), 0);
    if by_iommufd() {
        // IOMMUFD cannot map device memory, so Carom does not offer such mappings with `--platform iommufd=on`.
        assert_eq!(status(&map_registers(BAR)), Status::DevErr as u8);
        return;
    }
    assert_eq!(status(&map_registers(BAR)), 0);
    // The peer's register 4 returns the inverse of the value written to it.
    let write = |value: u32| {
        memory.write_obj(value, GuestAddress(0)).unwrap();
        edu.copy_bytes(0x10_0000, true, 4);
        edu.copy_bytes(0x30_0004, false, 4);
        peer.register(4)
    };
    assert_eq!(write(0x1234_5678), !0x1234_5678);
    peer.command(0);
    peer.command(regs::COMMAND_MEMORY);
    assert_eq!(write(0x5555_0000), !0x1234_5678, "decoding was off meanwhile, and the registers were not mapped again");
    let unmap_registers = test_utils::unmap(1, REGISTERS, REGISTERS + PAGE - 1);
    assert_eq!((status(&unmap_registers), status(&map_registers(BAR))), (0, 0));
    assert_eq!(write(0x1234_5678), !0x1234_5678);
    peer.device.bar_released(0).unwrap();
    assert_eq!(write(0x5555_0000), !0x1234_5678, "the guest does not see the registers any more");
    peer.device.bar_moved(0, 2 * BAR).unwrap();
    assert_eq!(write(0x5555_0000), !0x1234_5678, "the registers were not mapped again");
    assert_ne!(status(&map_registers(2 * BAR)), 0, "the driver has not removed the mapping");
    assert_eq!(status(&unmap_registers), 0);
    assert_ne!(status(&map_registers(BAR)), 0, "the registers are not at this address any more");
    assert_eq!(status(&map_registers(2 * BAR)), 0);
    assert_eq!(write(0x0f0f_0f0f), !0x0f0f_0f0f);
}

#[test]
fn mapping_of_a_domain_is_one_call_by_iommufd() {
    let mut pair = Pair::open();
    pair.attach(1, 1);
    pair.attach(2, 1);
    pair.map(1);
    pair.assert_in([Some(1), Some(1)]);
    let calls = if by_iommufd() { 2 } else { 4 };
    assert_eq!(pair.engine.counters().host_maps, calls);
    pair.request(&test_utils::unmap(1, 0, u64::MAX >> 32));
    assert_eq!(pair.engine.counters().host_unmaps, calls);
    pair.assert_in([None, None]);
}

#[test]
fn endpoints_join_and_leave_domains_in_any_order() {
    let mut pair = Pair::open();
    pair.assert_in([None, None]);
    pair.attach(1, 1);
    pair.map(1);
    pair.assert_in([Some(1), None]);
    pair.attach(2, 1);
    pair.assert_in([Some(1), Some(1)]);
    // Detach endpoint 1 first, although domain 1 has used the address space of endpoint 1. Endpoint 2 must keep its access.
    pair.detach(1, 1);
    pair.assert_in([None, Some(1)]);
    pair.attach(1, 2);
    pair.map(2);
    pair.assert_in([Some(2), Some(1)]);
    // Endpoint 2 moves from domain to domain without a DETACH.
    pair.attach(2, 2);
    pair.assert_in([Some(2), Some(2)]);
    pair.attach(2, 1);
    pair.map(1);
    pair.assert_in([Some(2), Some(1)]);
    pair.attach(1, 1);
    pair.assert_in([Some(1), Some(1)]);
    pair.engine.reset();
    pair.engine.accept_features(pair.engine.features());
    pair.assert_in([None, None]);
    pair.attach(2, 2);
    pair.map(2);
    pair.assert_in([None, Some(2)]);
    pair.attach(1, 2);
    pair.detach(2, 2);
    pair.assert_in([Some(2), None]);
    assert_eq!(pair.engine.counters().stuck_ranges, 0);
    assert_eq!(pair.engine.counters().host_errors, 0);
}

#[test]
fn closed_device_leaves_the_domain_to_the_other() {
    let mut pair = Pair::open();
    pair.attach(1, 1);
    pair.attach(2, 1);
    pair.map(1);
    drop(pair.engine.remove_endpoint(1).unwrap());
    let [first, second] = pair.edus;
    let host = first.0.host.clone();
    drop(first);
    let again = Edu::open_by(&host, "CAROM_EDU");
    pair.edus = [again, second];
    let mapper = pair.edus[0].0.mapper(1, pair.ram.clone());
    pair.engine.add_endpoint(1, Box::new(mapper)).unwrap();
    pair.assert_in([None, Some(1)]);
    pair.attach(1, 1);
    pair.assert_in([Some(1), Some(1)]);
}
