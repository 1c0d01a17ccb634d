// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::pci::regs::{COMMAND, COMMAND_MEMORY};
use crate::platform::test_support::EventRecorder;

const LONG: Duration = Duration::from_secs(60);
const FAST: [u8; 2] = [0x07, 0];
const ENABLE: u8 = 2;

struct Fixture {
    device: Watchdog,
    recorder: Arc<EventRecorder>,
    resets: Arc<AtomicU32>,
}

impl Fixture {
    fn new() -> Self {
        let (recorder, resets) = (Arc::new(EventRecorder::default()), Arc::new(AtomicU32::new(0)));
        let counted = resets.clone();
        let expired = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        Self { device: Watchdog::new("_watchdog".into(), recorder.clone(), expired).unwrap(), recorder, resets }
    }

    fn resets(&self) -> u32 {
        self.resets.load(Ordering::Relaxed)
    }

    /// Writes the keys and then a memory-mapped register, as drivers do.
    fn write(&self, offset: u64, data: &[u8]) {
        self.device.write_bar(0, 0xc, &[0x80, 0]);
        self.device.write_bar(0, 0xc, &[0x86, 0]);
        self.device.write_bar(0, offset, data);
    }

    fn reload(&self) {
        self.write(0xc, &0x100u16.to_le_bytes());
    }

    /// Makes the counter count in steps of about a microsecond, and starts stages of `stage_us` microseconds.
    fn start(&self, stage_us: u32) {
        self.device.write_config(0x60, &FAST);
        self.write(0, &stage_us.to_le_bytes());
        self.write(4, &stage_us.to_le_bytes());
        self.device.write_config(0x68, &[ENABLE]);
    }

    fn timed_out(&self) -> bool {
        let mut register = [0; 2];
        self.device.read_bar(0, 0xc, &mut register);
        u16::from_le_bytes(register) & 0x200 != 0
    }

    fn wait_for_reset(&self) {
        let start = Instant::now();
        while self.resets() == 0 {
            assert!(start.elapsed() < LONG, "the watchdog does not expire");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn driver_finds_the_device() {
    let fixture = Fixture::new();
    let mut id = [0; 4];
    fixture.device.read_config(0, &mut id);
    assert_eq!(u32::from_le_bytes(id), 0x25ab_8086);
    assert!(!fixture.timed_out());
}

#[test]
fn guest_is_reset_once_and_only_after_it_stops_reloading() {
    let fixture = Fixture::new();
    // Pause the watchdog while its stages are short. The write to the configuration register makes a stage last about a quarter of an hour.
    // Without the pause, a short stage could end before this write.
    fixture.device.pause();
    fixture.start(1_000_000);
    fixture.device.write_config(0x60, &[0, 0]);
    fixture.reload();
    fixture.device.resume();
    for _ in 0..20 {
        fixture.reload();
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(fixture.resets(), 0);
    fixture.device.write_config(0x60, &FAST);
    fixture.write(0, &1000u32.to_le_bytes());
    fixture.write(4, &1000u32.to_le_bytes());
    fixture.reload();
    fixture.wait_for_reset();
    thread::sleep(Duration::from_millis(20));
    assert_eq!((fixture.resets(), fixture.recorder.take()), (1, vec![DeviceEvent::WatchdogExpired]));
    // The restarted guest finds a stopped counter, and the reason for the reset.
    fixture.device.reset().unwrap();
    let mut lock = [0xff];
    fixture.device.read_config(0x68, &mut lock);
    assert_eq!((lock, fixture.timed_out()), ([0], true));
    fixture.write(0xc, &0x300u16.to_le_bytes());
    assert!(!fixture.timed_out());
}

#[test]
fn disabled_masked_or_free_running_counter_resets_no_guest() {
    for (config, lock) in [([0x07, 0], 0), ([0x27, 0], ENABLE), ([0x07, 0], ENABLE | 4)] {
        let fixture = Fixture::new();
        // Pause the watchdog, so that no stage ends before all registers are set.
        fixture.device.pause();
        fixture.start(500);
        fixture.device.write_config(0x60, &config);
        fixture.device.write_config(0x68, &[lock]);
        fixture.device.resume();
        thread::sleep(Duration::from_millis(30));
        assert_eq!(fixture.resets(), 0, "{config:?} {lock}");
        fixture.device.reset().unwrap();
    }
}

#[test]
fn locked_counter_is_stopped_only_by_a_reset() {
    let fixture = Fixture::new();
    fixture.start(1_000_000);
    fixture.device.write_config(0x68, &[ENABLE | 1]);
    fixture.device.write_config(0x68, &[0]);
    let mut lock = [0];
    fixture.device.read_config(0x68, &mut lock);
    assert_eq!(lock, [ENABLE | 1]);
    fixture.device.reset().unwrap();
    fixture.device.read_config(0x68, &mut lock);
    assert_eq!(lock, [0]);
}

#[test]
fn registers_ignore_writes_without_the_keys() {
    let fixture = Fixture::new();
    fixture.device.pause();
    fixture.start(200_000);
    let preload = || fixture.device.save().unwrap().payload["registers"]["preload"].clone();
    let before = preload();
    for keys in [&[][..], &[0x86], &[0x80], &[0x86, 0x80], &[0x80, 0x87]] {
        keys.iter().for_each(|key| fixture.device.write_bar(0, 0xc, &[*key, 0]));
        fixture.device.write_bar(0, 0, &[0xff, 0xff, 0xf, 0]);
        fixture.device.write_bar(0, 4, &[0xff, 0xff, 0xf, 0]);
    }
    assert_eq!(preload(), before, "the lengths of the stages are unchanged");
}

#[test]
fn counter_stops_while_the_vm_is_paused() {
    let fixture = Fixture::new();
    fixture.device.pause();
    fixture.start(1000);
    thread::sleep(Duration::from_millis(30));
    assert_eq!(fixture.resets(), 0);
    fixture.device.resume();
    fixture.wait_for_reset();
}

#[test]
fn restored_device_continues_from_the_saved_state() {
    let old = Fixture::new();
    old.device.assign_bar(0, 0xe000_0000);
    old.device.write_config(COMMAND, &COMMAND_MEMORY.to_le_bytes());
    old.device.pause();
    old.start(5000);
    let state = old.device.save().unwrap();
    let new = Fixture::new();
    new.device.restore(&state).unwrap();
    assert_eq!(new.device.save().unwrap(), state);
    assert_eq!(new.device.bar_address(0), Some(0xe000_0000));
    thread::sleep(Duration::from_millis(30));
    assert_eq!(new.resets(), 0);
    new.device.resume();
    new.wait_for_reset();

    let text = serde_json::to_string(&state).unwrap();
    for (from, to) in [("\"left_ns\":", "\"left_ns\":9"), ("\"lock\":2", "\"lock\":0"), ("\"keys\":0", "\"keys\":3")] {
        let wrong = text.replace(from, to);
        assert_ne!(wrong, text, "{from}");
        let fixture = Fixture::new();
        assert!(fixture.device.restore(&serde_json::from_str(&wrong).unwrap()).is_err(), "{wrong}");
    }
}

proptest! {
    #[test]
    fn random_accesses_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        fuzzing::run(&bytes);
    }
}
