// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that the parent process left open and that the command line names.

use std::fs;
use std::io;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use carom_api::error::FileError;
use carom_api::{Field, NetConfig, Terms};
use kvm_ioctls::Kvm;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::tap;

/// Result of `KVM_GET_API_VERSION` (`KVM_API_VERSION` of `include/uapi/linux/kvm.h`).
const KVM_API_VERSION: i32 = 12;

/// Descriptors that the command line names. This program takes ownership of them before it opens any descriptor of its own.
#[derive(Debug, Default)]
pub struct InheritedFds(Vec<(i32, OwnedFd)>);

/// Returns KVM from a duplicate of an inherited descriptor of `/dev/kvm`, if the process inherited such a descriptor.
///
/// # Errors
/// The process cannot open more descriptors.
pub fn kvm() -> io::Result<Option<Kvm>> {
    let Some(fd) = devices::inherited::kvm().transpose()? else { return Ok(None) };
    // SAFETY: the descriptor is open, belongs to KVM according to its device number, and is owned only here.
    Ok(Some(unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) }))
}

/// True once the descriptors were taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

impl InheritedFds {
    /// Takes ownership of descriptors. `numbers` contains their numbers, each with the option that names the number. A number must be above
    /// 2, because 0 to 2 are the standard descriptors. Call this function once, before the program has opened any descriptor of its own.
    ///
    /// # Errors
    /// A number is not an open descriptor, or occurs twice. If it occurs twice, the error names the second option.
    pub fn take(numbers: &[(Field, i32)]) -> Result<Self, FileError> {
        assert!(!TAKEN.swap(true, Ordering::Relaxed), "called once");
        check(numbers)?;
        let take = |(field, number): &(Field, i32)| {
            // SAFETY: the descriptor is open, as was just checked, and above the three standard descriptors. The user hands the descriptor
            // over by naming it on the command line. This program has opened no descriptor yet, and no number is taken twice.
            let fd = unsafe { OwnedFd::from_raw_fd(*number) };
            // Set close-on-exec as a precaution, although this process executes no other program.
            fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|error| file_error(*field, *number, error.into()))?;
            Ok((*number, fd))
        };
        Ok(Self(numbers.iter().map(take).collect::<Result<_, _>>()?))
    }

    /// Returns the descriptor with this number. Each descriptor is returned only once.
    ///
    /// # Errors
    /// The descriptor was already returned, or never existed.
    pub fn give(&mut self, number: i32) -> io::Result<OwnedFd> {
        let place = self.0.iter().position(|(other, _)| *other == number);
        place.map(|place| self.0.swap_remove(place).1).ok_or_else(|| io::Error::other("not open"))
    }

    /// Stores the descriptor with this number, which `option` names. The code that needs the descriptor duplicates it later.
    ///
    /// # Errors
    /// Carom cannot use this kind of descriptor, the option expects another kind, or KVM has another API version.
    pub fn keep(&mut self, option: Field, number: i32) -> Result<(), FileError> {
        let kept = self.give(number).and_then(|fd| {
            devices::inherited::keep(number, fd)?;
            if option == NetConfig::OPTION {
                tap::check_descriptor(devices::inherited::interface(number)?.as_fd())?;
            }
            match kvm()? {
                Some(kvm) if kvm.get_api_version() != KVM_API_VERSION => {
                    let rule = format!("has KVM API version {}, not {KVM_API_VERSION}", kvm.get_api_version());
                    Err(io::Error::other(rule))
                }
                _ => Ok(()),
            }
        });
        kept.map_err(|source| file_error(option, number, source))
    }
}

/// Checks that each number is an open descriptor and occurs once.
fn check(numbers: &[(Field, i32)]) -> Result<(), FileError> {
    for (place, (field, number)) in numbers.iter().enumerate() {
        if let Some((other, _)) = numbers[..place].iter().find(|(_, other)| other == number) {
            let rule = format!(
                "{} names the same descriptor: pass a separate descriptor for each option",
                other.name(Terms::Options)
            );
            return Err(file_error(*field, *number, io::Error::other(rule)));
        }
        if *number <= 2 {
            return Err(file_error(
                *field,
                *number,
                io::Error::other("is reserved for standard input, output or error: use a number above 2"),
            ));
        }
        // If a number has no open descriptor, report a user error. Creating an `OwnedFd` from such a number would be unsound.
        fs::metadata(format!("/proc/self/fd/{number}")).map_err(|source| {
            let none = source.kind() == io::ErrorKind::NotFound;
            let rule = "the program was not started with this descriptor: start carom with the descriptor open";
            file_error(*field, *number, if none { io::Error::other(rule) } else { source })
        })?;
    }
    Ok(())
}

fn file_error(field: Field, number: i32, source: io::Error) -> FileError {
    FileError { field, path: format!("fd={number}"), source }
}
