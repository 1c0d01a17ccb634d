// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits on file descriptors of this process. A guest can make the process open descriptors. So a reserve, which guests cannot use, stays
//! free for API clients, files of hotplugged devices, snapshots and resets.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use log::warn;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit, setrlimit};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Maximum number of descriptors in the reserve.
const MOST_RESERVED: u64 = 128;

/// Minimum number of descriptors that the kernel's descriptor table has room for after [`prepare`].
const ROOM: u64 = 1024;

/// Raises the limit on descriptors as far as the host allows, and makes the kernel's descriptor table grow. Call this function once, before
/// other threads start. If a process has several threads, the kernel waits for all CPUs whenever the table grows (`expand_fdtable()` of
/// fs/file.c). On the test machine of `scripts/rig`, each growth took 14 ms.
pub fn prepare() {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            warn!("cannot raise the limit on descriptors (ulimit -n): {error}");
        }
    }
    // Ignore an error, because the table can also grow later.
    let last = limit.current.map_or(ROOM, |limit| limit.min(ROOM)).saturating_sub(1);
    drop(i32::try_from(last).map(|last| fcntl_dupfd_cloexec(io::stdin(), last)));
}

/// Checks that a descriptor that serves a guest does not use the reserve. Call this function directly after opening the descriptor. The
/// reserve consists of the highest numbers below the limit on descriptors. The kernel assigns the lowest free number to a new descriptor.
///
/// # Errors
/// `EMFILE` if the descriptor's number is in the reserve, as if the process had reached its limit on descriptors. The caller must close the
/// descriptor.
pub(crate) fn check_reserve(descriptor: &impl AsFd) -> io::Result<()> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let number = u64::try_from(descriptor.as_fd().as_raw_fd()).unwrap_or(0);
    if number < for_guests(limit) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EMFILE)) }
}

/// Shortage of descriptors: a guest may need more descriptors than the limit allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Number of open descriptors, such as files, sockets and interrupt vectors of devices.
    pub open: u64,
    /// Limit on descriptors.
    pub limit: u64,
    /// Number of descriptors below the limit that guests cannot use.
    pub reserved: u64,
}

/// Returns the shortage if the limit does not allow guests to open `wanted` more descriptors. Returns `None` if the limit allows this, or
/// if the limit or the number of open descriptors is unknown.
pub fn shortage(wanted: u64) -> Option<Shortage> {
    let limit = getrlimit(Resource::Nofile).current?;
    // The kernel assigns the lowest free number to the eventfd, so all lower numbers belong to open descriptors.
    let next = EventFd::new(EFD_NONBLOCK).ok()?;
    shortage_of(u64::try_from(next.as_raw_fd()).ok()?, wanted, limit)
}

fn shortage_of(open: u64, wanted: u64, limit: u64) -> Option<Shortage> {
    let fits = open.checked_add(wanted).is_some_and(|all| all <= for_guests(limit));
    (!fits).then(|| Shortage { open, limit, reserved: limit - for_guests(limit) })
}

/// Returns how many of `limit` descriptors are outside the reserve.
fn for_guests(limit: u64) -> u64 {
    limit - MOST_RESERVED.min(limit / 4)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use super::*;

    #[test]
    fn reserve_is_a_quarter_of_the_limit_capped_at_128() {
        assert_eq!([0, 3, 128, 1024, 1 << 20].map(for_guests), [0, 3, 96, 896, (1 << 20) - 128]);
    }

    #[test]
    fn shortage_is_reported_when_demand_reaches_the_reserve() {
        assert_eq!(shortage_of(96, 800, 1024), None);
        assert_eq!(shortage_of(97, 800, 1024), Some(Shortage { open: 97, limit: 1024, reserved: 128 }));
        assert_eq!(shortage_of(10, 256, 256), Some(Shortage { open: 10, limit: 256, reserved: 64 }));
        assert!(shortage_of(1, u64::MAX, 1 << 20).is_some());
    }

    #[test]
    fn shortage_counts_open_descriptors() {
        let Some(limit) = getrlimit(Resource::Nofile).current else { return };
        assert!(shortage(for_guests(limit)).is_some_and(|shortage| shortage.open > 2 && shortage.limit == limit));
        assert_eq!(shortage(0), None);
    }

    #[test]
    fn descriptor_in_the_reserve_is_refused() {
        let Some(limit) = getrlimit(Resource::Nofile).current else { return };
        let file = File::open("/dev/null").unwrap();
        let at = |number: u64| -> OwnedFd { fcntl_dupfd_cloexec(&file, i32::try_from(number).unwrap()).unwrap() };
        assert!(check_reserve(&file).is_ok());
        let refused = check_reserve(&at(for_guests(limit))).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EMFILE));
    }
}
