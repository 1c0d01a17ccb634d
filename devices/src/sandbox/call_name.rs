// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a system call is called.

use std::fmt::{self, Display, Formatter};

use syscalls::Sysno;

/// The number of a system call of x86-64, told with its name where Linux 6.18 has one. A handler of signals may write it: names are in a
/// table of the program.
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
    fn calls_are_named_and_numbers_that_are_none_stand_alone() {
        // Numbers without a call lie between those of 5.0 and later ones; those of x32 have bit 30 set.
        for (number, told) in [
            (libc::SYS_read, "read (0)"),
            (libc::SYS_setsid, "setsid (112)"),
            (libc::SYS_ioctl, "ioctl (16)"),
            (libc::SYS_clone3, "clone3 (435)"),
            (400, "400"),
            (0x4000_0000, "1073741824"),
            (-1, "-1"),
            (i64::MAX, "9223372036854775807"),
        ] {
            assert_eq!(CallName(number).to_string(), told);
        }
    }
}
