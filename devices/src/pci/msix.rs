// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Emulated MSI-X table and pending-bit array (PCI Express Base, section 7.7.2).

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::event_fd::{forget, has_fired};
use crate::first_error::first_error;
use crate::platform::{MsiMessage, MsiVectors};
use crate::state::StateError;

/// Size of a table entry in bytes: message address (8), data (4), vector control (4).
pub const ENTRY_SIZE: u64 = 16;
/// Bit of the message control register that masks all vectors.
pub const CONTROL_FUNCTION_MASK: u16 = 1 << 14;
/// Bit of the message control register that turns MSI-X on.
pub const CONTROL_ENABLE: u16 = 1 << 15;
/// Bit of vector control that masks the vector. All other bits are reserved and read as zero.
const VECTOR_MASK: u32 = 1;

/// Reason why an MSI-X table cannot be changed.
#[derive(Debug, Error)]
pub enum MsixError {
    /// The interrupt controller rejected the route.
    #[error("cannot route MSI-X vector {vector}: {source}")]
    Route {
        /// The vector.
        vector: u16,
        /// Error of the platform.
        source: io::Error,
    },
}

/// State of an MSI-X table, with its pending interrupts. A restored table creates its routes from this state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsixState {
    /// The message control register's bits "enable" and "function mask".
    pub control: u16,
    /// All vectors in order.
    pub vectors: Vec<MsixVectorState>,
}

/// A vector of an MSI-X table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MsixVectorState {
    /// Message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
    /// Vector control.
    pub control: u32,
    /// True if an interrupt waits for the vector to be unmasked.
    pub pending: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    address: u64,
    data: u32,
    control: u32,
    routed: Option<MsiMessage>,
}

/// MSI-X table of one function, and the routes of its vectors.
pub struct MsixTable {
    entries: Vec<Entry>,
    vectors: Arc<dyn MsiVectors>,
    control: u16,
    /// True if the function may be a bus master. Otherwise the function cannot send messages, because a message is a write to memory.
    on_bus: bool,
    /// One bit for each vector. A bit is set if [`trigger`](Self::trigger) was called while the vector was masked. An interrupt that
    /// hardware raised waits in the vector's event instead.
    pending: Vec<u64>,
}

impl MsixTable {
    /// Creates a table with one entry for each of `vectors`. All vectors are masked, and MSI-X is off.
    pub fn new(vectors: Arc<dyn MsiVectors>) -> Self {
        let count = usize::from(vectors.count());
        let entry = Entry { address: 0, data: 0, control: VECTOR_MASK, routed: None };
        Self { entries: vec![entry; count], vectors, control: 0, on_bus: true, pending: vec![0; count.div_ceil(64)] }
    }

    /// Returns the number of vectors of the table.
    pub fn count(&self) -> u16 {
        self.vectors.count()
    }

    /// Returns the vectors of the table.
    pub fn vectors(&self) -> &Arc<dyn MsiVectors> {
        &self.vectors
    }

    /// True if MSI-X is on.
    pub fn is_enabled(&self) -> bool {
        self.control & CONTROL_ENABLE != 0
    }

    /// Returns one more than the number of the last vector whose own mask bit is clear, or 0 if no mask bit is clear.
    pub fn used(&self) -> u16 {
        let last = self.entries.iter().rposition(|entry| entry.control & VECTOR_MASK == 0);
        last.and_then(|last| u16::try_from(last + 1).ok()).unwrap_or(0)
    }

    /// Handles the guest's write to the message control register. Only the enable and function mask bits count.
    ///
    /// # Errors
    /// The error names the first vector that the interrupt controller rejects. All other vectors get their routes. The next change of the
    /// table tries the rejected vectors again. All methods that change routes return such errors.
    pub fn set_control(&mut self, control: u16) -> Result<(), MsixError> {
        self.control = control & (CONTROL_ENABLE | CONTROL_FUNCTION_MASK);
        self.apply_all()
    }

    /// Turns bus mastering of the function on or off. While bus mastering is off, the function's messages stay pending. In a new table, bus
    /// mastering is on. A reset does not change this setting.
    pub fn set_on_bus(&mut self, on_bus: bool) -> Result<(), MsixError> {
        self.on_bus = on_bus;
        self.apply_all()
    }

    /// Reads the table at `offset` bytes. `data` beyond the table stays unchanged.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..u64::MAX).zip(data) {
            let index = usize::try_from(at / ENTRY_SIZE).unwrap_or(usize::MAX);
            if let (Some(entry), Ok(place)) = (self.entries.get(index), usize::try_from(at % ENTRY_SIZE)) {
                *byte = entry.to_bytes()[place];
            }
        }
    }

    /// Writes the table at `offset` bytes, and updates the routes of the affected vectors. Writes beyond the table are
    /// ignored.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) -> Result<(), MsixError> {
        let Some(end) = offset.checked_add(data.len() as u64) else { return Ok(()) };
        let first = usize::try_from(offset / ENTRY_SIZE).unwrap_or(usize::MAX);
        let last = usize::try_from(end.div_ceil(ENTRY_SIZE)).unwrap_or(usize::MAX).min(self.entries.len());
        let mut outcome = Ok(());
        for index in first..last {
            let base = index as u64 * ENTRY_SIZE;
            let mut bytes = self.entries[index].to_bytes();
            for (at, value) in (offset..end).zip(data) {
                if let Some(byte) =
                    at.checked_sub(base).and_then(|p| usize::try_from(p).ok()).and_then(|p| bytes.get_mut(p))
                {
                    *byte = *value;
                }
            }
            self.entries[index].set(&bytes);
            outcome = outcome.and(self.apply(index));
        }
        outcome
    }

    /// Reads the pending-bit array at `offset` bytes. `data` beyond the array stays unchanged.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..u64::MAX).zip(data) {
            let word = usize::try_from(at / 8).ok().and_then(|index| self.pending.get(index));
            if let (Some(word), Ok(place), Ok(first)) = (word, usize::try_from(at % 8), usize::try_from(at)) {
                *byte = word.to_le_bytes()[place] | self.waiting(first.saturating_mul(8));
            }
        }
    }

    /// Returns one bit for each of the eight vectors from `first` on. A bit is set if an interrupt waits in the vector's event because the
    /// vector is masked.
    fn waiting(&self, first: usize) -> u8 {
        let masked = |bit: &u8| {
            let entry = self.entries.get(first + usize::from(*bit));
            self.is_enabled() && entry.is_some_and(|entry| entry.routed.is_none())
        };
        let events = (0..8u8).filter(masked).filter_map(|bit| {
            let vector = u16::try_from(first + usize::from(bit)).ok()?;
            Some((bit, self.vectors.event(vector)?))
        });
        events.filter(|(_, event)| has_fired(event)).fold(0, |bits, (bit, _)| bits | 1 << bit)
    }

    /// Raises `vector` on behalf of the VMM. If the vector is masked, raises the vector after the guest unmasks it. Does nothing if the
    /// vector does not exist, or if MSI-X is off.
    pub fn trigger(&mut self, vector: u16) -> io::Result<()> {
        let index = usize::from(vector);
        let Some(entry) = self.entries.get(index) else { return Ok(()) };
        if entry.routed.is_some() {
            self.vectors.trigger(vector)
        } else {
            if self.is_enabled() {
                self.pending[index / 64] |= 1 << (index % 64);
            }
            Ok(())
        }
    }

    /// Returns the state of the table. During the call, no vCPU may run, and no vector may be triggered.
    pub fn state(&self) -> MsixState {
        let vector = |(index, entry): (usize, &Entry)| {
            let waiting = self.waiting(index / 8 * 8) & (1 << (index % 8)) != 0;
            let pending = waiting || self.pending[index / 64] & (1 << (index % 64)) != 0;
            MsixVectorState { address: entry.address, data: entry.data, control: entry.control, pending }
        };
        MsixState { control: self.control, vectors: self.entries.iter().enumerate().map(vector).collect() }
    }

    /// Restores `state`, with its routes, into a table that was just created or reset. Restore the vCPUs' local APICs first,
    /// because pending interrupts that are not masked are raised.
    ///
    /// # Errors
    /// A field of the state is invalid, or the interrupt controller rejected a route. If a field is invalid, nothing has changed.
    pub fn restore(&mut self, state: &MsixState) -> Result<(), StateError> {
        if state.vectors.len() != self.entries.len() {
            return Err(StateError::rule(
                "vectors",
                format!(
                    "the saved state must have {} entries, one for each vector of this function: restore with the configuration that was saved",
                    self.entries.len()
                ),
            ));
        }
        if state.control & !(CONTROL_ENABLE | CONTROL_FUNCTION_MASK) != 0 {
            return Err(StateError::rule(
                "control",
                "the saved value has bits that the guest cannot set: restore from an unmodified snapshot",
            ));
        }
        for (index, vector) in state.vectors.iter().enumerate() {
            let MsixVectorState { address, data, control, pending } = *vector;
            let entry = &mut self.entries[index];
            (entry.address, entry.data, entry.control) = (address, data, control & VECTOR_MASK);
            let bit = 1 << (index % 64);
            let word = &mut self.pending[index / 64];
            *word = if pending { *word | bit } else { *word & !bit };
        }
        self.set_control(state.control).map_err(|MsixError::Route { vector, source }| StateError::Host {
            what: format!("cannot route MSI-X vector {vector}"),
            source,
        })
    }

    /// Resets the table to its state at power-on: off, masked, nothing pending. The reset completes even if the interrupt
    /// controller fails to remove a route.
    pub fn reset(&mut self) -> Result<(), MsixError> {
        self.pending.fill(0);
        for entry in &mut self.entries {
            (entry.address, entry.data, entry.control) = (0, 0, VECTOR_MASK);
        }
        let outcome = self.set_control(0);
        // Drop the interrupts that wait in the vectors' events. KVM does not read these events now, because they are not routed.
        for vector in 0..self.count() {
            if let Some(event) = self.vectors.event(vector) {
                forget(event);
            }
        }
        outcome
    }

    fn apply_all(&mut self) -> Result<(), MsixError> {
        first_error((0..self.entries.len()).map(|index| self.apply(index)))
    }

    /// Updates the route of one vector to match its entry and the control register.
    fn apply(&mut self, index: usize) -> Result<(), MsixError> {
        let entry = self.entries[index];
        let live = self.on_bus
            && self.control & (CONTROL_ENABLE | CONTROL_FUNCTION_MASK) == CONTROL_ENABLE
            && entry.control & VECTOR_MASK == 0;
        let wanted = live.then_some(MsiMessage { address: entry.address, data: entry.data });
        let vector = u16::try_from(index).expect("the table has at most 2048 entries");
        if wanted != entry.routed {
            self.vectors.route(vector, wanted).map_err(|source| MsixError::Route { vector, source })?;
            self.entries[index].routed = wanted;
        }
        let bit = 1 << (index % 64);
        if wanted.is_some() && self.pending[index / 64] & bit != 0 {
            self.pending[index / 64] &= !bit;
            self.vectors.trigger(vector).map_err(|source| MsixError::Route { vector, source })?;
        }
        Ok(())
    }
}

impl Entry {
    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.data.to_le_bytes());
        bytes[12..].copy_from_slice(&self.control.to_le_bytes());
        bytes
    }

    fn set(&mut self, bytes: &[u8; 16]) {
        let mut address = [0; 8];
        address.copy_from_slice(&bytes[..8]);
        self.address = u64::from_le_bytes(address);
        self.data = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        self.control = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]) & VECTOR_MASK;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};
    use std::time::Duration;

    use rustix::fs::{OFlags, fcntl_setfl};
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::event_fd::borrow;

    struct Recorder {
        routes: Mutex<Vec<(u16, Option<MsiMessage>)>>,
        raised: Mutex<Vec<u16>>,
        events: Vec<EventFd>,
        /// Vectors whose next change of route fails.
        refused: Mutex<Vec<u16>>,
    }

    impl Recorder {
        fn refuse(&self, vectors: &[u16]) {
            *self.refused.lock().unwrap() = vectors.to_vec();
        }

        /// Returns the routes that were changed since the last call.
        fn changed(&self) -> Vec<(u16, Option<MsiMessage>)> {
            std::mem::take(&mut self.routes.lock().unwrap())
        }
    }

    impl MsiVectors for Recorder {
        fn count(&self) -> u16 {
            3
        }
        fn event(&self, vector: u16) -> Option<&EventFd> {
            self.events.get(usize::from(vector))
        }
        fn route(&self, vector: u16, message: Option<MsiMessage>) -> io::Result<()> {
            let mut refused = self.refused.lock().unwrap();
            if let Some(place) = refused.iter().position(|refused| *refused == vector) {
                refused.remove(place);
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
            self.routes.lock().unwrap().push((vector, message));
            Ok(())
        }
        fn trigger(&self, vector: u16) -> io::Result<()> {
            self.raised.lock().unwrap().push(vector);
            Ok(())
        }
    }

    fn table() -> (Arc<Recorder>, MsixTable) {
        let events = (0..3).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect();
        let recorder = Arc::new(Recorder {
            routes: Mutex::default(),
            raised: Mutex::default(),
            events,
            refused: Mutex::default(),
        });
        let table = MsixTable::new(recorder.clone());
        (recorder, table)
    }

    fn program(table: &mut MsixTable, vector: u64, mask: u32) {
        let base = vector * ENTRY_SIZE;
        table.write_table(base, &0xfee0_1000u32.to_le_bytes()).unwrap();
        table.write_table(base + 8, &0x41u32.to_le_bytes()).unwrap();
        table.write_table(base + 12, &mask.to_le_bytes()).unwrap();
    }

    #[test]
    fn unmasked_vector_is_routed_once_enabled() {
        let (recorder, mut table) = table();
        program(&mut table, 1, 0);
        assert!(recorder.routes.lock().unwrap().is_empty());
        table.set_control(CONTROL_ENABLE).unwrap();
        let message = MsiMessage { address: 0xfee0_1000, data: 0x41 };
        assert_eq!(*recorder.routes.lock().unwrap(), [(1, Some(message))]);
    }

    #[test]
    fn interrupt_while_masked_is_pending_and_fires_when_unmasked() {
        let (recorder, mut table) = table();
        table.set_control(CONTROL_ENABLE).unwrap();
        program(&mut table, 2, 1);
        table.trigger(2).unwrap();
        let mut bits = [0; 8];
        table.read_pending(0, &mut bits);
        assert_eq!(bits[0], 4);
        program(&mut table, 2, 0);
        assert_eq!(*recorder.raised.lock().unwrap(), [2]);
        table.read_pending(0, &mut bits);
        assert_eq!(bits[0], 0);
    }

    fn pending(table: &MsixTable) -> u8 {
        let mut bits = [0; 8];
        table.read_pending(0, &mut bits);
        assert_eq!(bits[1..], [0; 7], "there are three vectors");
        bits[0]
    }

    #[test]
    fn masked_hardware_interrupt_shows_as_pending_and_stays() {
        let (recorder, mut table) = table();
        table.set_control(CONTROL_ENABLE).unwrap();
        program(&mut table, 0, 0);
        program(&mut table, 1, 1);
        for event in &recorder.events[..2] {
            event.write(1).unwrap();
        }
        assert_eq!(pending(&table), 2, "vector 0 is not masked, so KVM consumes its event");
        assert_eq!(pending(&table), 2);
        table.set_control(CONTROL_ENABLE | CONTROL_FUNCTION_MASK).unwrap();
        assert_eq!(pending(&table), 3);
        table.set_control(CONTROL_ENABLE).unwrap();
        program(&mut table, 1, 0);
        assert_eq!(pending(&table), 0);
        assert_eq!(recorder.events[1].read().unwrap(), 1, "the interrupt still waits for KVM");
    }

    #[test]
    fn restored_table_keeps_routes_and_pending_interrupts() {
        let (recorder, mut old) = table();
        old.set_control(CONTROL_ENABLE).unwrap();
        program(&mut old, 0, 0);
        program(&mut old, 2, 1);
        old.trigger(2).unwrap();
        recorder.events[1].write(1).unwrap();
        let text = serde_json::to_string(&old.state()).unwrap();
        let (recorder, mut new) = table();
        new.restore(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(new.state(), old.state());
        assert_eq!(pending(&new), 0b110);
        let message = MsiMessage { address: 0xfee0_1000, data: 0x41 };
        assert_eq!(*recorder.routes.lock().unwrap(), [(0, Some(message))]);
        assert!(recorder.raised.lock().unwrap().is_empty());
        program(&mut new, 2, 0);
        assert_eq!(*recorder.raised.lock().unwrap(), [2]);
    }

    #[test]
    fn state_of_another_table_is_refused_and_changes_nothing() {
        let (recorder, mut table) = table();
        let good = table.state();
        let mut states = vec![good.clone(), good.clone(), good.clone()];
        states[0].vectors.pop();
        states[1].vectors.push(good.vectors[0]);
        states[2].control = 7;
        for state in states {
            assert!(table.restore(&state).is_err(), "{state:?}");
            assert_eq!(table.state(), good);
        }
        assert!(recorder.routes.lock().unwrap().is_empty());
    }

    #[test]
    fn reset_drops_pending_interrupts() {
        let (recorder, mut table) = table();
        table.set_control(CONTROL_ENABLE).unwrap();
        recorder.events[2].write(1).unwrap();
        assert_eq!(pending(&table), 4);
        table.reset().unwrap();
        table.set_control(CONTROL_ENABLE).unwrap();
        assert_eq!(pending(&table), 0);
        assert!(recorder.events[2].read().is_err());
    }

    #[test]
    fn event_set_to_blocking_does_not_block_the_table() {
        let (recorder, mut table) = table();
        for event in &recorder.events {
            fcntl_setfl(borrow(event), OFlags::empty()).unwrap();
        }
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            table.set_control(CONTROL_ENABLE).unwrap();
            let before = pending(&table);
            recorder.events[2].write(u64::MAX - 1).unwrap();
            let seen = [before, pending(&table), pending(&table)];
            table.reset().unwrap();
            sender.send(seen).unwrap();
        });
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)).expect("the table waits for ever"), [0, 4, 4]);
    }

    const MESSAGE: MsiMessage = MsiMessage { address: 0xfee0_1000, data: 0x41 };

    fn failed_vector(outcome: Result<(), MsixError>) -> u16 {
        let Err(MsixError::Route { vector, .. }) = outcome else { panic!("a route fails") };
        vector
    }

    #[test]
    fn other_vectors_are_unrouted_if_one_route_stays() {
        let (recorder, mut table) = table();
        table.set_control(CONTROL_ENABLE).unwrap();
        (0..3).for_each(|vector| program(&mut table, vector, 0));
        recorder.changed();
        for off in [
            (|table| table.set_control(0)) as fn(&mut MsixTable) -> Result<(), MsixError>,
            |table| table.set_control(CONTROL_ENABLE | CONTROL_FUNCTION_MASK),
            |table| table.set_on_bus(false),
        ] {
            recorder.refuse(&[0, 1]);
            assert_eq!(failed_vector(off(&mut table)), 0);
            assert_eq!(recorder.changed(), [(2, None)]);
            // The next change tries the rejected vectors again.
            off(&mut table).unwrap();
            assert_eq!(recorder.changed(), [(0, None), (1, None)]);
            table.set_on_bus(true).unwrap();
            table.set_control(CONTROL_ENABLE).unwrap();
            assert_eq!(recorder.changed().len(), 3);
        }
    }

    #[test]
    fn other_vectors_are_routed_if_one_cannot_be() {
        let (recorder, mut table) = table();
        let entry = [&0xfee0_1000u64.to_le_bytes()[..], &0x41u32.to_le_bytes(), &[0; 4]].concat();
        table.set_control(CONTROL_ENABLE).unwrap();
        recorder.refuse(&[0]);
        assert_eq!(failed_vector(table.write_table(0, &entry.repeat(3))), 0);
        assert_eq!(recorder.changed(), [(1, Some(MESSAGE)), (2, Some(MESSAGE))]);
    }

    #[test]
    fn reset_drops_pending_interrupts_if_a_route_stays() {
        let (recorder, mut table) = table();
        table.set_control(CONTROL_ENABLE).unwrap();
        program(&mut table, 0, 0);
        program(&mut table, 1, 0);
        recorder.changed();
        recorder.events.iter().for_each(|event| event.write(1).unwrap());
        recorder.refuse(&[0]);
        assert_eq!(failed_vector(table.reset()), 0);
        assert_eq!(recorder.changed(), [(1, None)]);
        assert!(recorder.events.iter().all(|event| event.read().is_err()), "an interrupt of the old driver is left");
    }

    #[test]
    fn reserved_bits_of_vector_control_read_as_zero() {
        let (_, mut table) = table();
        let control = |table: &MsixTable| {
            let mut bytes = [0; 4];
            table.read_table(12, &mut bytes);
            u32::from_le_bytes(bytes)
        };
        for (written, read) in [(0xffff_fffe_u32, 0), (u32::MAX, 1), (0x100, 0)] {
            table.write_table(12, &written.to_le_bytes()).unwrap();
            assert_eq!((control(&table), table.state().vectors[0].control), (read, read), "{written:#x}");
        }
        table.write_table(13, &[0xff; 3]).unwrap();
        assert_eq!(control(&table), 0);
        // A saved state may come from a version of Carom that stored these reserved bits.
        let mut state = table.state();
        state.vectors[0].control = u32::MAX;
        table.restore(&state).unwrap();
        assert_eq!(control(&table), VECTOR_MASK);
    }

    #[test]
    fn access_beyond_the_table_changes_nothing() {
        let (recorder, mut table) = table();
        table.set_control(CONTROL_ENABLE).unwrap();
        table.write_table(3 * ENTRY_SIZE, &[0; 8]).unwrap();
        table.write_table(u64::MAX - 2, &[0; 8]).unwrap();
        let mut data = [0xaa; 8];
        table.read_table(u64::MAX - 2, &mut data);
        table.read_table(3 * ENTRY_SIZE, &mut data);
        assert_eq!(data, [0xaa; 8]);
        table.trigger(77).unwrap();
        assert!(recorder.routes.lock().unwrap().is_empty());
    }

    #[test]
    fn reset_unroutes_everything() {
        let (recorder, mut table) = table();
        table.set_control(CONTROL_ENABLE).unwrap();
        program(&mut table, 0, 0);
        table.reset().unwrap();
        assert_eq!(recorder.routes.lock().unwrap().last(), Some(&(0, None)));
        assert!(!table.is_enabled());
    }
}
