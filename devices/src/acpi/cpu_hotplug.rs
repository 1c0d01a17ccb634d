// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Hot plug of processors: the registers by which the guest's ACPI methods learn which processors are there, came or are to go,
//! and by which they let go of them.
//!
//! | offset | registers | access |
//! | --- | --- | --- |
//! | 0 | processors that are there | read |
//! | 32 | processors that came since the last read, which clears it | read |
//! | 64 | processors that are to go, since the last read, which clears it | read |
//! | 96 | number of a processor that the guest has let go of | write |
//! | 100 | number of a processor that the guest was told to let go of and keeps | write |
//!
//! Each has 32 bits. The first three are eight in a row, bit n of register m for processor 32 m + n. They take accesses of their
//! own width only. The interrupt line is up while a bit of the second or third is set: a guest that does not listen yet will
//! find it so.

use std::collections::BTreeSet;
use std::sync::Mutex;

use log::{debug, info};
use serde::{Deserialize, Serialize};

use crate::platform::{BusDevice, InterruptLine};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;

/// Most processors that the registers have bits for.
pub const MAX_PROCESSORS: u32 = 256;
/// Offset of the registers that say which are there.
pub const PRESENT: u64 = 0;
/// Offset of those that say which came.
pub const CAME: u64 = PRESENT + MAX_PROCESSORS as u64 / 8;
/// Offset of those that say which are to go.
pub const TO_GO: u64 = CAME + MAX_PROCESSORS as u64 / 8;
/// Offset of the register for one that the guest has let go of.
pub const EJECT: u64 = TO_GO + MAX_PROCESSORS as u64 / 8;
/// Offset of the register for one that the guest keeps.
pub const REFUSE: u64 = EJECT + 4;
/// Bytes of all registers.
pub const REGISTERS_LEN: u64 = REFUSE + 4;

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("cpu-hotplug", 1);

/// Processors by number.
pub type Numbers = BTreeSet<u32>;

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// How many there are to be, the first ones. Others are there until the guest lets go of them.
    wanted: u32,
    present: Numbers,
    /// The guest has yet to be told that they came.
    came: Numbers,
    /// The guest has yet to be told that they are to go.
    to_go: Numbers,
    /// They are to go, and the guest has neither let go of them nor refused to.
    leaving: Numbers,
}

struct Inner {
    state: State,
    /// Those that have left and that [`CpuHotplug::take_gone`] has not told of yet.
    gone: Numbers,
}

/// The registers.
pub struct CpuHotplug {
    inner: Mutex<Inner>,
    line: Box<dyn InterruptLine>,
    /// Called, on a vCPU's thread, when a processor has left.
    left: Box<dyn Fn() + Send + Sync>,
}

/// The register of 32 bits for these of `numbers` that begin with `first`.
fn word(numbers: &Numbers, first: u32) -> u32 {
    numbers.range(first..first.saturating_add(32)).fold(0, |bits, number| bits | 1 << (number - first))
}

/// The same, and they are removed.
fn take_word(numbers: &mut Numbers, first: u32) -> u32 {
    let bits = word(numbers, first);
    numbers.retain(|number| !(first..first.saturating_add(32)).contains(number));
    bits
}

impl CpuHotplug {
    /// Registers of a VM that is to have the first `wanted` processors and has `present`. `left` is called on a vCPU's thread when
    /// the guest has let go of one.
    pub fn new(wanted: u32, present: Numbers, line: Box<dyn InterruptLine>, left: Box<dyn Fn() + Send + Sync>) -> Self {
        let state = State { wanted, present, came: Numbers::new(), to_go: Numbers::new(), leaving: Numbers::new() };
        Self { inner: Mutex::new(Inner { state, gone: Numbers::new() }), line, left }
    }

    /// The processors that are there.
    pub fn present(&self) -> Numbers {
        lock(&self.inner).state.present.clone()
    }

    /// A processor that the guest was told to let go of and has not answered for, and that would be there if the first `wanted` are:
    /// whether it goes first is the guest's choice.
    pub fn in_the_way(&self, wanted: u32) -> Option<u32> {
        lock(&self.inner).in_the_way(wanted)
    }

    /// Has the first `wanted` processors be there, and tells the guest of those that were not. It is asked to let go of all others
    /// that it has; again, if it was asked before.
    ///
    /// # Errors
    /// This one is [in the way](Self::in_the_way), or has just left. Nothing has changed.
    pub fn want(&self, wanted: u32) -> Result<(), u32> {
        let mut inner = lock(&self.inner);
        if let Some(number) = inner.in_the_way(wanted) {
            return Err(number);
        }
        let State { present, came, to_go, leaving, .. } = &mut inner.state;
        // What it was not told of yet is taken back.
        to_go.retain(|number| *number >= wanted);
        leaving.retain(|number| *number >= wanted);
        came.extend((0..wanted).filter(|number| present.insert(*number)));
        to_go.extend(present.range(wanted..));
        leaving.extend(present.range(wanted..));
        inner.state.wanted = wanted;
        self.drive(&inner.state);
        Ok(())
    }

    /// The processors that have left since the last call.
    pub fn take_gone(&self) -> Numbers {
        std::mem::take(&mut lock(&self.inner).gone)
    }

    /// Registers as a guest that boots finds them: there is what is wanted, and nothing new to tell. No guest holds the others any
    /// more, so they have left. To be called with all vCPUs stopped.
    pub fn reset(&self) {
        let mut inner = lock(&self.inner);
        let Inner { state, gone } = &mut *inner;
        gone.extend(state.present.split_off(&state.wanted));
        (state.came, state.to_go, state.leaving) = (Numbers::new(), Numbers::new(), Numbers::new());
        self.drive(state);
    }

    /// What the registers are. Called with all vCPUs stopped and none gone that was not [taken](Self::take_gone).
    ///
    /// # Errors
    /// None of today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &lock(&self.inner).state)
    }

    /// Makes registers that were just made, of the same processors, what `saved` says, and the interrupt line with them.
    ///
    /// # Errors
    /// What of the state is refused. Nothing has changed then.
    pub fn restore(&self, saved: &DeviceState) -> Result<(), StateError> {
        let new: State = saved.payload(STATE.0, STATE.1)?;
        let mut inner = lock(&self.inner);
        let State { wanted, present, .. } = &inner.state;
        if (new.wanted, &new.present) != (*wanted, present) {
            return Err(StateError::rule("present", "are not the processors that the VM has"));
        }
        let others: Numbers = present.range(wanted..).copied().collect();
        for (field, numbers, all) in
            [("came", &new.came, present), ("leaving", &new.leaving, &others), ("to_go", &new.to_go, &new.leaving)]
        {
            if let Some(number) = numbers.difference(all).next() {
                return Err(StateError::rule(field, format!("names processor {number}, which cannot be so")));
            }
        }
        inner.state = new;
        self.drive(&inner.state);
        Ok(())
    }

    fn drive(&self, state: &State) {
        if let Err(error) = self.line.set(!state.came.is_empty() || !state.to_go.is_empty()) {
            // Not a warning, which a guest could bring about as often as it likes.
            debug!("hot plug of processors: setting the interrupt line: {error}");
        }
    }
}

impl Inner {
    fn in_the_way(&self, wanted: u32) -> Option<u32> {
        let State { leaving, to_go, .. } = &self.state;
        leaving.difference(to_go).chain(&self.gone).copied().filter(|number| *number < wanted).min()
    }
}

impl BusDevice for CpuHotplug {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Ok(data) = <&mut [u8; 4]>::try_from(data) else { return };
        if !offset.is_multiple_of(4) || offset >= EJECT {
            return;
        }
        // Four bytes have the bits of 32 processors.
        let first = u32::try_from(offset % CAME * 8).unwrap_or(MAX_PROCESSORS);
        let mut inner = lock(&self.inner);
        let state = &mut inner.state;
        let bits = match offset {
            PRESENT..CAME => word(&state.present, first),
            CAME..TO_GO => take_word(&mut state.came, first),
            _ => take_word(&mut state.to_go, first),
        };
        self.drive(state);
        *data = bits.to_le_bytes();
    }

    /// Processors that nobody asked for stay, and so do those that the guest was not told of yet.
    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(data) = <[u8; 4]>::try_from(data) else { return };
        let number = u32::from_le_bytes(data);
        let mut inner = lock(&self.inner);
        let Inner { state, gone } = &mut *inner;
        let told = state.leaving.contains(&number) && !state.to_go.contains(&number);
        match offset {
            EJECT if told => {
                state.leaving.remove(&number);
                state.present.remove(&number);
                state.came.remove(&number);
                gone.insert(number);
                self.drive(state);
                drop(inner);
                (self.left)();
            }
            REFUSE if told => {
                state.leaving.remove(&number);
                info!("vCPU {number}: the guest does not let go of it");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::platform::test_support::FakeLine;

    struct Rig {
        registers: CpuHotplug,
        line: FakeLine,
        left: Arc<AtomicUsize>,
    }

    fn rig_of(wanted: u32, present: Numbers) -> Rig {
        let (line, left) = (FakeLine::default(), Arc::new(AtomicUsize::new(0)));
        let count = left.clone();
        let called = Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        Rig { registers: CpuHotplug::new(wanted, present, Box::new(line.clone()), called), line, left }
    }

    fn rig(count: u32) -> Rig {
        rig_of(count, (0..count).collect())
    }

    impl Rig {
        fn read(&self, offset: u64) -> u32 {
            let mut data = [0xff; 4];
            self.registers.read(offset, &mut data);
            u32::from_le_bytes(data)
        }

        fn write(&self, offset: u64, number: u32) {
            self.registers.write(offset, &number.to_le_bytes());
        }

        fn is_up(&self) -> bool {
            self.line.is_up()
        }

        fn present(&self) -> Vec<u32> {
            self.registers.present().into_iter().collect()
        }
    }

    #[test]
    fn new_processors_are_reported_once_and_present_ones_always() {
        let rig = rig(2);
        assert!(!rig.is_up());
        rig.registers.want(35).unwrap();
        assert!(rig.is_up());
        assert_eq!((rig.read(CAME), rig.read(CAME)), (0xffff_fffc, 0));
        assert!(rig.is_up(), "there are more");
        assert_eq!(rig.read(CAME + 4), 0b111);
        assert!(!rig.is_up());
        for _ in 0..2 {
            let there: Vec<u32> = (0..8).map(|word| rig.read(PRESENT + 4 * word)).collect();
            assert_eq!(there, [u32::MAX, 0b111, 0, 0, 0, 0, 0, 0]);
        }
        rig.registers.want(254).unwrap();
        assert_eq!((rig.read(PRESENT + 28), rig.read(CAME + 28)), (0x3fff_ffff, 0x3fff_ffff));
    }

    #[test]
    fn processor_goes_when_the_guest_lets_go_of_it_and_no_other() {
        let rig = rig(4);
        rig.registers.want(2).unwrap();
        rig.write(EJECT, 3);
        assert_eq!(rig.present(), [0, 1, 2, 3], "it was not told yet");
        assert_eq!((rig.is_up(), rig.read(TO_GO), rig.is_up()), (true, 0b1100, false));
        for number in [0, 1, 4, 32, 255, 256, u32::MAX] {
            rig.write(EJECT, number);
        }
        assert_eq!((rig.present(), rig.left.load(Ordering::Relaxed)), (vec![0, 1, 2, 3], 0));
        rig.write(EJECT, 3);
        rig.write(EJECT, 3);
        assert_eq!((rig.present(), rig.left.load(Ordering::Relaxed)), (vec![0, 1, 2], 1));
        assert_eq!((rig.registers.take_gone(), rig.registers.take_gone()), (Numbers::from([3]), Numbers::new()));
        // Come back, it is nobody's to eject.
        rig.write(EJECT, 2);
        rig.registers.take_gone();
        rig.registers.want(4).unwrap();
        rig.read(CAME);
        rig.write(EJECT, 3);
        assert_eq!(rig.present(), [0, 1, 2, 3]);
    }

    #[test]
    fn request_is_repeated_and_one_that_the_guest_refuses_is_over() {
        let rig = rig(3);
        for _ in 0..2 {
            rig.registers.want(2).unwrap();
            assert_eq!(rig.read(TO_GO), 0b100);
        }
        rig.write(REFUSE, 0);
        assert_eq!(rig.registers.in_the_way(3), Some(2));
        rig.write(REFUSE, 2);
        assert_eq!(rig.registers.in_the_way(3), None);
        rig.write(EJECT, 2);
        assert_eq!(rig.present(), [0, 1, 2], "refused");
        rig.registers.want(2).unwrap();
        // An answer to the request before.
        rig.write(REFUSE, 2);
        assert_eq!(rig.read(TO_GO), 0b100);
        rig.write(EJECT, 2);
        assert_eq!(rig.present(), [0, 1]);
    }

    #[test]
    fn processor_that_may_be_about_to_leave_is_not_wanted_back() {
        let rig = rig(4);
        rig.registers.want(2).unwrap();
        assert_eq!(rig.registers.in_the_way(4), None);
        // The guest knows nothing of it.
        rig.registers.want(4).unwrap();
        assert_eq!((rig.is_up(), rig.read(TO_GO), rig.present()), (false, 0, vec![0, 1, 2, 3]));
        rig.registers.want(2).unwrap();
        rig.read(TO_GO);
        assert_eq!((rig.registers.want(3), rig.registers.want(4), rig.registers.want(1)), (Err(2), Err(2), Ok(())));
        rig.read(TO_GO);
        rig.write(EJECT, 2);
        assert_eq!(rig.registers.want(3), Err(1));
        rig.write(REFUSE, 1);
        assert_eq!(rig.registers.want(3), Err(2), "its thread runs still");
        rig.registers.take_gone();
        rig.registers.want(3).unwrap();
        assert_eq!((rig.present(), rig.read(CAME)), (vec![0, 1, 2, 3], 0b100));
    }

    #[test]
    fn reset_completes_what_was_asked_for() {
        let rig = rig(2);
        rig.registers.want(5).unwrap();
        rig.registers.want(3).unwrap();
        rig.registers.reset();
        assert!(!rig.is_up());
        assert_eq!((rig.present(), rig.registers.take_gone()), (vec![0, 1, 2], Numbers::from([3, 4])));
        assert_eq!((rig.read(CAME), rig.read(TO_GO)), (0, 0));
    }

    #[test]
    fn restored_registers_go_on_where_the_saved_ones_stood() {
        let old = rig(2);
        old.registers.want(4).unwrap();
        old.registers.want(3).unwrap();
        let state = old.registers.save().unwrap();
        let new = rig_of(3, (0..4).collect());
        new.registers.restore(&state).unwrap();
        assert_eq!(new.registers.save().unwrap(), state);
        assert_eq!((new.is_up(), new.read(CAME), new.read(TO_GO), new.is_up()), (true, 0b1100, 0b1000, false));
        new.write(EJECT, 3);
        assert_eq!(new.present(), [0, 1, 2]);
        let other = rig(4);
        let refused = other.registers.restore(&state).unwrap_err().to_string();
        assert_eq!(refused, "present: are not the processors that the VM has");
        let good = json!({"wanted": 4, "present": [0, 1, 2, 3], "came": [], "to_go": [], "leaving": []});
        for (field, value, wanted) in [
            ("came", json!([4]), "came: names processor 4, which cannot be so"),
            ("leaving", json!([3]), "leaving: names processor 3"),
            ("to_go", json!([u32::MAX]), "to_go: names processor 4294967295"),
        ] {
            let mut state = good.clone();
            state[field] = value;
            let state = DeviceState::new(STATE.0, STATE.1, &state).unwrap();
            assert!(other.registers.restore(&state).unwrap_err().to_string().starts_with(wanted), "{wanted}");
        }
        assert!(!other.is_up());
    }

    #[test]
    fn accesses_of_other_widths_and_places_do_nothing() {
        let rig = rig(2);
        rig.registers.want(4).unwrap();
        rig.registers.want(3).unwrap();
        for len in [0, 1, 2, 3, 8] {
            for offset in [PRESENT, CAME, TO_GO, EJECT] {
                let mut data = vec![0xff; len];
                rig.registers.read(offset, &mut data);
                assert_eq!(data, vec![0; len]);
                rig.registers.write(offset, &vec![3; len]);
            }
        }
        for offset in [1, CAME + 1, CAME + 2, TO_GO - 1, EJECT, EJECT + 1, REFUSE, REGISTERS_LEN, u64::MAX] {
            assert_eq!(rig.read(offset), 0, "{offset}");
        }
        assert_eq!(rig.read(TO_GO), 0b1000);
        for offset in [0, CAME, TO_GO, EJECT - 4, EJECT + 1, REFUSE + 4, u64::MAX] {
            rig.write(offset, 3);
        }
        assert_eq!((rig.present(), rig.read(CAME)), (vec![0, 1, 2, 3], 0b1100));
    }

    proptest! {
        /// Whatever a guest writes and reads, what is wanted is there, and only what it was told to let go of leaves.
        #[test]
        fn guest_decides_nothing_but_when(
            steps in prop::collection::vec((0u8..4, 1u32..6, 0u64..30), 0..60),
        ) {
            let rig = rig(2);
            let mut wanted = 2;
            for (step, number, place) in steps {
                match step {
                    0 if rig.registers.want(number).is_ok() => wanted = number,
                    1 => drop(rig.read(place * 4)),
                    2 => rig.write(EJECT + place % 2 * 4, number),
                    3 => drop(rig.registers.take_gone()),
                    _ => {}
                }
                let present = rig.registers.present();
                prop_assert!((0..wanted).all(|number| present.contains(&number)), "{wanted}: {present:?}");
            }
            rig.registers.reset();
            prop_assert_eq!(rig.registers.present(), (0..wanted).collect::<Numbers>());
        }
    }
}
