// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Compares `Reclaim` with a model that knows the mappings of each page. `Reclaim` and the model must give back the same pages.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use iommu_bounce::test_utils::RecordingMapper;
use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{Bytes, FileOffset, GuestAddress, VolatileSlice};

use super::*;

const RW: Permissions = Permissions::READ.union(Permissions::WRITE);
/// First page and number of pages of each region. The first region has three whole blocks and 7 more pages. The second region is smaller
/// than a block.
const REGIONS: [(u64, u64); 2] = [(0, 3 * 512 + 7), (4096, 100)];
const MARK: u64 = 0x6d61_726b;

fn ram(shared: bool) -> Arc<Ram> {
    let file = |pages: u64| {
        let file: OwnedFd = memfd_create("reclaim", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, pages * PAGE).unwrap();
        FileOffset::new(File::from(file), 0)
    };
    let regions = REGIONS.map(|(first, pages)| {
        let len = usize::try_from(pages * PAGE).unwrap();
        RamRegion::from_range(GuestAddress(first * PAGE), len, shared.then(|| file(pages))).unwrap()
    });
    Arc::new(Ram::new(regions.into(), 1).unwrap())
}

fn pages() -> impl Iterator<Item = u64> {
    REGIONS.into_iter().flat_map(|(first, pages)| first..first + pages)
}

fn slice(ram: &Ram, page: u64, count: u64) -> VolatileSlice<'_> {
    ram.get_slice(GuestAddress(page * PAGE), usize::try_from(count * PAGE).unwrap()).unwrap()
}

fn mark(ram: &Ram) {
    pages().for_each(|page| ram.write_obj(MARK, GuestAddress(page * PAGE)).unwrap());
}

/// True if the page still has its mark. A page that was given back reads as zero.
fn is_kept(ram: &Ram, page: u64) -> bool {
    match ram.read_obj::<u64>(GuestAddress(page * PAGE)).unwrap() {
        MARK => true,
        0 => false,
        other => panic!("page {page} has {other:#x}"),
    }
}

/// Generates a range of pages in one region: first page and number of pages.
fn range() -> impl Strategy<Value = (u64, u64)> {
    (0..REGIONS.len(), any::<prop::sample::Index>(), any::<prop::sample::Index>()).prop_map(|(region, from, len)| {
        let (first, pages) = REGIONS[region];
        let from = from.index(usize::try_from(pages).unwrap()) as u64;
        (first + from, 1 + len.index(usize::try_from(pages - from).unwrap()) as u64)
    })
}

#[derive(Clone, Debug)]
enum Step {
    /// Map a range of pages with one of two mappers. If the flag is true, the host rejects the mapping.
    Map(usize, (u64, u64), bool),
    /// Unmap one of the mapper's mappings, if it has any. If the flag is true, the host rejects the unmap.
    Unmap(usize, prop::sample::Index, bool),
    /// Pin (true) or unpin (false) all RAM.
    Whole(bool),
    /// Drop the mapper with all its mappings, and create a new one.
    Leave(usize),
    /// Give back bytes at an address. The range may include addresses outside RAM and parts of pages.
    GiveBack(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let part = 0..8 * PAGE;
    prop_oneof![
        4 => (0..2usize, range(), prop::bool::weighted(0.1)).prop_map(|(mapper, range, fail)| Step::Map(mapper, range, fail)),
        3 => (0..2usize, any::<prop::sample::Index>(), prop::bool::weighted(0.1))
            .prop_map(|(mapper, which, fail)| Step::Unmap(mapper, which, fail)),
        1 => prop::bool::weighted(0.2).prop_map(Step::Whole),
        1 => (0..2usize).prop_map(Step::Leave),
        4 => (range(), part).prop_map(|((first, count), more)| Step::GiveBack(first * PAGE + more % 3 * 100, count * PAGE + more)),
    ]
}

/// Mapper, and the mappings that it has in the model. Each mapping has an IOVA, a first page and a number of pages.
struct Side {
    mapper: PinningMapper<RecordingMapper>,
    probe: iommu_bounce::test_utils::MapperProbe,
    mapped: Vec<(u64, u64, u64)>,
}

impl Side {
    fn new(reclaim: &Arc<Reclaim>) -> Self {
        let mapper = RecordingMapper::default();
        let probe = mapper.probe();
        Self { mapper: PinningMapper::new(mapper, reclaim.clone()), probe, mapped: Vec::new() }
    }
}

fn run(steps: Vec<Step>, shared: bool, huge: u64) {
    let ram = ram(shared);
    let reclaim = Arc::new(Reclaim::new(ram.clone(), huge * PAGE));
    let mut sides = [Side::new(&reclaim), Side::new(&reclaim)];
    let (mut whole, mut iova) = (None, 0);
    for step in steps {
        match step {
            Step::Map(side, (first, count), fail) => {
                let side = &mut sides[side];
                if fail {
                    side.probe.fail_map(0);
                }
                let outcome = side.mapper.map(iova, slice(&ram, first, count), RW);
                assert_eq!(outcome.is_err(), fail);
                if !fail {
                    side.mapped.push((iova, first, count));
                }
                // Some mappings have no gap before the next mapping.
                iova += (count + u64::from(first.is_multiple_of(2))) * PAGE;
            }
            Step::Unmap(side, which, fail) => {
                let side = &mut sides[side];
                if side.mapped.is_empty() {
                    continue;
                }
                let which = which.index(side.mapped.len());
                let (iova, _, count) = side.mapped[which];
                if fail {
                    side.probe.fail_unmap(0);
                }
                assert_eq!(side.mapper.unmap(iova, count * PAGE).is_err(), fail);
                if !fail {
                    side.mapped.remove(which);
                }
            }
            Step::Whole(on) => whole = on.then(|| reclaim.pin_whole()),
            Step::Leave(side) => sides[side] = Side::new(&reclaim),
            Step::GiveBack(gpa, len) => {
                mark(&ram);
                let done = reclaim.give_back(gpa, len);
                let is_pinned = |page: u64| {
                    let mut mapped = sides.iter().flat_map(|side| &side.mapped);
                    whole.is_some() || mapped.any(|(_, first, count)| (*first..first + count).contains(&page))
                };
                let goes = |page: u64| {
                    let (start, count) = REGIONS.into_iter().find(|(first, count)| page < first + count).unwrap();
                    // Number of the host page's first 4 KiB page. The host frees memory only in whole host pages.
                    let first = start + (page - start) / huge * huge;
                    let inside =
                        first * PAGE >= gpa && (first + huge) * PAGE <= gpa + len && first + huge <= start + count;
                    inside && !(first..first + huge).any(is_pinned)
                };
                let mut gone = 0;
                for page in pages() {
                    assert_eq!(is_kept(&ram, page), !goes(page), "page {page} of {gpa:#x}, {len:#x} bytes");
                    gone += u64::from(goes(page));
                }
                let of_ram: u64 = REGIONS
                    .iter()
                    .map(|(first, count)| (gpa + len).min((first + count) * PAGE).saturating_sub(gpa.max(first * PAGE)))
                    .sum();
                assert_eq!(done, Reclaimed { given_back: gone * PAGE, kept_back: of_ram - gone * PAGE, refused: 0 });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn exactly_unpinned_pages_are_given_back(
        steps in prop::collection::vec(step(), 1..40), shared in any::<bool>(), huge in prop::sample::select(vec![1u64, 512])
    ) {
        run(steps, shared, huge);
    }
}

#[test]
fn addresses_outside_ram_give_nothing_back() {
    let reclaim = Reclaim::new(ram(false), PAGE);
    for (gpa, len) in [(3000 * PAGE, PAGE), (1 << 40, 1 << 40), (u64::MAX - 5, u64::MAX), (0, 0)] {
        assert_eq!(reclaim.give_back(gpa, len), Reclaimed::default());
    }
    let all = reclaim.give_back(0, u64::MAX);
    assert_eq!(all.given_back, pages().count() as u64 * PAGE);
}

#[test]
fn later_region_is_given_back_and_pinned_like_the_others() {
    let ram = ram(false);
    let reclaim = Arc::new(Reclaim::new(ram.clone(), PAGE));
    assert_eq!(reclaim.give_back(0, PAGE).given_back, PAGE);
    ram.add(RamRegion::from_range(GuestAddress(1 << 32), 1 << 20, None).unwrap()).unwrap();
    let mut mapper = PinningMapper::new(RecordingMapper::default(), reclaim.clone());
    mapper.map(0, slice(&ram, (1 << 32) / PAGE, 1), RW).unwrap();
    let done = reclaim.give_back(1 << 32, 2 * PAGE);
    assert_eq!((done.given_back, done.kept_back), (PAGE, PAGE));
    drop(mapper);
    assert_eq!(reclaim.give_back(1 << 32, 2 * PAGE).given_back, 2 * PAGE);
}

#[test]
fn pins_of_a_withdrawn_region_do_not_affect_its_successor() {
    let ram = ram(false);
    let reclaim = Arc::new(Reclaim::new(ram.clone(), PAGE));
    let start = GuestAddress(1 << 32);
    let mapper_of = |page| {
        let mut mapper = PinningMapper::new(RecordingMapper::default(), reclaim.clone());
        mapper.map(0, slice(&ram, start.0 / PAGE + page, 1), RW).unwrap();
        mapper
    };
    ram.add(RamRegion::from_range(start, 1 << 20, None).unwrap()).unwrap();
    let late = mapper_of(0);
    assert_eq!(reclaim.give_back(start.0, PAGE).kept_back, PAGE);
    assert!(ram.withdraw(start));
    assert_eq!(reclaim.give_back(start.0, PAGE), Reclaimed::default());

    // The next region at this address is longer than the withdrawn region. The first page of the withdrawn region is still pinned.
    ram.add(RamRegion::from_range(start, 4 << 20, None).unwrap()).unwrap();
    let last_page = (4 << 20) / PAGE - 1;
    let mapper = mapper_of(last_page);
    let all = reclaim.give_back(start.0, 4 << 20);
    assert_eq!((all.given_back, all.kept_back), (last_page * PAGE, PAGE));
    drop((mapper, late));
    assert_eq!(reclaim.give_back(start.0, 4 << 20).given_back, 4 << 20);

    // Pages that were unpinned while their region was withdrawn are free when the region is added again.
    assert!(ram.withdraw(start));
    assert_eq!(ram.add_again(start, 1 << 20), Ok(true));
    assert_eq!(reclaim.give_back(start.0, 1 << 20).given_back, 1 << 20);
}

#[test]
fn pinning_mapper_reports_the_inner_mappers_properties() {
    let reclaim = Arc::new(Reclaim::new(ram(false), PAGE));
    let wrapped = |mapper| PinningMapper::new(mapper, reclaim.clone());
    let plain = wrapped(RecordingMapper::default());
    assert!(!plain.keeps_page_tables() && plain.maps_hidden_chunks() && plain.group().is_none());
    assert!(wrapped(RecordingMapper::default().with_page_tables()).keeps_page_tables());
    assert!(!wrapped(RecordingMapper::default().without_hidden_chunks()).maps_hidden_chunks());
}

/// Dropping this value ends the thread that gives memory back, even if the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Checks that a mapped page keeps its content while another thread gives back all unpinned pages.
#[test]
fn mapped_page_is_never_given_back() {
    let ram = ram(false);
    let reclaim = Arc::new(Reclaim::new(ram.clone(), PAGE));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let giver = scope.spawn(|| {
            let mut given = 0;
            while !done.load(Ordering::Relaxed) {
                given += reclaim.give_back(0, u64::MAX).given_back;
                std::thread::yield_now();
            }
            given
        });
        let end = End(&done);
        let mut mapper = PinningMapper::new(RecordingMapper::default(), reclaim.clone());
        for round in 0..500u64 {
            let (page, count) = (round * 37 % 900, 1 + round % 600);
            mapper.map(0, slice(&ram, page, count), RW).unwrap();
            let ends = [page, page + count - 1].map(|page| GuestAddress(page * PAGE));
            ends.iter().for_each(|at| ram.write_obj(page + 1, *at).unwrap());
            std::thread::yield_now();
            ends.iter().for_each(|at| assert_eq!(ram.read_obj::<u64>(*at).unwrap(), page + 1));
            mapper.unmap(0, count * PAGE).unwrap();
        }
        drop(end);
        assert!(giver.join().unwrap() > 0);
    });
}
