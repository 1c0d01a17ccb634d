// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Register that notifies the guest of a new VM Generation ID.
//!
//! The register is one byte. Its value is 1 if the ID has changed since the last read, and otherwise 0. A read clears the byte. The
//! interrupt line is active while the byte is 1, so a guest that has masked the interrupt does not miss the event.

use std::sync::Mutex;

use log::debug;

use crate::platform::{BusDevice, InterruptLine};
use crate::sync::lock;

/// Size of the register in bytes.
pub const REGISTER_LEN: u64 = 1;

/// Register that notifies the guest of a new VM Generation ID.
pub struct GenerationNotice {
    is_new: Mutex<bool>,
    line: Box<dyn InterruptLine>,
}

impl GenerationNotice {
    /// Creates a register that reads 0.
    pub fn new(line: Box<dyn InterruptLine>) -> Self {
        Self { is_new: Mutex::new(false), line }
    }

    /// Notifies the guest that the ID is new.
    pub fn notify(&self) {
        self.set(true);
    }

    /// Resets the register to 0, its value at power-on.
    pub fn reset(&self) {
        self.set(false);
    }

    /// Sets the register and returns its old value.
    fn set(&self, is_new: bool) -> bool {
        let mut value = lock(&self.is_new);
        let before = std::mem::replace(&mut *value, is_new);
        if before != is_new
            && let Err(error) = self.line.set(is_new)
        {
            // Log this at debug level, because a guest could flood the log with warnings.
            debug!("VM Generation ID: cannot set the interrupt line: {error}");
        }
        before
    }
}

impl BusDevice for GenerationNotice {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let ([byte], 0) = (data, offset) {
            *byte = self.set(false).into();
        }
    }

    fn write(&self, _offset: u64, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use super::*;

    #[derive(Clone, Default)]
    struct Line(Arc<Mutex<Vec<bool>>>);

    impl InterruptLine for Line {
        fn set(&self, active: bool) -> io::Result<()> {
            lock(&self.0).push(active);
            Ok(())
        }
    }

    fn read(register: &GenerationNotice) -> u8 {
        let mut data = [0xff];
        register.read(0, &mut data);
        data[0]
    }

    #[test]
    fn notice_is_read_once_and_lowers_the_line() {
        let line = Line::default();
        let register = GenerationNotice::new(Box::new(line.clone()));
        assert_eq!(read(&register), 0);
        register.notify();
        // The guest sees only one notice, because it did not read the register after the first notice.
        register.notify();
        register.write(0, &[0]);
        let mut wide = [0xff; 2];
        register.read(0, &mut wide);
        register.read(1, &mut wide[..1]);
        assert_eq!((wide, &*lock(&line.0)), ([0, 0], &vec![true]));
        assert_eq!((read(&register), read(&register)), (1, 0));
        assert_eq!(*lock(&line.0), [true, false]);
    }

    #[test]
    fn reset_drops_a_notice() {
        let line = Line::default();
        let register = GenerationNotice::new(Box::new(line.clone()));
        register.reset();
        register.notify();
        register.reset();
        assert_eq!((read(&register), &*lock(&line.0)), (0, &vec![true, false]));
    }
}
