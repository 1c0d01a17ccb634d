// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! 16550 serial port at I/O ports, with the UART of `vm-superio`.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, Serial, SerialState};
use vm_superio::{Trigger, serial};
use vmm_sys_util::eventfd::EventFd;

use crate::platform::BusDevice;
use crate::state::{DeviceState, StateError};

/// Size of the register file in bytes.
pub const REGISTERS_LEN: u64 = 8;

/// Kind and version of the saved state.
const STATE: (&str, u32) = ("serial", 1);

/// Registers and the receiver's FIFO in the saved state, from `vm-superio`'s [`SerialState`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "SerialState", deny_unknown_fields)]
struct SerialFields {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    #[serde(rename = "received")]
    in_buffer: Vec<u8>,
}

/// Saved state of a port.
#[derive(Serialize, Deserialize)]
#[serde(transparent)]
struct SerialPortState(#[serde(with = "SerialFields")] SerialState);

/// Event that raises the port's interrupt line. A UART that replaces another UART after a reset or restore uses the same event.
#[derive(Clone)]
struct InterruptEvent(Arc<EventFd>);

impl Trigger for InterruptEvent {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

type Uart = Serial<InterruptEvent, NoEvents, Box<dyn Write + Send>>;

/// Serial port.
pub struct SerialPort {
    uart: Mutex<Uart>,
}

impl SerialPort {
    /// Creates a port that raises `interrupt`, and sends the guest's output to `output`.
    pub fn new(interrupt: EventFd, output: Box<dyn Write + Send>) -> Self {
        Self { uart: Mutex::new(Serial::new(InterruptEvent(Arc::new(interrupt)), output)) }
    }

    /// Adds bytes to the receiver's FIFO, which the guest reads. Returns the number of bytes that fit.
    pub fn receive(&self, bytes: &[u8]) -> usize {
        let mut uart = self.lock();
        let room = uart.fifo_capacity().min(bytes.len());
        if room == 0 {
            return 0;
        }
        uart.enqueue_raw_bytes(&bytes[..room]).unwrap_or_else(|error| {
            log::warn!("serial port: the guest may not notice new input: {error}");
            room
        })
    }

    /// Returns the state of the port. The state contains no output, because all output of the guest was written already. Call this function
    /// while all vCPUs are stopped.
    ///
    /// # Errors
    /// This function never fails today.
    pub fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &SerialPortState(self.lock().state()))
    }

    /// Restores `state`, and raises the interrupt line if an interrupt is pending. Restore the interrupt controllers first. Input that this
    /// port received before the call is lost.
    ///
    /// # Errors
    /// The saved state is invalid, or the host cannot raise the interrupt. In this case nothing has changed.
    pub fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let SerialPortState(state) = state.payload(STATE.0, STATE.1)?;
        let host = |source| StateError::Host { what: "cannot raise the serial port's interrupt".into(), source };
        let mut uart = self.lock();
        let event = uart.interrupt_evt().clone();
        let restored: Result<Uart, _> = Serial::from_state(&state, event, NoEvents, Box::new(io::sink()));
        let restored = restored.map_err(|error| match error {
            serial::Error::FullFifo => StateError::rule(
                "received",
                "the saved input has more bytes than the port's FIFO: restore from an unmodified snapshot",
            ),
            serial::Error::Trigger(source) | serial::Error::IOError(source) => host(source),
        })?;
        replace(&mut uart, restored);
        Ok(())
    }

    /// Resets the port to its state at power-on. Input that the guest has not read is lost, because the input was not meant for the next
    /// boot. Call this function while all vCPUs are stopped.
    pub fn reset(&self) {
        let mut uart = self.lock();
        let new = Serial::new(uart.interrupt_evt().clone(), Box::new(io::sink()) as Box<dyn Write + Send>);
        replace(&mut uart, new);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Uart> {
        self.uart.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Replaces a UART by another UART, and keeps the old output.
fn replace(uart: &mut Uart, by: Uart) {
    let output = std::mem::replace(uart, by).into_writer();
    *uart.writer_mut() = output;
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // All registers are one byte wide. Only the first byte of a wider access counts.
        if let (Ok(register), Some(byte)) = (u8::try_from(offset), data.first_mut()) {
            *byte = self.lock().read(register);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (Ok(register), Some(byte)) = (u8::try_from(offset), data.first())
            && let Err(error) = self.lock().write(register, *byte)
        {
            log::debug!("serial port: a register write failed: {error:?}");
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn restored_port_keeps_received_bytes_and_its_own_output() {
        let old = SerialPort::new(EventFd::new(EFD_NONBLOCK).unwrap(), Box::new(io::sink()));
        old.write(7, &[0x5a]);
        old.write(1, &[1]);
        old.receive(b"xy");
        let state = old.save().unwrap();
        let (output, event) = (Output::default(), EventFd::new(EFD_NONBLOCK).unwrap());
        let new = SerialPort::new(event.try_clone().unwrap(), Box::new(output.clone()));
        new.restore(&state).unwrap();
        assert_eq!(new.save().unwrap(), state);
        assert_eq!(event.read().unwrap(), 1, "received bytes wait for the guest");
        let mut byte = [0];
        new.read(0, &mut byte);
        assert_eq!(&byte, b"x");
        new.write(0, b"A");
        assert_eq!(*output.0.lock().unwrap(), b"A");
    }

    #[test]
    fn reset_port_equals_new_one_but_keeps_output_and_interrupt() {
        let (output, event) = (Output::default(), EventFd::new(EFD_NONBLOCK).unwrap());
        let new = |output: &Output| SerialPort::new(event.try_clone().unwrap(), Box::new(output.clone()));
        let port = new(&output);
        assert_eq!(port.receive(&[b'z'; 64]), 64);
        assert_eq!(port.receive(b"x"), 0);
        for (register, value) in [(7, 0x5a), (1, 1), (4, 0x10), (3, 0x80), (0, 1)] {
            port.write(register, &[value]);
        }
        event.read().unwrap();
        port.reset();
        let mut status = [0];
        port.read(5, &mut status);
        assert_eq!(status[0] & 1, 0, "no byte waits");
        assert_eq!(port.save().unwrap(), new(&Output::default()).save().unwrap());
        assert!(event.read().is_err(), "no interrupt");

        port.write(0, b"A");
        assert_eq!(*output.0.lock().unwrap(), b"A");
        // After the reset, a console can send bytes to the new guest. The new guest gets an interrupt only after it has enabled the
        // interrupt.
        assert_eq!(port.receive(b"x"), 1);
        assert!(event.read().is_err());
        port.write(1, &[1]);
        assert_eq!(event.read().unwrap(), 1);
    }

    #[test]
    fn state_exceeding_fifo_is_refused_and_port_keeps_working() {
        let output = Output::default();
        let port = SerialPort::new(EventFd::new(EFD_NONBLOCK).unwrap(), Box::new(output.clone()));
        let mut state = port.save().unwrap();
        state.payload["received"] = vec![0; 65].into();
        assert_eq!(
            port.restore(&state).unwrap_err().to_string(),
            "received: the saved input has more bytes than the port's FIFO: restore from an unmodified snapshot"
        );
        state.payload["received"] = vec![300].into();
        assert!(port.restore(&state).is_err());
        port.write(0, b"B");
        assert_eq!(*output.0.lock().unwrap(), b"B");
    }

    #[test]
    fn input_beyond_the_fifo_is_not_accepted() {
        let port = SerialPort::new(EventFd::new(EFD_NONBLOCK).unwrap(), Box::new(io::sink()));
        let taken = port.receive(&[b'z'; 4096]);
        assert!(taken > 0 && taken < 4096);
        assert_eq!(port.receive(b"more"), 0);
    }
}
