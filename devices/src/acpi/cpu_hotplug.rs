// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers for processor hotplug. The guest's ACPI methods read registers to learn which processors are present, were added or must be
//! removed. The methods write other registers to release processors or to refuse their release.
//!
//! | offset | registers | access |
//! | --- | --- | --- |
//! | 0 | processors that are present | read |
//! | 32 | processors added since the last read; a read clears the register | read |
//! | 64 | processors whose removal was requested since the last read; a read clears the register | read |
//! | 96 | number of a processor that the guest has released | write |
//! | 100 | number of a processor that the guest refuses to release | write |
//!
//! Each register has 32 bits and accepts only 32-bit accesses. The first three rows of the table are groups of eight registers. Bit n of
//! register m in a group stands for processor 32 m + n. The interrupt line is active while the second or third group has a bit set. So a
//! guest that enables the interrupt late misses no event.

use std::collections::BTreeSet;
use std::sync::Mutex;

use log::{debug, info};
use serde::{Deserialize, Serialize};

use crate::platform::{BusDevice, InterruptLine};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;

/// Maximum number of processors that the registers have bits for.
pub const MAX_PROCESSORS: u32 = 256;
/// Offset of the registers of present processors.
pub const PRESENT: u64 = 0;
/// Offset of the registers of added processors.
pub const CAME: u64 = PRESENT + MAX_PROCESSORS as u64 / 8;
/// Offset of the registers of processors that must be removed.
pub const TO_GO: u64 = CAME + MAX_PROCESSORS as u64 / 8;
/// Offset of the register for a processor that the guest has released.
pub const EJECT: u64 = TO_GO + MAX_PROCESSORS as u64 / 8;
/// Offset of the register for a processor that the guest refuses to release.
pub const REFUSE: u64 = EJECT + 4;
/// Size of all registers in bytes.
pub const REGISTERS_LEN: u64 = REFUSE + 4;

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("cpu-hotplug", 1);

/// Set of processor numbers.
pub type Numbers = BTreeSet<u32>;

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    /// Number of processors that the VM should have: processors 0 to `wanted - 1`. Other processors stay present until the guest releases
    /// them or the VM is reset.
    wanted: u32,
    present: Numbers,
    /// Added processors whose bits the guest has not read yet.
    came: Numbers,
    /// Processors whose removal was requested, if the guest has not read the request yet.
    to_go: Numbers,
    /// Processors that must be removed, and that the guest has neither released nor refused to release.
    leaving: Numbers,
}

struct Inner {
    state: State,
    /// Removed processors that [`CpuHotplug::take_gone`] has not returned yet.
    gone: Numbers,
}

/// Registers of processor hotplug.
pub struct CpuHotplug {
    inner: Mutex<Inner>,
    line: Box<dyn InterruptLine>,
    /// Called on a vCPU's thread after the guest has released a processor.
    left: Box<dyn Fn() + Send + Sync>,
}

/// Returns the 32-bit register for processor `first` and the 31 processors after it.
fn word(numbers: &Numbers, first: u32) -> u32 {
    numbers.range(first..first.saturating_add(32)).fold(0, |bits, number| bits | 1 << (number - first))
}

/// Like [`word`], but also removes these 32 processors from `numbers`.
fn take_word(numbers: &mut Numbers, first: u32) -> u32 {
    let bits = word(numbers, first);
    numbers.retain(|number| !(first..first.saturating_add(32)).contains(number));
    bits
}

impl CpuHotplug {
    /// Creates the registers of a VM. The VM has the processors in `present`, and should have processors 0 to `wanted - 1`. `left` is
    /// called on a vCPU's thread when the guest has released a processor.
    pub fn new(wanted: u32, present: Numbers, line: Box<dyn InterruptLine>, left: Box<dyn Fn() + Send + Sync>) -> Self {
        let state = State { wanted, present, came: Numbers::new(), to_go: Numbers::new(), leaving: Numbers::new() };
        Self { inner: Mutex::new(Inner { state, gone: Numbers::new() }), line, left }
    }

    /// Returns the processors that are present.
    pub fn present(&self) -> Numbers {
        lock(&self.inner).state.present.clone()
    }

    /// Returns the lowest number, below `wanted`, of a processor that prevents a change to `wanted` processors. Returns `None` if no
    /// processor prevents the change. A processor prevents the change in two cases:
    ///
    /// - The processor was removed, and [`take_gone`](Self::take_gone) has not returned it yet.
    /// - The guest has read the request to release the processor, but has neither released the processor nor refused. The guest may still
    ///   release the processor at any time.
    pub fn in_the_way(&self, wanted: u32) -> Option<u32> {
        lock(&self.inner).in_the_way(wanted)
    }

    /// Makes the first `wanted` processors present, and notifies the guest of added processors. Asks the guest to release all other
    /// present processors, even if the guest was asked before.
    ///
    /// # Errors
    /// Returns the number of a processor that [prevents the change](Self::in_the_way). In this case nothing has changed.
    pub fn want(&self, wanted: u32) -> Result<(), u32> {
        let mut inner = lock(&self.inner);
        if let Some(number) = inner.in_the_way(wanted) {
            return Err(number);
        }
        let State { present, came, to_go, leaving, .. } = &mut inner.state;
        // Withdraw requests that the guest has not read yet.
        to_go.retain(|number| *number >= wanted);
        leaving.retain(|number| *number >= wanted);
        came.extend((0..wanted).filter(|number| present.insert(*number)));
        to_go.extend(present.range(wanted..));
        leaving.extend(present.range(wanted..));
        inner.state.wanted = wanted;
        self.drive(&inner.state);
        Ok(())
    }

    /// Returns the processors that were removed since the last call of this function.
    pub fn take_gone(&self) -> Numbers {
        std::mem::take(&mut lock(&self.inner).gone)
    }

    /// Resets the registers for a guest that boots. The guest finds the wanted processors at boot, so no processor is reported as added.
    /// All other processors are removed, because no guest uses them any more. Call this function while all vCPUs are stopped.
    pub fn reset(&self) {
        let mut inner = lock(&self.inner);
        let Inner { state, gone } = &mut *inner;
        gone.extend(state.present.split_off(&state.wanted));
        (state.came, state.to_go, state.leaving) = (Numbers::new(), Numbers::new(), Numbers::new());
        self.drive(state);
    }

    /// Returns the state of the registers. Call this function while all vCPUs are stopped, and after [`take_gone`](Self::take_gone).
    ///
    /// # Errors
    /// This function never fails today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &lock(&self.inner).state)
    }

    /// Restores `saved` into registers that were just created for the same processors, and sets the interrupt line.
    ///
    /// # Errors
    /// The saved state is invalid, or does not match this VM. In this case nothing has changed.
    pub fn restore(&self, saved: &DeviceState) -> Result<(), StateError> {
        let new: State = saved.payload(STATE.0, STATE.1)?;
        let mut inner = lock(&self.inner);
        let State { wanted, present, .. } = &inner.state;
        if (new.wanted, &new.present) != (*wanted, present) {
            return Err(StateError::rule(
                "present",
                "the saved processors differ from the processors of this VM: restore with the configuration that was saved",
            ));
        }
        let others: Numbers = present.range(wanted..).copied().collect();
        for (field, numbers, all) in
            [("came", &new.came, present), ("leaving", &new.leaving, &others), ("to_go", &new.to_go, &new.leaving)]
        {
            if let Some(number) = numbers.difference(all).next() {
                return Err(StateError::rule(
                    field,
                    format!(
                        "the saved list contains processor {number}, which contradicts the other saved fields: restore from an unmodified snapshot"
                    ),
                ));
            }
        }
        inner.state = new;
        self.drive(&inner.state);
        Ok(())
    }

    fn drive(&self, state: &State) {
        if let Err(error) = self.line.set(!state.came.is_empty() || !state.to_go.is_empty()) {
            // Log this at debug level, because a guest could flood the log with warnings.
            debug!("processor hotplug: cannot set the interrupt line: {error}");
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
        // Each byte holds the bits of 8 processors, so the register at byte n of a group starts with processor 8 n.
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

    /// Handles a write that releases a processor or refuses its release. Ignores the write if the removal of this processor was not
    /// requested, or if the guest has not read the request yet.
    fn write(&self, offset: u64, data: &[u8]) {
        let Ok(data) = <[u8; 4]>::try_from(data) else { return };
        let number = u32::from_le_bytes(data);
        let mut inner = lock(&self.inner);
        let Inner { state, gone } = &mut *inner;
        let requested = state.leaving.contains(&number) && !state.to_go.contains(&number);
        match offset {
            EJECT if requested => {
                state.leaving.remove(&number);
                state.present.remove(&number);
                state.came.remove(&number);
                gone.insert(number);
                self.drive(state);
                drop(inner);
                (self.left)();
            }
            REFUSE if requested => {
                state.leaving.remove(&number);
                info!("vCPU {number}: the guest refuses to release this vCPU");
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
        assert!(rig.is_up(), "more were added");
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
    fn only_a_processor_that_the_guest_releases_leaves() {
        let rig = rig(4);
        rig.registers.want(2).unwrap();
        rig.write(EJECT, 3);
        assert_eq!(rig.present(), [0, 1, 2, 3], "the guest has not read the request yet");
        assert_eq!((rig.is_up(), rig.read(TO_GO), rig.is_up()), (true, 0b1100, false));
        for number in [0, 1, 4, 32, 255, 256, u32::MAX] {
            rig.write(EJECT, number);
        }
        assert_eq!((rig.present(), rig.left.load(Ordering::Relaxed)), (vec![0, 1, 2, 3], 0));
        rig.write(EJECT, 3);
        rig.write(EJECT, 3);
        assert_eq!((rig.present(), rig.left.load(Ordering::Relaxed)), (vec![0, 1, 2], 1));
        assert_eq!((rig.registers.take_gone(), rig.registers.take_gone()), (Numbers::from([3]), Numbers::new()));
        // Processor 3 is added again. Without a new removal request, the guest cannot release this processor.
        rig.write(EJECT, 2);
        rig.registers.take_gone();
        rig.registers.want(4).unwrap();
        rig.read(CAME);
        rig.write(EJECT, 3);
        assert_eq!(rig.present(), [0, 1, 2, 3]);
    }

    #[test]
    fn removal_request_is_repeated_until_the_guest_refuses() {
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
        assert_eq!(rig.present(), [0, 1, 2], "the guest has refused");
        rig.registers.want(2).unwrap();
        // The guest has not read the new request yet, so a late refusal of the earlier request has no effect.
        rig.write(REFUSE, 2);
        assert_eq!(rig.read(TO_GO), 0b100);
        rig.write(EJECT, 2);
        assert_eq!(rig.present(), [0, 1]);
    }

    #[test]
    fn processor_that_may_leave_cannot_be_added_back() {
        let rig = rig(4);
        rig.registers.want(2).unwrap();
        assert_eq!(rig.registers.in_the_way(4), None);
        // The guest has not read the request, so the VMM can withdraw the request.
        rig.registers.want(4).unwrap();
        assert_eq!((rig.is_up(), rig.read(TO_GO), rig.present()), (false, 0, vec![0, 1, 2, 3]));
        rig.registers.want(2).unwrap();
        rig.read(TO_GO);
        assert_eq!((rig.registers.want(3), rig.registers.want(4), rig.registers.want(1)), (Err(2), Err(2), Ok(())));
        rig.read(TO_GO);
        rig.write(EJECT, 2);
        assert_eq!(rig.registers.want(3), Err(1));
        rig.write(REFUSE, 1);
        assert_eq!(rig.registers.want(3), Err(2), "the thread of vCPU 2 still runs");
        rig.registers.take_gone();
        rig.registers.want(3).unwrap();
        assert_eq!((rig.present(), rig.read(CAME)), (vec![0, 1, 2, 3], 0b100));
    }

    #[test]
    fn reset_completes_requested_removals() {
        let rig = rig(2);
        rig.registers.want(5).unwrap();
        rig.registers.want(3).unwrap();
        rig.registers.reset();
        assert!(!rig.is_up());
        assert_eq!((rig.present(), rig.registers.take_gone()), (vec![0, 1, 2], Numbers::from([3, 4])));
        assert_eq!((rig.read(CAME), rig.read(TO_GO)), (0, 0));
    }

    #[test]
    fn restored_registers_continue_from_the_saved_state() {
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
        assert_eq!(
            refused,
            "present: the saved processors differ from the processors of this VM: restore with the configuration that was saved"
        );
        let good = json!({"wanted": 4, "present": [0, 1, 2, 3], "came": [], "to_go": [], "leaving": []});
        for (field, value, wanted) in [
            (
                "came",
                json!([4]),
                "came: the saved list contains processor 4, which contradicts the other saved fields: restore from an unmodified snapshot",
            ),
            ("leaving", json!([3]), "leaving: the saved list contains processor 3"),
            ("to_go", json!([u32::MAX]), "to_go: the saved list contains processor 4294967295"),
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
        /// Checks that no sequence of guest reads and writes removes a wanted processor. After a reset, only the wanted processors may be
        /// present.
        #[test]
        fn guest_decides_only_when_a_processor_leaves(
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
