// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A 16550 serial port, the UART of `vm-superio` on the port bus.

use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial};
use vmm_sys_util::eventfd::EventFd;

use crate::platform::BusDevice;

/// Bytes of the register file.
pub const REGISTERS_LEN: u64 = 8;

/// The event that raises the port's interrupt line.
struct InterruptEvent(EventFd);

impl Trigger for InterruptEvent {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

type Uart = Serial<InterruptEvent, NoEvents, Box<dyn Write + Send>>;

/// A serial port.
pub struct SerialPort {
    uart: Mutex<Uart>,
}

impl SerialPort {
    /// A port that raises `interrupt` and sends what the guest writes to `output`.
    pub fn new(interrupt: EventFd, output: Box<dyn Write + Send>) -> Self {
        Self { uart: Mutex::new(Serial::new(InterruptEvent(interrupt), output)) }
    }

    /// Gives the guest bytes to read; returns how many there was room for.
    pub fn receive(&self, bytes: &[u8]) -> usize {
        let mut uart = self.lock();
        let room = uart.fifo_capacity().min(bytes.len());
        if room == 0 {
            return 0;
        }
        uart.enqueue_raw_bytes(&bytes[..room]).unwrap_or_else(|error| {
            log::warn!("serial port: input lost: {error:?}");
            room
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Uart> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // All registers are a byte wide; of a wider access only the first byte means something.
        if let (Ok(register), Some(byte)) = (u8::try_from(offset), data.first_mut()) {
            *byte = self.lock().read(register);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (Ok(register), Some(byte)) = (u8::try_from(offset), data.first())
            && let Err(error) = self.lock().write(register, *byte)
        {
            log::debug!("serial port: {error:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(data);
            Ok(data.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bytes_go_both_ways() {
        let output = Output::default();
        let port = SerialPort::new(EventFd::new(EFD_NONBLOCK).unwrap(), Box::new(output.clone()));
        port.write(0, b"A");
        assert_eq!(*output.0.lock().unwrap(), b"A");
        assert_eq!(port.receive(b"xy"), 2);
        let mut byte = [0];
        port.read(0, &mut byte);
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn input_beyond_the_fifo_is_not_taken() {
        let port = SerialPort::new(EventFd::new(EFD_NONBLOCK).unwrap(), Box::new(io::sink()));
        let taken = port.receive(&[b'z'; 4096]);
        assert!(taken > 0 && taken < 4096);
        assert_eq!(port.receive(b"more"), 0);
    }
}
