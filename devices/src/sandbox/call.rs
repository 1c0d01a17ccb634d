// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How a role names the system calls that it makes.

use super::call_name::CallName;

/// A system call that a thread may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// This one, with any arguments.
    Any(i64),
    /// This one, where the argument at this index has this value, of 32 bits.
    With(i64, u8, u32),
    /// This one, where the argument at this index has none of these bits.
    Without(i64, u8, u32),
    /// This one, where all of these arguments are so.
    Where(i64, &'static [Argument]),
    /// This one, where the first argument is this process.
    OnItself(i64),
    /// `ioctl` with this request.
    Ioctl(u32),
    /// `ioctl` with any request of this type, which is what a driver has for its own.
    IoctlsOf(u8),
}

/// Condition on one argument of a system call. Arguments count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The argument at this index has this value, of 32 bits.
    Is(u8, u32),
    /// Of the argument at this index, the bits of the first number have the value of the second.
    Bits(u8, u32, u32),
    /// The argument at this index is a null pointer.
    Null(u8),
}

impl Call {
    /// Its number.
    pub fn number(self) -> i64 {
        match self {
            Self::Any(number)
            | Self::With(number, ..)
            | Self::Without(number, ..)
            | Self::Where(number, _)
            | Self::OnItself(number) => number,
            Self::Ioctl(_) | Self::IoctlsOf(_) => libc::SYS_ioctl,
        }
    }

    /// Its name, for people.
    pub fn name(self) -> String {
        CallName(self.number()).alone()
    }
}

/// What a thread does, and the calls that it makes for that beside those of every thread.
#[derive(Clone, Copy, Debug)]
pub struct ThreadRole {
    /// Its name, for messages.
    pub name: &'static str,
    /// Its calls, in lists that roles may share.
    pub calls: &'static [&'static [Call]],
}
