// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use proptest::prelude::*;

use super::*;

/// Returns a time on 14 March 2031 (a Friday), 21:07:59 UTC.
fn evening() -> Timestamp {
    "2031-03-14T21:07:59.75Z".parse().unwrap()
}

fn cmos(now: fn() -> Timestamp) -> Cmos {
    Cmos::with_clock(3 << 30, 5 << 30, now)
}

fn read(cmos: &Cmos, index: u8) -> u8 {
    cmos.write(0, &[index]);
    let mut data = [0xff; 1];
    cmos.read(1, &mut data);
    data[0]
}

fn write(cmos: &Cmos, index: u8, value: u8) {
    cmos.write(0, &[index]);
    cmos.write(1, &[value]);
}

fn fields(cmos: &Cmos) -> [u8; 8] {
    [CENTURY, YEAR, MONTH, DAY, DAY_OF_WEEK, HOURS, MINUTES, SECONDS].map(|index| read(cmos, index))
}

#[test]
fn clock_shows_the_host_time_in_the_format_of_register_b() {
    let cmos = cmos(evening);
    assert_eq!(fields(&cmos), [0x20, 0x31, 0x03, 0x14, 6, 0x21, 0x07, 0x59]);
    write(&cmos, REGISTER_B, B_BINARY | B_24_HOURS);
    assert_eq!(fields(&cmos), [20, 31, 3, 14, 6, 21, 7, 59]);
    write(&cmos, REGISTER_B, B_BINARY);
    assert_eq!(read(&cmos, HOURS), 9 | AFTERNOON);
    write(&cmos, REGISTER_B, 0);
    assert_eq!(read(&cmos, HOURS), 0x09 | AFTERNOON);
}

#[test]
fn twelve_hour_format_has_no_hour_0() {
    for (time, hours) in [
        ((|| "2026-01-01T00:00:00Z".parse().unwrap()) as fn() -> Timestamp, 0x12),
        (|| "2026-01-01T11:00:00Z".parse().unwrap(), 0x11),
        (|| "2026-01-01T12:00:00Z".parse().unwrap(), 0x12 | AFTERNOON),
        (|| "2026-01-01T23:00:00Z".parse().unwrap(), 0x11 | AFTERNOON),
    ] {
        let cmos = cmos(time);
        write(&cmos, REGISTER_B, 0);
        assert_eq!(read(&cmos, HOURS), hours);
    }
}

#[test]
fn cmos_ignores_time_writes_and_keeps_other_memory() {
    let cmos = cmos(evening);
    for index in [CENTURY, YEAR, MONTH, DAY, DAY_OF_WEEK, HOURS, MINUTES, SECONDS] {
        write(&cmos, index, 1);
    }
    assert_eq!(fields(&cmos), [0x20, 0x31, 0x03, 0x14, 6, 0x21, 0x07, 0x59]);
    write(&cmos, 0x0f, 0xa5);
    assert_eq!(read(&cmos, 0x0f), 0xa5);
    // The index port stores bit 7, but bit 7 does not select another byte.
    assert_eq!(read(&cmos, 0x8f), 0xa5);
    let mut index = [0];
    cmos.read(0, &mut index);
    assert_eq!(index, [0x8f]);
}

#[test]
fn clock_is_valid_and_never_updating() {
    let cmos = cmos(evening);
    for value in [0, 0xff] {
        for index in [REGISTER_A, REGISTER_C, REGISTER_D] {
            write(&cmos, index, value);
        }
        assert_eq!((read(&cmos, REGISTER_A) & A_UPDATE_IN_PROGRESS, read(&cmos, REGISTER_C)), (0, 0));
        assert_eq!(read(&cmos, REGISTER_D), D_VALID);
    }
}

#[test]
fn clock_stands_still_briefly_after_a_register_a_read() {
    let mut registers = Registers { index: REGISTER_A, cells: cells(1 << 30, 0), held_since: None };
    let start = evening();
    registers.cell(start);
    registers.index = SECONDS;
    let after = |registers: &mut Registers, millis| registers.cell(start + Duration::from_millis(millis));
    assert_eq!([0, 49].map(|millis| after(&mut registers, 10 + millis)), [0x59, 0x59]);
    assert_eq!(after(&mut registers, 300), 0x00, "the next minute has begun");
    // The host's clock was set back. So the clock does not stand still.
    assert_eq!(registers.cell(start - Duration::from_secs(10)), 0x49);
}

#[test]
fn memory_reports_the_amount_of_ram() {
    let at = |low_end, high, indices: &[u8]| {
        let cmos = Cmos::new(low_end, high);
        indices.iter().rev().fold(0u64, |sum, index| (sum << 8) | u64::from(read(&cmos, *index)))
    };
    assert_eq!(at(3 << 30, 0, &[0x34, 0x35]) << 16, (3 << 30) - (16 << 20));
    assert_eq!(at(3 << 30, 5 << 30, &[0x5b, 0x5c, 0x5d]) << 16, 5 << 30);
    assert_eq!(at(8 << 20, 0, &[0x34, 0x35]), 0);
    assert_eq!(at(3 << 30, 1 << 42, &[0x5b, 0x5c, 0x5d]), 0xff_ffff);
}

#[test]
fn restored_memory_is_unchanged_and_bad_states_are_refused() {
    let (old, new) = (cmos(evening), cmos(evening));
    write(&old, 0x40, 7);
    write(&old, REGISTER_B, B_BINARY | B_24_HOURS);
    let state = old.save().unwrap();
    new.restore(&state).unwrap();
    assert_eq!(new.save().unwrap(), state);
    assert_eq!((read(&new, 0x40), read(&new, SECONDS)), (7, 59));
    let with = |at: usize, value: u8| {
        let mut state = state.clone();
        state.payload["cells"][at] = value.into();
        new.restore(&state).unwrap_err().to_string()
    };
    assert_eq!(
        with(0x5b, 9),
        "cells: the saved cells differ from the cells of this VM at an index that no guest can write: restore with the configuration that was saved"
    );
    assert_eq!(
        with(0x0a, 0xa6),
        "cells: the saved register A reports an update in progress, but this clock never does: restore from an unmodified snapshot"
    );
    let mut short = state.clone();
    short.payload = serde_json::json!({ "index": 0, "cells": [1, 2] });
    assert_eq!(
        new.restore(&short).unwrap_err().to_string(),
        "cells: the saved state must have 128 cells of one byte: restore from an unmodified snapshot"
    );
}

#[test]
fn reset_keeps_the_memory_and_clears_index_and_time() {
    let cmos = cmos(evening);
    write(&cmos, 0x40, 7);
    read(&cmos, REGISTER_A);
    cmos.write(0, &[0xc0]);
    cmos.reset();
    let mut index = [0xff];
    cmos.read(0, &mut index);
    assert_eq!((index, cmos.lock().held_since), ([0], None));
    assert_eq!(read(&cmos, 0x40), 7);
}

proptest! {
    /// Compares the CMOS with a model in which only writable bytes change.
    #[test]
    fn any_accesses_leave_time_and_ram_alone(
        accesses in prop::collection::vec((any::<bool>(), 0u64..4, prop::collection::vec(any::<u8>(), 0..5)), 0..64)
    ) {
        let cmos = cmos(evening);
        let mut model = (0u8, cells(3 << 30, 5 << 30));
        for (is_write, offset, bytes) in accesses {
            if is_write {
                cmos.write(offset, &bytes);
                for (port, value) in (offset..2).zip(&bytes) {
                    let index = model.0 & 0x7f;
                    match port {
                        0 => model.0 = *value,
                        _ if index == 0x0a => model.1[0x0a] = value & 0x7f,
                        _ if is_writable(index) => model.1[usize::from(index)] = *value,
                        _ => {}
                    }
                }
            } else {
                let mut data = bytes.clone();
                cmos.read(offset, &mut data);
                for (at, (byte, before)) in data.iter().zip(&bytes).enumerate() {
                    let index = model.0 & 0x7f;
                    match offset + at as u64 {
                        0 => prop_assert_eq!(*byte, model.0),
                        1 if is_writable(index) || matches!(index, 0x0c | 0x0d | 0x34 | 0x35 | 0x5b..=0x5d) => {
                            prop_assert_eq!(*byte, model.1[usize::from(index)]);
                        }
                        1 => {}
                        _ => prop_assert_eq!(byte, before),
                    }
                }
            }
        }
        let binary = model.1[0x0b] & B_BINARY != 0;
        prop_assert_eq!(read(&cmos, MINUTES), 7);
        prop_assert_eq!(read(&cmos, SECONDS), if binary { 59 } else { 0x59 });
        prop_assert_eq!(cmos.save().unwrap().payload["cells"].as_array().unwrap().len(), 128);
    }
}
