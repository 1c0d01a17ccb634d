// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that the parent process left open and names on the command line.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_ioctls::Kvm;

/// What `KVM_GET_API_VERSION` answers (`KVM_API_VERSION` of `include/uapi/linux/kvm.h`).
const KVM_API_VERSION: i32 = 12;

/// The descriptors that the command line names, taken before this program opens any.
#[derive(Debug, Default)]
pub struct InheritedFds(Vec<(i32, OwnedFd)>);

/// KVM by a descriptor that was inherited, if one was.
///
/// # Errors
/// The process can have no more descriptors.
pub fn kvm() -> io::Result<Option<Kvm>> {
    let Some(fd) = devices::inherited::kvm().transpose()? else { return Ok(None) };
    // SAFETY: the descriptor is open, of KVM by its number of a device, and nobody else's.
    Ok(Some(unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) }))
}

/// Keeps a descriptor for whoever needs what it is of, if that can be used.
///
/// # Errors
/// It is of nothing that is used, or of a KVM with another API.
pub fn keep(number: i32, fd: OwnedFd) -> io::Result<()> {
    devices::inherited::keep(number, fd)?;
    match kvm()? {
        Some(kvm) if kvm.get_api_version() != KVM_API_VERSION => {
            Err(io::Error::other(format!("KVM's API has version {}, not {KVM_API_VERSION}", kvm.get_api_version())))
        }
        _ => Ok(()),
    }
}

/// Whether they were taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

impl InheritedFds {
    /// Takes the descriptors with these numbers, which are above the standard three. To be called once, before the program
    /// has opened any of its own.
    ///
    /// # Errors
    /// With the number that names no open descriptor, or is there twice.
    pub fn take(numbers: &[i32]) -> Result<Self, (i32, io::Error)> {
        assert!(!TAKEN.swap(true, Ordering::Relaxed), "called once");
        let mut taken: Vec<(i32, OwnedFd)> = Vec::new();
        for number in numbers {
            if *number <= 2 || taken.iter().any(|(other, _)| other == number) {
                return Err((*number, io::Error::other("in use for something else")));
            }
            // A number that is no open descriptor is a mistake to report, not to take.
            fs::metadata(format!("/proc/self/fd/{number}")).map_err(|error| (*number, error))?;
            // SAFETY: the descriptor is open, as was just checked, above the standard three, and by naming it the user
            // hands it over; nothing of this program has opened one yet, and no number is taken twice.
            taken.push((*number, unsafe { OwnedFd::from_raw_fd(*number) }));
        }
        Ok(Self(taken))
    }

    /// Gives the descriptor with this number out, once.
    pub fn give(&mut self, number: i32) -> Option<OwnedFd> {
        let place = self.0.iter().position(|(other, _)| *other == number)?;
        Some(self.0.swap_remove(place).1)
    }
}
