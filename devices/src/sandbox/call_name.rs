// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Names of system calls.

use std::fmt::{self, Display, Formatter};

use syscalls::Sysno;

/// Number of an x86-64 system call, displayed with its name if Linux 6.18 has one. A signal handler may format this value, because the
/// names are in a static table.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallName(pub(super) i64);

impl CallName {
    /// Returns the name without the number, or the number if the call has no name.
    pub(super) fn alone(self) -> String {
        let Self(number) = self;
        self.known().map_or_else(|| number.to_string(), |known| known.name().to_string())
    }

    fn known(self) -> Option<Sysno> {
        usize::try_from(self.0).ok().and_then(Sysno::new)
    }
}

impl Display for CallName {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(number) = self;
        match self.known() {
            Some(known) => write!(f, "{} ({number})", known.name()),
            None => write!(f, "{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_calls_have_names_and_unknown_ones_their_number() {
        // The number 400 is in a gap of unused numbers. Call numbers of the x32 ABI have bit 30 set.
        for (number, expected) in [
            (libc::SYS_read, "read (0)"),
            (libc::SYS_setsid, "setsid (112)"),
            (libc::SYS_ioctl, "ioctl (16)"),
            (libc::SYS_clone3, "clone3 (435)"),
            (400, "400"),
            (0x4000_0000, "1073741824"),
            (-1, "-1"),
            (i64::MAX, "9223372036854775807"),
        ] {
            assert_eq!(CallName(number).to_string(), expected);
        }
    }
}
