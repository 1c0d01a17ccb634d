// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VM Generation ID (Microsoft, "Virtual Machine Generation ID"): 16 random bytes in the guest's memory that change at each
//! restore. When a guest is notified of a new ID, it reseeds its random number generator. Otherwise VMs restored from one snapshot
//! would have the same random numbers.
//!
//! The guest may overwrite the ID in its memory. This does no harm, because the VMM never reads the ID back from guest memory.

use std::io;

use devices::ram::Ram;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::layout;

/// Guest-physical address of the ID.
pub const ADDRESS: u64 = layout::GENERATION_ID;

/// Generation ID.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GenerationId([u8; 16]);

impl GenerationId {
    /// Generates a new ID from the host's random numbers.
    pub fn draw() -> io::Result<Self> {
        let mut id = [0; 16];
        let mut done = 0;
        while done < id.len() {
            match getrandom(&mut id[done..], GetRandomFlags::empty()) {
                Ok(len) => done += len,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self(id))
    }

    /// Writes the ID to guest memory.
    pub fn write(self, memory: &Ram) -> Result<(), GuestMemoryError> {
        memory.write_slice(&self.0, GuestAddress(ADDRESS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_id_is_new_and_at_the_address_in_the_tables() {
        let memory = Ram::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let mut ids = Vec::new();
        for _ in 0..3 {
            GenerationId::draw().unwrap().write(&memory).unwrap();
            let mut page = [0u8; 4096];
            memory.read_slice(&mut page, GuestAddress(0xf_1000)).unwrap();
            assert!(page[16..].iter().all(|byte| *byte == 0));
            ids.push(page[..16].to_vec());
        }
        ids.push(vec![0; 16]);
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 4);
    }
}
