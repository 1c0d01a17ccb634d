// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Unmaps ranges of a host address space. The kernel reports how many bytes each call has unmapped.
//!
//! The kernel unmaps all mappings in a range, and fails at a mapping that the range splits. A call that fails may already have unmapped
//! other mappings in the range. A call that succeeds leaves nothing mapped in the range. If the reported number of bytes is less than the
//! length of the range, the range had gaps.

use std::io;

use iommu_bounce::UnmapError;

/// Maximum number of calls for one range. A further call follows only if the last call has unmapped something.
const MOST_CALLS: u32 = 8;

/// Maximum number of ranges in [`Unmaps`].
const MOST_RANGES: usize = 256;

/// Ranges that an earlier unmap may have unmapped only in part.
#[derive(Default)]
pub(super) struct Unmaps {
    begun: Vec<(u64, u64)>,
}

impl Unmaps {
    /// Unmaps `[iova, iova + len)` by means of `call`. `call` takes the first IOVA and the length, and returns the number of bytes that
    /// were mapped in this range. If the range had gaps, calls `short` with this number of bytes.
    ///
    /// # Errors
    /// Something may still be mapped in the range. The caller can try again. A retry that finds nothing mapped succeeds.
    pub(super) fn unmap(
        &mut self,
        iova: u64,
        len: u64,
        mut call: impl FnMut(u64, u64) -> io::Result<u64>,
        short: impl FnOnce(u64),
    ) -> Result<(), UnmapError> {
        let outcome = call(iova, len);
        if matches!(outcome, Ok(done) if done == len) {
            self.forget(iova, len);
            return Ok(());
        }
        match outcome {
            Ok(done) if done > 0 => {
                self.note(iova, len);
                short(done);
            }
            // Nothing is mapped. Either an earlier call unmapped the range, or the range was never mapped.
            outcome if is_nothing(&outcome) => return self.nothing(iova, len),
            outcome => return Err(self.refused(iova, len, outcome)),
        }
        for _ in 1..MOST_CALLS {
            match call(iova, len) {
                Ok(done) if done > 0 => {}
                outcome if is_nothing(&outcome) => return self.nothing(iova, len),
                outcome => return Err(self.refused(iova, len, outcome)),
            }
        }
        Err(UnmapError::NotMapped)
    }

    /// Handles a range without mappings. Succeeds if a range in `begun` contains this range, because then an earlier call has unmapped this
    /// range. Otherwise fails, because the range was never mapped, or because the range splits a mapping of an IOAS.
    fn nothing(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        let within =
            |range: &(u64, u64)| range.0 <= iova && iova - range.0 <= range.1 && range.1 - (iova - range.0) >= len;
        let was_begun = self.begun.iter().any(within);
        self.forget(iova, len);
        if was_begun { Ok(()) } else { Err(UnmapError::NotMapped) }
    }

    fn refused(&mut self, iova: u64, len: u64, outcome: io::Result<u64>) -> UnmapError {
        match outcome {
            Err(error) if is_cut(&error) => UnmapError::NotMapped,
            Err(error) => {
                self.note(iova, len);
                UnmapError::Host(error)
            }
            Ok(_) => UnmapError::NotMapped,
        }
    }

    fn note(&mut self, iova: u64, len: u64) {
        if !self.begun.contains(&(iova, len)) {
            if self.begun.len() == MOST_RANGES {
                self.begun.remove(0);
            }
            self.begun.push((iova, len));
        }
    }

    /// Forgets a range that is unmapped completely.
    fn forget(&mut self, iova: u64, len: u64) {
        if !self.begun.is_empty() {
            self.begun.retain(|range| *range != (iova, len));
        }
    }
}

/// True if nothing is mapped in a range. Type 1 returns 0. IOMMUFD returns ENOENT, also for a range that splits a mapping.
fn is_nothing(outcome: &io::Result<u64>) -> bool {
    match outcome {
        Ok(done) => *done == 0,
        Err(error) => error.raw_os_error() == Some(libc::ENOENT),
    }
}

/// True if this is the error of type 1 version 2 for a range that splits a mapping.
fn is_cut(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex};

    use iommu_bounce::spec::Status;
    use iommu_bounce::test_utils::{TestRam, attach, detach, map, unmap};
    use iommu_bounce::{DmaMapper, Engine, EngineConfig, MapError, MapperLimits, Permissions};
    use vm_memory::VolatileSlice;

    use super::*;
    use crate::sync::lock;

    type Script = Arc<Mutex<VecDeque<io::Result<u64>>>>;

    fn errno(number: i32) -> io::Result<u64> {
        Err(io::Error::from_raw_os_error(number))
    }

    /// Fake host whose calls have the scripted outcomes. After the last scripted outcome, each call unmaps the whole range.
    struct Host {
        script: Script,
        unmaps: Unmaps,
    }

    impl DmaMapper for Host {
        fn map(&mut self, _: u64, _: VolatileSlice<'_>, _: Permissions) -> Result<(), MapError> {
            Ok(())
        }
        fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
            let script = &self.script;
            self.unmaps.unmap(iova, len, |_, len| lock(script).pop_front().unwrap_or(Ok(len)), |_| {})
        }
        fn limits(&self) -> MapperLimits {
            MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=u64::MAX], max_mappings: None }
        }
        fn keeps_page_tables(&self) -> bool {
            true
        }
    }

    /// Creates an engine whose domain maps four pages.
    fn rig() -> (Engine, Script) {
        let script = Script::default();
        let ram = Arc::new(TestRam::new(&[(0, 0x1_0000)]));
        let mut engine = Engine::new(EngineConfig::default(), ram, None).unwrap();
        let host = Host { script: script.clone(), unmaps: Unmaps::default() };
        engine.add_endpoint(1, Box::new(host)).unwrap();
        engine.accept_features(engine.features());
        let maps = (0..4).map(|page| map(1, page << 12, (page << 12) + 0xfff, 0, 3));
        for request in std::iter::once(attach(1, 1)).chain(maps) {
            assert_eq!(status(&mut engine, &request), 0);
        }
        (engine, script)
    }

    fn status(engine: &mut Engine, request: &[u8]) -> u8 {
        let mut reply = [0xff; 4];
        assert_eq!(engine.handle(request, &mut reply), 4);
        reply[0]
    }

    #[test]
    fn short_unmap_leaves_the_domain_usable() {
        for nothing in [Ok(0), errno(libc::ENOENT)] {
            let (mut engine, script) = rig();
            lock(&script).extend([Ok(0x3000), nothing]);
            assert_eq!(status(&mut engine, &unmap(1, 0, 0x3fff)), 0);
            assert!(lock(&script).is_empty());
            assert_eq!((engine.counters().stuck_ranges, engine.counters().mappings), (0, 0));
            assert_eq!(status(&mut engine, &map(1, 0, 0xfff, 0, 3)), 0);
        }
    }

    #[test]
    fn range_that_is_found_empty_by_a_retry_is_done() {
        for nothing in [Ok(0), errno(libc::ENOENT)] {
            let (mut engine, script) = rig();
            // A DETACH must complete. If it cannot unmap a range, the range is stuck, and the next request tries to unmap the range again.
            lock(&script).extend([errno(libc::EBUSY)]);
            assert_eq!(status(&mut engine, &detach(1, 1)), Status::DevErr as u8);
            assert_eq!(engine.counters().stuck_ranges, 1);
            lock(&script).push_back(nothing);
            assert_eq!(status(&mut engine, &attach(1, 1)), 0);
            assert_eq!(engine.counters().stuck_ranges, 0);
            assert_eq!(status(&mut engine, &map(1, 0, 0xfff, 0, 3)), 0);
        }
    }

    #[test]
    fn parts_of_a_range_are_unmapped_one_by_one_after_it_failed() {
        let mut unmaps = Unmaps::default();
        assert!(matches!(unmaps.unmap(0x1000, 0x3000, |_, _| errno(libc::EBUSY), |_| {}), Err(UnmapError::Host(_))));
        assert!(unmaps.unmap(0x3000, 0x1000, |_, _| errno(libc::ENOENT), |_| {}).is_ok());
        for iova in [0, 0x4000] {
            assert!(unmaps.unmap(iova, 0x1000, |_, _| errno(libc::ENOENT), |_| {}).is_err(), "{iova:#x}");
        }
        assert!(unmaps.unmap(0x3000, 0x2000, |_, _| Ok(0), |_| {}).is_err());
    }

    #[test]
    fn range_that_was_never_mapped_or_is_cut_is_an_error() {
        let mut unmaps = Unmaps::default();
        for outcome in [|| Ok(0), || errno(libc::ENOENT), || errno(libc::EINVAL)] {
            for _ in 0..2 {
                let refused = unmaps.unmap(0, 0x1000, |_, _| outcome(), |_| {});
                assert!(matches!(refused, Err(UnmapError::NotMapped)), "{refused:?}");
            }
        }
        assert!(unmaps.begun.is_empty());
    }

    #[test]
    fn unmap_that_always_finds_more_stops_at_the_call_limit() {
        let (mut unmaps, mut calls) = (Unmaps::default(), 0);
        let found = |_, _| {
            calls += 1;
            Ok(0x1000)
        };
        assert!(matches!(unmaps.unmap(0, 0x4000, found, |_| {}), Err(UnmapError::NotMapped)));
        assert_eq!(calls, MOST_CALLS);
    }
}
