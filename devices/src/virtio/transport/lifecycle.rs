// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Activation and failure of a device, in one atomic number.
//!
//! A device reports failures on its own threads. A reset waits for these threads while it holds the lock on the registers. So a thread that
//! reports a failure must not wait for this lock. Instead, the thread changes the number without a lock, and each read of the registers
//! checks the number. A failure counts only for the driver that the device served when the failure occurred. So a late report of a failure
//! does not affect the next driver.

use std::sync::atomic::{AtomicU64, Ordering};

/// The device was activated.
const LIVE: u64 = 1 << 0;
/// The device failed and needs a reset.
const FAILED: u64 = 1 << 1;
/// Bit position of the driver's number, above the two flags.
const NUMBER_SHIFT: u32 = 2;

/// Number that threads can change with an atomic compare-and-exchange. Tests use loom's type in place of `AtomicU64`.
pub(super) trait Word {
    /// Reads the number.
    fn load(&self) -> u64;
    /// Writes `new` if the number is `current`. Otherwise returns the current number as the error.
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

/// Number of a driver. Each reset increments the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DriverNumber(u64);

/// Number of the current driver, with two flags: the device was activated for this driver, and the device has failed with this driver.
#[derive(Default)]
pub(super) struct Lifecycle<W = AtomicU64>(W);

impl<W: Word> Lifecycle<W> {
    /// Returns the current driver.
    pub(super) fn driver(&self) -> DriverNumber {
        DriverNumber(self.0.load() >> NUMBER_SHIFT)
    }

    /// Returns the driver that the device serves, or `None` if it serves no driver.
    pub(super) fn served(&self) -> Option<DriverNumber> {
        let now = self.0.load();
        (now & (LIVE | FAILED) == LIVE).then_some(DriverNumber(now >> NUMBER_SHIFT))
    }

    /// True if the device has failed and needs a reset.
    pub(super) fn has_failed(&self) -> bool {
        self.0.load() & FAILED != 0
    }

    /// Marks the device as activated. The device serves its driver from now on, unless it has already failed.
    pub(super) fn start(&self) {
        self.change(|now| Some(now | LIVE));
    }

    /// Marks the device as failed for `driver`. Returns false if a reset has ended this driver, or if the device had failed already.
    pub(super) fn fail(&self, driver: DriverNumber) -> bool {
        self.change(|now| (now >> NUMBER_SHIFT == driver.0 && now & FAILED == 0).then_some(now | FAILED))
    }

    /// Ends the service for the current driver. Failures that are reported later for this driver have no effect.
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
        let lifecycle: Lifecycle = Lifecycle::default();
        assert_eq!((lifecycle.served(), lifecycle.has_failed()), (None, false));
        lifecycle.start();
        let driver = lifecycle.served().unwrap();
        assert!(lifecycle.fail(driver));
        assert_eq!((lifecycle.served(), lifecycle.has_failed()), (None, true));
        assert!(!lifecycle.fail(driver), "a failure is reported once");
        lifecycle.stop();
        assert!(!lifecycle.has_failed());
    }

    #[test]
    fn late_failure_does_not_affect_the_next_driver() {
        let lifecycle: Lifecycle = Lifecycle::default();
        lifecycle.start();
        let driver = lifecycle.driver();
        lifecycle.stop();
        lifecycle.start();
        assert!(!lifecycle.fail(driver));
        assert!(lifecycle.served().is_some() && !lifecycle.has_failed());
    }

    #[test]
    fn device_that_fails_before_its_start_serves_no_driver() {
        let lifecycle: Lifecycle = Lifecycle::default();
        assert!(lifecycle.fail(lifecycle.driver()));
        lifecycle.start();
        assert_eq!((lifecycle.served(), lifecycle.has_failed()), (None, true));
    }

    /// Orders for a worker, as in `crate::worker`.
    struct Orders {
        /// Three flags: order to stop, order to pause, and "the thread is parked or has ended".
        state: Mutex<(bool, bool, bool)>,
        changed: Condvar,
    }

    /// Runs three threads. A worker fails. A vCPU thread resets the device: it stops the worker and waits until the worker has ended. The
    /// control thread pauses the worker. loom reports a thread that waits for ever as a failure.
    #[test]
    #[cfg_attr(careful, ignore = "with AddressSanitizer loom takes more than ten minutes for all orders of events")]
    fn reset_failure_and_pause_do_not_wait_for_each_other() {
        loom::model(|| {
            let lifecycle = Arc::new(Lifecycle(LoomWord::new(LIVE)));
            let registers = Arc::new(Mutex::new(()));
            let ready = Arc::new(LoomBool::new(false));
            let orders = Arc::new(Orders { state: Mutex::new((false, false, false)), changed: Condvar::new() });
            let driver = lifecycle.driver();
            let worker = thread::spawn({
                let (lifecycle, orders, ready) = (lifecycle.clone(), orders.clone(), ready.clone());
                move || {
                    if lifecycle.fail(driver) {
                        ready.store(true, Ordering::Release);
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
                lifecycle.stop();
                orders.state.lock().unwrap().0 = true;
                orders.changed.notify_all();
                worker.join().unwrap();
            }
            control.join().unwrap();
            // Regardless of when the worker reported the failure, the device has not failed for the next driver.
            assert!(!lifecycle.has_failed());
            lifecycle.start();
            assert!(lifecycle.served().is_some());
        });
    }
}
