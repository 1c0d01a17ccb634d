// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a device serves its driver, as one number that changes without a lock.
//!
//! A device fails on its own threads, which a reset waits for, while it holds the lock on the registers. So whoever fails must
//! not wait for that lock: it changes this number, and the registers are read with it. A failure counts for the driver that it
//! was found with: one that comes late leaves the next driver alone.

use std::sync::atomic::{AtomicU64, Ordering};

/// The device was activated.
const LIVE: u64 = 1 << 0;
/// It cannot go on until it is reset.
const FAILED: u64 = 1 << 1;
/// The number of the driver stands above these bits.
const NUMBER_SHIFT: u32 = 2;

/// A number that can be changed if it is what was read. Tests put a model's in place.
pub(super) trait Word {
    /// Reads it.
    fn load(&self) -> u64;
    /// Writes `new` if it is `current`; otherwise returns what it is.
    fn exchange(&self, current: u64, new: u64) -> Result<u64, u64>;
}

impl Word for AtomicU64 {
    fn load(&self) -> u64 {
        Self::load(self, Ordering::Acquire)
    }

    fn exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }
}

/// Names a driver: each reset begins with the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DriverNumber(u64);

/// Which driver there is, whether the device was activated for it, and whether it failed since.
#[derive(Default)]
pub(super) struct Life<W = AtomicU64>(W);

impl<W: Word> Life<W> {
    /// The driver of now.
    pub(super) fn driver(&self) -> DriverNumber {
        DriverNumber(self.0.load() >> NUMBER_SHIFT)
    }

    /// The driver that the device serves, if it does.
    pub(super) fn served(&self) -> Option<DriverNumber> {
        let now = self.0.load();
        (now & (LIVE | FAILED) == LIVE).then_some(DriverNumber(now >> NUMBER_SHIFT))
    }

    /// Whether the device cannot go on until it is reset.
    pub(super) fn has_failed(&self) -> bool {
        self.0.load() & FAILED != 0
    }

    /// The device serves its driver from now on, unless it has failed meanwhile.
    pub(super) fn start(&self) {
        self.change(|now| Some(now | LIVE));
    }

    /// The device cannot go on with this driver; `false` if it is gone, or the device had failed already.
    pub(super) fn fail(&self, driver: DriverNumber) -> bool {
        self.change(|now| (now >> NUMBER_SHIFT == driver.0 && now & FAILED == 0).then_some(now | FAILED))
    }

    /// The driver is gone. What is found with it from now on counts for nothing.
    pub(super) fn stop(&self) {
        self.change(|now| Some(((now >> NUMBER_SHIFT) + 1) << NUMBER_SHIFT));
    }

    fn change(&self, to: impl Fn(u64) -> Option<u64>) -> bool {
        let mut now = self.0.load();
        while let Some(new) = to(now) {
            match self.0.exchange(now, new) {
                Ok(_) => return true,
                Err(other) => now = other,
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use loom::sync::atomic::{AtomicBool as LoomBool, AtomicU64 as LoomWord};
    use loom::sync::{Arc, Condvar, Mutex};
    use loom::thread;

    use super::*;

    impl Word for LoomWord {
        fn load(&self) -> u64 {
            Self::load(self, Ordering::Acquire)
        }
        fn exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
            self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
        }
    }

    #[test]
    fn device_serves_from_its_start_to_its_failure() {
        let life: Life = Life::default();
        assert_eq!((life.served(), life.has_failed()), (None, false));
        life.start();
        let driver = life.served().unwrap();
        assert!(life.fail(driver));
        assert_eq!((life.served(), life.has_failed()), (None, true));
        assert!(!life.fail(driver), "it is told once");
        life.stop();
        assert!(!life.has_failed());
    }

    #[test]
    fn failure_that_comes_late_leaves_the_next_driver_alone() {
        let life: Life = Life::default();
        life.start();
        let driver = life.driver();
        life.stop();
        life.start();
        assert!(!life.fail(driver));
        assert!(life.served().is_some() && !life.has_failed());
    }

    #[test]
    fn device_that_fails_before_its_start_serves_nobody() {
        let life: Life = Life::default();
        assert!(life.fail(life.driver()));
        life.start();
        assert_eq!((life.served(), life.has_failed()), (None, true));
    }

    /// What a worker is told, as in `crate::worker`.
    struct Orders {
        /// To stop, to pause, and whether the thread is parked or has ended.
        state: Mutex<(bool, bool, bool)>,
        changed: Condvar,
    }

    /// A worker that fails, a vCPU that resets the device, which stops the worker and waits for its end, and the control
    /// thread that pauses it. A thread that waits for ever is a failure of the model.
    #[test]
    #[cfg_attr(careful, ignore = "with AddressSanitizer loom takes more than ten minutes for all orders of events")]
    fn reset_failure_and_pause_do_not_wait_for_each_other() {
        loom::model(|| {
            let life = Arc::new(Life(LoomWord::new(LIVE)));
            let registers = Arc::new(Mutex::new(()));
            let told = Arc::new(LoomBool::new(false));
            let orders = Arc::new(Orders { state: Mutex::new((false, false, false)), changed: Condvar::new() });
            let driver = life.driver();
            let worker = thread::spawn({
                let (life, orders, told) = (life.clone(), orders.clone(), told.clone());
                move || {
                    if life.fail(driver) {
                        told.store(true, Ordering::Release);
                    }
                    let mut state = orders.state.lock().unwrap();
                    state.2 = true;
                    orders.changed.notify_all();
                    while !state.0 {
                        state = orders.changed.wait(state).unwrap();
                    }
                }
            });
            let control = thread::spawn({
                let orders = orders.clone();
                move || {
                    let mut state = orders.state.lock().unwrap();
                    state.1 = true;
                    orders.changed.notify_all();
                    while !state.2 {
                        state = orders.changed.wait(state).unwrap();
                    }
                }
            });
            {
                let _registers = registers.lock().unwrap();
                life.stop();
                orders.state.lock().unwrap().0 = true;
                orders.changed.notify_all();
                worker.join().unwrap();
            }
            control.join().unwrap();
            // Whenever it failed, the next driver finds a device that has not.
            assert!(!life.has_failed());
            life.start();
            assert!(life.served().is_some());
        });
    }
}
