// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmark of memory reads by an emulated device behind the virtio-iommu, with 1 to 1,000,000 mappings. For comparison, the benchmark
//! also measures a device that is not behind the IOMMU.

use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use devices::dma::{Backing, DeviceMemory, DmaTable};
use devices::ram::Ram;
use iommu_bounce::Permissions;
use vm_memory::{Bytes, GuestAddress};

const PAGE: u64 = 0x1000;
/// Number of RAM pages that the mappings refer to.
const PAGES: u64 = 1024;

fn ram() -> Arc<Ram> {
    let len = usize::try_from(PAGES * PAGE).expect("the length fits into usize");
    Arc::new(Ram::from_ranges(&[(GuestAddress(0), len)]).expect("memory"))
}

/// Creates the memory of a device behind the virtio-iommu. The device has `mappings` mappings of one page each, at every second page of its
/// IOVA space.
fn mapped(mappings: u64) -> DeviceMemory {
    let table = DmaTable::new("bench", ram(), None);
    for number in 0..mappings {
        let (iova, gpa) = (2 * number * PAGE, number % PAGES * PAGE);
        assert!(table.insert(iova, PAGE, Backing::Ram(gpa), Permissions::READ | Permissions::WRITE));
    }
    DeviceMemory::mapped(Arc::new(table))
}

/// Advances `next` to another mapping, and reads 64 bytes from this mapping.
fn read(memory: &DeviceMemory, next: &mut u64, mappings: u64, stride: u64) {
    // 611,953 has no common factor with any value of `mappings`, so repeated steps visit all mappings. The order is neither ascending nor
    // descending.
    *next = (*next + 611_953) % mappings;
    let mut bytes = [0; 64];
    memory.view().read_slice(&mut bytes, GuestAddress(*next * stride)).expect("the range is mapped");
    std::hint::black_box(bytes);
}

fn translation(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("read_64_bytes");
    let beside = DeviceMemory::all_ram(ram());
    let mut next = 0;
    group.bench_function("all_ram", |bencher| bencher.iter(|| read(&beside, &mut next, PAGES, PAGE)));
    for mappings in [1, 100, 10_000, 1_000_000] {
        let memory = mapped(mappings);
        let mut next = 0;
        group.bench_function(BenchmarkId::new("mappings", mappings), |bencher| {
            bencher.iter(|| read(&memory, &mut next, mappings, 2 * PAGE));
        });
    }
    group.finish();
}

criterion_group!(benches, translation);
criterion_main!(benches);
