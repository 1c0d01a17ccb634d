// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with a low limit on locked memory. A mapping beyond the limit must fail, and none of its pages may stay pinned.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::spec::{Status, config};
use iommu_bounce::test_utils::{TestRam, attach, attach_bypass, detach, map as map_request, unmap};
use iommu_bounce::{DmaMapper, Engine, EngineConfig, GuestRam, MapError, Permissions};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::hardware::*;

/// Lowered limit on locked memory. While this value exists, this thread also has no right to exceed the limit. Dropping the value restores
/// the limit and the right.
struct LockedMemoryLimit {
    limit: Rlimit,
    capabilities: CapabilitySets,
}

impl LockedMemoryLimit {
    fn lower_to(bytes: u64) -> Self {
        let limit = getrlimit(Resource::Memlock);
        let capabilities = rustix::thread::capabilities(None).unwrap();
        setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), maximum: limit.maximum }).unwrap();
        let effective = capabilities.effective - CapabilitySet::IPC_LOCK;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..capabilities }).unwrap();
        Self { limit, capabilities }
    }
}

impl Drop for LockedMemoryLimit {
    fn drop(&mut self) {
        rustix::thread::set_capabilities(None, self.capabilities).unwrap();
        setrlimit(Resource::Memlock, self.limit).unwrap();
    }
}

#[test]
fn map_over_locked_memory_limit_fails_and_keeps_the_others() {
    let edu = Edu::open();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    let both = Permissions::READ | Permissions::WRITE;
    let limit = LockedMemoryLimit::lower_to(2 * PAGE);
    for number in 0..2 {
        map(&mut mapper, &memory, 0x10_0000 + number * PAGE, number, both).unwrap();
    }
    for _ in 0..3 {
        let third = map(&mut mapper, &memory, 0x20_0000, 2, both);
        assert!(matches!(third, Err(MapError::NoResources)), "{third:?}");
    }
    // The accepted mappings work, and the rejected mapping does not exist.
    edu.copy(0x10_0000, true);
    edu.copy(0x10_1000, false);
    edu.copy(0x20_0000, false);
    assert_eq!(page(&memory, 1), [1; 2048]);
    assert_eq!(page(&memory, 2), [3; 2048]);
    // An unmap makes room for another mapping.
    mapper.unmap(0x10_1000, PAGE).unwrap();
    map(&mut mapper, &memory, 0x20_0000, 2, both).unwrap();
    edu.copy(0x20_0000, false);
    assert_eq!(page(&memory, 2), [1; 2048]);
    drop(limit);
    map(&mut mapper, &memory, 0x10_1000, 1, both).unwrap();
}

/// Returns the number of bytes that the kernel has pinned for this process.
fn pinned() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let kib = |key: &str| -> u64 {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    (kib("VmLck:") + kib("VmPin:")) << 10
}

/// Tries to turn bypass on 40 times, for a guest with 64 MiB of RAM in a process that may lock only 8 MiB. Each try uses first the bypass
/// register and then a bypass domain.
#[test]
fn repeated_bypass_over_locked_memory_limit_pins_nothing() {
    const RAM: usize = 64 << 20;
    const LIMIT: u64 = 8 << 20;
    const TIMES: u32 = 40;
    const IOVA: u32 = 0x10_0000;
    /// Maximum time of one try to map 64 MiB as one range.
    const LONGEST: Duration = Duration::from_secs(2);
    let edu = Edu::open();
    let ram = Arc::new(TestRam::new(&[(0, RAM)]));
    let mapper = edu.0.mapper(7, ram.clone());
    let mut engine = Engine::new(EngineConfig::default(), ram.clone(), None).unwrap();
    engine.add_endpoint(7, Box::new(mapper)).unwrap();
    engine.accept_features(u64::MAX);
    let send = |engine: &mut Engine, request: &[u8]| {
        let mut reply = [0; 4];
        assert_eq!(engine.handle(request, &mut reply), 4);
        reply[0]
    };
    let (ok, before) = (Status::Ok as u8, pinned());
    let limit = LockedMemoryLimit::lower_to(LIMIT);
    let (mut slowest, mut refused) = (Duration::ZERO, [0; 256]);
    for round in 0..TIMES {
        let start = Instant::now();
        engine.write_bypass(1);
        assert_eq!(engine.config_space()[config::BYPASS], 0, "round {round}");
        assert_eq!(pinned(), before, "round {round}: after the register was written");
        let by_register = start.elapsed();

        let status = send(&mut engine, &attach_bypass(7, 2));
        assert!([Status::NoMem as u8, Status::DevErr as u8].contains(&status), "round {round}: {status}");
        refused[usize::from(status)] += 1;
        assert_eq!(pinned(), before, "round {round}: after an attach to a bypass domain");
        slowest = slowest.max(by_register).max(start.elapsed() - by_register);

        // Mappings within the limit work.
        assert_eq!(send(&mut engine, &attach(7, 1)), ok, "round {round}");
        let (first, last) = (u64::from(IOVA), u64::from(IOVA) + PAGE - 1);
        assert_eq!(send(&mut engine, &map_request(1, first, last, 0, 3)), ok, "round {round}");
        assert_eq!(pinned(), before + PAGE, "round {round}: one page is mapped");
        if round % 10 == 0 {
            ram.slice(0, PAGE).unwrap().copy_from(&[9u8; 4096]);
            edu.copy(IOVA, true);
            ram.slice(0, PAGE).unwrap().copy_from(&[0u8; 4096]);
            edu.copy(IOVA, false);
            let mut arrived = [0u8; 2048];
            ram.slice(0, 2048).unwrap().copy_to(&mut arrived);
            assert_eq!(arrived, [9; 2048]);
        }
        assert_eq!(send(&mut engine, &unmap(1, first, last)), ok);
        assert_eq!(send(&mut engine, &detach(7, 1)), ok);
        assert_eq!(pinned(), before, "round {round}: all is unmapped");
    }
    let counted: Vec<_> = refused.iter().enumerate().filter(|(_, count)| **count > 0).collect();
    println!("{TIMES} times, the slowest took {slowest:?}; ATTACH by status: {counted:?}");
    assert!(slowest < LONGEST, "{slowest:?}");

    // After the old limit is restored, bypass works. The failed tries must not prevent this.
    drop(limit);
    assert_eq!(send(&mut engine, &attach_bypass(7, 2)), ok);
    assert_eq!(pinned(), before + RAM as u64);
    assert_eq!(send(&mut engine, &detach(7, 2)), ok);
    assert_eq!(pinned(), before);
}
