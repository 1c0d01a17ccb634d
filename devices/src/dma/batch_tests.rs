// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the time that a batch of UNMAPs waits for stuck I/O of the host kernel. The tests sum up the waits instead of using a clock.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use iommu_bounce::spec::Status;
use iommu_bounce::test_utils::{attach, map, unmap};
use iommu_bounce::{Engine, EngineConfig, Permissions, UnmapRequest};
use vm_memory::GuestAddress;

use super::host_io::{HostIo, IO_DEADLINE, IoOwner, Running, Waiter};
use super::memory::DeviceMemory;
use super::table::DmaTable;
use super::table_mapper::TableMapper;
use crate::peer_timeouts::Operation;
use crate::ram::Ram;
use crate::sync::lock;
use crate::virtio::iommu::RamView;

const PAGE: u64 = 0x1000;
const REQUESTS: u16 = 8;
const DEVERR: u8 = Status::DevErr as u8;

/// Waiter that records the time limit of each wait and returns immediately. The waiter reports that each wait took the whole limit.
#[derive(Clone, Default)]
struct Counted(Arc<Mutex<Vec<Duration>>>);

impl Waiter for Counted {
    fn wait<'r>(
        &self,
        running: MutexGuard<'r, Running>,
        _: &Condvar,
        most: Duration,
    ) -> (MutexGuard<'r, Running>, Duration) {
        lock(&self.0).push(most);
        (running, most)
    }
}

/// Owner whose operations never end.
#[derive(Default)]
struct Stuck {
    cancelled: AtomicU32,
    given_up: AtomicU32,
}

impl IoOwner for Stuck {
    fn cancel(&self, _: u64) {
        self.cancelled.fetch_add(1, Ordering::Relaxed);
    }
    fn give_up(&self) {
        self.given_up.fetch_add(1, Ordering::Relaxed);
    }
}

struct Rig {
    engine: Engine,
    memory: DeviceMemory,
    waits: Counted,
}

/// Returns a device behind the virtio-iommu, with a mapping at every second page of its IOVA space.
fn rig() -> Rig {
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap());
    let waits = Counted::default();
    let table = Arc::new(DmaTable::with_waiter("disk", ram.clone(), Box::new(waits.clone())));
    let mut engine = Engine::new(EngineConfig::default(), Arc::new(RamView::new(ram, None, false)), None).unwrap();
    engine.add_endpoint(1, Box::new(TableMapper::new(table.clone()))).unwrap();
    engine.accept_features(engine.features());
    let maps = (0..u64::from(REQUESTS)).map(|n| map(1, 2 * n * PAGE, (2 * n + 1) * PAGE - 1, n * PAGE, 3));
    for request in std::iter::once(attach(1, 1)).chain(maps) {
        let mut reply = [0xff; 4];
        engine.handle(&request, &mut reply);
        assert_eq!(reply[0], 0);
    }
    Rig { engine, memory: DeviceMemory::mapped(table), waits }
}

impl Rig {
    fn begin(&self, n: u64, owner: &Arc<Stuck>) -> HostIo {
        self.memory.begin_io(&[(2 * n * PAGE, 16)], Permissions::WRITE, owner).unwrap()
    }

    /// Unmaps all mappings in one batch. Returns the status of each UNMAP.
    fn unmap_all(&mut self) -> Vec<u8> {
        let _operation = Operation::begin();
        let request = |n: u16| {
            let start = 2 * u64::from(n) * PAGE;
            UnmapRequest::decode(&unmap(1, start, start + PAGE - 1), 4, n)
        };
        let mut requests: Vec<_> = (0..REQUESTS).filter_map(request).collect();
        self.engine.handle_unmaps(&mut requests);
        requests.iter().map(|request| request.reply()[0]).collect()
    }

    fn waited(&self) -> Duration {
        lock(&self.waits.0).iter().sum()
    }
}

#[test]
fn batched_unmaps_wait_for_a_stuck_device_once() {
    let mut rig = rig();
    let owner = Arc::new(Stuck::default());
    let stuck: Vec<_> = (0..u64::from(REQUESTS)).map(|n| rig.begin(n, &owner)).collect();
    assert_eq!(rig.unmap_all(), [DEVERR; REQUESTS as usize]);
    assert_eq!(rig.waited(), IO_DEADLINE);
    let count_of = |count: &AtomicU32| count.load(Ordering::Relaxed);
    assert_eq!((count_of(&owner.cancelled), count_of(&owner.given_up)), (REQUESTS.into(), 1));
    // The device's I/O has exceeded the deadline once, so later UNMAPs do not wait for this I/O.
    assert_eq!(rig.unmap_all(), [DEVERR; REQUESTS as usize]);
    assert_eq!((rig.waited(), count_of(&owner.given_up)), (IO_DEADLINE, 1));
    drop(stuck);
    assert_eq!(rig.unmap_all(), [0; REQUESTS as usize]);
}

#[test]
fn batched_unmaps_share_one_deadline_for_all_devices() {
    let mut rig = rig();
    let owners: Vec<_> = (0..REQUESTS).map(|_| Arc::new(Stuck::default())).collect();
    let stuck: Vec<_> = (0..).zip(&owners).map(|(n, owner)| rig.begin(n, owner)).collect();
    assert_eq!(rig.unmap_all(), [DEVERR; REQUESTS as usize]);
    assert!(rig.waited() < IO_DEADLINE + Duration::from_secs(1), "{:?}", rig.waited());
    assert!(lock(&rig.waits.0).iter().all(|wait| !wait.is_zero()), "each wait has time left");
    assert!(owners.iter().all(|owner| owner.given_up.load(Ordering::Relaxed) == 1));
    drop(stuck);
}
