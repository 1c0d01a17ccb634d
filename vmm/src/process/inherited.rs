// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that the parent process left open and names on the command line.

use std::fs;
use std::io;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use carom_api::error::FileError;
use carom_api::{Field, NetConfig, Terms};
use kvm_ioctls::Kvm;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::tap;

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

/// Whether they were taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

impl InheritedFds {
    /// Takes the descriptors with these numbers, each with the option that names it, which are above the standard three. To be called
    /// once, before the program has opened any of its own.
    ///
    /// # Errors
    /// A number is that of no open descriptor, or is there twice: then the second option is to blame.
    pub fn take(numbers: &[(Field, i32)]) -> Result<Self, FileError> {
        assert!(!TAKEN.swap(true, Ordering::Relaxed), "called once");
        check(numbers)?;
        let take = |(field, number): &(Field, i32)| {
            // SAFETY: the descriptor is open, as was just checked, above the standard three, and by naming it the user hands it over;
            // nothing of this program has opened one yet, and no number is taken twice.
            let fd = unsafe { OwnedFd::from_raw_fd(*number) };
            // Nothing is run, and what were would get none of them.
            fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|error| file_error(*field, *number, error.into()))?;
            Ok((*number, fd))
        };
        Ok(Self(numbers.iter().map(take).collect::<Result<_, _>>()?))
    }

    /// Gives the descriptor with this number out, once.
    ///
    /// # Errors
    /// It was given out, or never there.
    pub fn give(&mut self, number: i32) -> io::Result<OwnedFd> {
        let place = self.0.iter().position(|(other, _)| *other == number);
        place.map(|place| self.0.swap_remove(place).1).ok_or_else(|| io::Error::other("not open"))
    }

    /// Keeps the descriptor with this number, which `option` names, for whoever needs what it is of, if that can be used.
    ///
    /// # Errors
    /// It is of nothing that is used, of a KVM with another API, or not of what the option is for.
    pub fn keep(&mut self, option: Field, number: i32) -> Result<(), FileError> {
        let kept = self.give(number).and_then(|fd| {
            devices::inherited::keep(number, fd)?;
            if option == NetConfig::OPTION {
                tap::check_descriptor(devices::inherited::interface(number)?.as_fd())?;
            }
            match kvm()? {
                Some(kvm) if kvm.get_api_version() != KVM_API_VERSION => {
                    let rule = format!("KVM's API has version {}, not {KVM_API_VERSION}", kvm.get_api_version());
                    Err(io::Error::other(rule))
                }
                _ => Ok(()),
            }
        });
        kept.map_err(|source| file_error(option, number, source))
    }
}

/// Checks that each number is that of an open descriptor of its own.
fn check(numbers: &[(Field, i32)]) -> Result<(), FileError> {
    for (place, (field, number)) in numbers.iter().enumerate() {
        if let Some((other, _)) = numbers[..place].iter().find(|(_, other)| other == number) {
            let rule = format!("named twice, by {} too: one descriptor is for one thing", other.name(Terms::Options));
            return Err(file_error(*field, *number, io::Error::other(rule)));
        }
        if *number <= 2 {
            return Err(file_error(*field, *number, io::Error::other("in use for something else")));
        }
        // A number that is no open descriptor is a mistake to report, not to take.
        fs::metadata(format!("/proc/self/fd/{number}")).map_err(|source| {
            let none = source.kind() == io::ErrorKind::NotFound;
            let rule = "the program was not started with this descriptor";
            file_error(*field, *number, if none { io::Error::other(rule) } else { source })
        })?;
    }
    Ok(())
}

fn file_error(field: Field, number: i32, source: io::Error) -> FileError {
    FileError { field, path: format!("fd={number}"), source }
}
