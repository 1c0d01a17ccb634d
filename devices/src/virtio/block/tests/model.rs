// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test that compares a disk with a model. The model is an array of bytes.

use proptest::prelude::*;

use super::harness::*;
use crate::virtio::block::IoMode;
use crate::virtio::block::spec::{request, status};

const SECTORS: u64 = 256;

#[derive(Clone, Debug)]
enum Step {
    /// Sector, number of sectors, position at which the data is split into two buffers, and offset of the first buffer from the start of a
    /// page.
    Read(u64, u64, u64, u64),
    Write(u64, u64, u64, u64, u8),
    Zero(u64, u32, bool),
    Discard(u64, u32),
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0..SECTORS + 8, 0..24u64, 0..0x3000u64, 0..0x1000u64);
    prop_oneof![
        4 => place().prop_map(|(sector, sectors, cut, at)| Step::Read(sector, sectors, cut, at)),
        6 => (place(), any::<u8>()).prop_map(|((sector, sectors, cut, at), seed)| Step::Write(sector, sectors, cut, at, seed)),
        2 => (0..SECTORS + 8, 0..40u32, any::<bool>()).prop_map(|(sector, sectors, unmap)| Step::Zero(sector, sectors, unmap)),
        1 => (0..SECTORS + 8, 0..40u32).prop_map(|(sector, sectors)| Step::Discard(sector, sectors)),
        1 => Just(Step::Flush),
    ]
}

/// Returns two buffers with `len` bytes in total. The first buffer has at most `cut` bytes, and starts `at` bytes after the start of a
/// page.
fn buffers(len: u64, cut: u64, at: u64) -> Vec<(u64, u32)> {
    let cut = cut.min(len);
    let length = |len: u64| u32::try_from(len).unwrap();
    vec![(DATA + at, length(cut)), (DATA + 0x8000 + at / 2, length(len - cut))]
}

/// Returns the bytes of the model that a request covers. Returns `None` if the request exceeds the disk.
fn part(model: &mut [u8], sector: u64, sectors: u64) -> Option<&mut [u8]> {
    let start = usize::try_from(sector * 512).unwrap();
    model.get_mut(start..start + usize::try_from(sectors * 512).unwrap())
}

fn run(kind: Kind, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut model = pattern(usize::try_from(SECTORS * 512).unwrap(), 0);
    let mut disk = Harness::new(kind, file(&model));
    for step in steps {
        let code = |there: bool| if there { status::OK } else { status::IOERR };
        match *step {
            Step::Read(sector, sectors, cut, at) => {
                let parts = buffers(sectors * 512, cut, at);
                let expected = part(&mut model, sector, sectors).map(|bytes| bytes.to_vec());
                prop_assert_eq!(disk.call(request::IN, sector, &parts), code(expected.is_some()));
                if let Some(expected) = expected {
                    let read: Vec<u8> = parts.iter().flat_map(|(at, len)| disk.bytes(*at, *len as usize)).collect();
                    prop_assert!(read == expected, "{:?}", step);
                }
            }
            Step::Write(sector, sectors, cut, at, seed) => {
                let parts = buffers(sectors * 512, cut, at);
                let bytes = pattern(usize::try_from(sectors * 512).unwrap(), seed);
                let (first, second) = bytes.split_at(parts[0].1 as usize);
                disk.fill(parts[0].0, first);
                disk.fill(parts[1].0, second);
                let there = part(&mut model, sector, sectors).map(|place| place.copy_from_slice(&bytes)).is_some();
                prop_assert_eq!(disk.call(request::OUT, sector, &parts), code(there));
            }
            Step::Zero(sector, sectors, unmap) => {
                let there = part(&mut model, sector, sectors.into()).map(|place| place.fill(0)).is_some();
                let range = [(sector, sectors, u32::from(unmap))];
                prop_assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &range), code(there));
            }
            Step::Discard(sector, sectors) => {
                let there = part(&mut model, sector, sectors.into()).is_some();
                prop_assert_eq!(disk.call_ranges(request::DISCARD, &[(sector, sectors, 0)]), code(there));
                if let Some(place) = part(&mut model, sector, sectors.into()) {
                    // The content after a discard is undefined: the old bytes or zeroes.
                    let now = disk.image(sector * 512, place.len());
                    for (now, old) in now.iter().zip(place.iter()) {
                        prop_assert!(now == old || *now == 0);
                    }
                    place.copy_from_slice(&now);
                }
            }
            Step::Flush => prop_assert_eq!(disk.call(request::FLUSH, 0, &[]), status::OK),
        }
    }
    prop_assert!(disk.image(0, model.len()) == model);
    prop_assert_eq!(disk.content.metadata().unwrap().len(), SECTORS * 512);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn disk_behaves_like_its_model(
        steps in prop::collection::vec(step(), 1..24),
        translated in any::<bool>(),
        copied in any::<bool>(),
        durable in any::<bool>(),
    ) {
        // Both I/O modes must give the same results.
        for mode in [IoMode::Async, IoMode::Plain] {
            let memory = if copied { 512 } else { 1 };
            let without = if durable { NO_FLUSH } else { 0 };
            run(Kind { mode, translated, memory, without, ..PLAIN }, &steps)?;
        }
    }
}
