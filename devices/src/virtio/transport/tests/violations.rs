// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with drivers that break a rule of the device's initialization or of the PCI transport. Each case names the section of virtio 1.4
//! that contains the rule. `docs/virtio-conformance.md` lists the cases.

use super::*;

const FAILED: u8 = 128;

/// Each case contains the values that the driver writes to the device status, and the value that the driver reads afterwards.
#[test]
fn status_that_breaks_the_order_starts_nothing() {
    let cases: &[(&str, &[u8], u8)] = &[
        ("3.1.1: ready at once", &[DRIVER_OK], 0),
        ("3.1.1: ready without FEATURES_OK", &[1, 3, 7], 3),
        ("3.1.1: FEATURES_OK and no feature was accepted", &[1, 3, 11], 3),
        ("2.1: only the device can set DEVICE_NEEDS_RESET", &[1, 3, 3 | NEEDS_RESET], 3),
        ("2.1: bits cannot be cleared", &[1, 3, 1], 3),
        ("2.1: the driver gives up", &[1, 3, 3 | FAILED], 3 | FAILED),
        ("2.1: undefined bits", &[1, 3, 3 | 0x30], 3),
    ];
    for (case, writes, status) in cases {
        let harness = Harness::new();
        for value in *writes {
            harness.set_status(*value);
        }
        assert_eq!(harness.status(), *status, "{case}");
        harness.write(NOTIFY, &[0, 0]);
        assert!(lock(&harness.recorder.activations).is_empty(), "{case}");
        assert!(lock(&harness.recorder.notified).is_empty(), "{case}");
        harness.set_status(0);
        assert_eq!(harness.status(), 0, "{case}");
        harness.start();
        assert_eq!(lock(&harness.recorder.activations).len(), 1, "{case}: the device works after a reset");
    }
}

#[test]
fn second_driver_ok_does_not_start_the_device_again() {
    let harness = Harness::new();
    harness.start();
    for status in [15, 7, 15, 4] {
        harness.set_status(status);
        assert_eq!(harness.status(), 15);
    }
    // The driver initializes the device again without a reset.
    harness.negotiate();
    harness.set_queue(0, 8, [0x7000, 0x8000, 0x9000]);
    harness.set_status(15);
    assert_eq!(lock(&harness.recorder.activations).len(), 1);
    assert_eq!(harness.word(COMMON + 24), 16, "the queue did not change");
}

#[test]
fn read_only_registers_ignore_writes() {
    // Offset and length of each read-only register (4.1.4.3): `device_feature`, `num_queues`, `config_generation`, `queue_notify_off`.
    for (offset, len) in [(4, 4), (18, 2), (21, 1), (30, 2)] {
        let harness = Harness::new();
        let before: [u8; 56] = harness.read(COMMON);
        harness.write(COMMON + offset, &[0xa5; 8][..len]);
        assert_eq!(harness.read::<56>(COMMON), before, "offset {offset}");
    }
}

#[test]
fn enabled_queue_is_disabled_only_by_a_reset() {
    let harness = Harness::new();
    harness.negotiate();
    harness.set_queue(0, 16, [0x1000, 0x2000, 0x3000]);
    for value in [0u16, 2, 1, 0xffff] {
        harness.write(COMMON + 28, &value.to_le_bytes());
        assert_eq!(harness.word(COMMON + 28), 1, "{value} was written");
    }
    harness.set_status(0);
    harness.write(COMMON + 22, &[0, 0]);
    assert_eq!(harness.word(COMMON + 28), 0);
}

/// A driver must access each register with its own width (4.1.3.1).
#[test]
fn accesses_of_other_widths_change_nothing() {
    for len in [1usize, 2, 3, 4, 5, 6, 7, 8, 9, 64] {
        for offset in 0..56u64 {
            let harness = Harness::new();
            harness.negotiate();
            let before: [u8; 56] = harness.read(COMMON);
            let bytes = vec![1; len];
            harness.write(COMMON + offset, &bytes);
            let after: [u8; 56] = harness.read(COMMON);
            let legal = match len {
                1 => offset == 20,
                2 => [16, 22, 24, 26, 28].contains(&offset),
                4 => [0, 8].contains(&offset) || (32..56).contains(&offset) && offset % 4 == 0,
                8 => (32..56).contains(&offset) && offset % 4 == 0,
                _ => false,
            };
            assert!(legal || after == before, "{len} bytes at {offset} changed something");
        }
        // A read that begins within a register returns the rest of the register first. The device writes nothing beyond the end of the
        // read's buffer.
        let harness = Harness::new();
        let mut bytes = vec![0xee; len + 1];
        harness.function.read_bar(0, COMMON + 17, &mut bytes[..len]);
        assert_eq!((bytes[0], bytes[len]), (0xff, 0xee), "{len} bytes of the vector's second half");
    }
}

#[test]
fn notification_of_a_missing_queue_is_ignored() {
    let harness = Harness::new();
    harness.negotiate();
    harness.set_queue(0, 16, [0x1000, 0x2000, 0x3000]);
    harness.set_status(15);
    // The device has two queues, and the driver has enabled only the first queue. The transport passes notifications of both queues to the
    // device. The device itself must ignore a notification of the second queue.
    for (offset, data) in [(4, &[1, 0][..]), (8, &[2, 0]), (0x7c, &[31, 0]), (0xffc, &[0xff, 0xff])] {
        harness.write(NOTIFY + offset, data);
        assert_eq!(harness.status() & NEEDS_RESET, 0);
    }
    harness.function.write_bar(1, 0, &[2, 0]);
    harness.function.write_bar(1, 4, &[0xff, 0xff]);
    let wrong: Vec<u16> = lock(&harness.recorder.notified).iter().copied().filter(|queue| *queue > 1).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// The driver may set any bar, offset and length in the PCI configuration access capability (4.1.4.9).
#[test]
fn pci_cfg_access_to_an_invalid_target_changes_nothing() {
    let cases: [(&str, u8, u64, u32); 9] = [
        ("a missing BAR", 3, COMMON + 20, 1),
        ("an invalid BAR number", 9, COMMON + 20, 1),
        ("the largest BAR number", 0xff, COMMON + 20, 1),
        ("beyond the end of the BAR", 0, STRUCTURES_SIZE, 1),
        ("across the end of the BAR", 0, STRUCTURES_SIZE - 2, 4),
        ("an offset that wraps", 0, 0xffff_fffe, 4),
        ("length 0", 0, COMMON + 20, 0),
        ("an unsupported length", 0, COMMON + 20, 3),
        ("the maximum length", 0, COMMON + 20, u32::MAX),
    ];
    for (case, bar, offset, len) in cases {
        let harness = Harness::new();
        harness.set_status(ACKNOWLEDGE);
        let before: [u8; 56] = harness.read(COMMON);
        let at = harness.virtio_capability(5).unwrap();
        harness.function.write_config(at + 4, &[bar]);
        harness.function.write_config(at + 8, &u32::try_from(offset).unwrap().to_le_bytes());
        harness.function.write_config(at + 12, &len.to_le_bytes());
        harness.function.write_config(at + 16, &[0xff; 4]);
        let mut data = [0xee; 4];
        harness.function.read_config(at + 16, &mut data);
        assert_eq!(harness.read::<56>(COMMON), before, "{case}");
        assert!(lock(&harness.recorder.notified).is_empty(), "{case}");
    }
}
