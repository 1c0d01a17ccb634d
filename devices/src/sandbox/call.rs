// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! System calls that a role allows, each with conditions on its arguments.

use super::call_name::CallName;

/// System call that a thread may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Call with this number and any arguments.
    Any(i64),
    /// Call with this number, if the argument at this index has this 32-bit value.
    With(i64, u8, u32),
    /// Call with this number, if the argument at this index has none of these bits.
    Without(i64, u8, u32),
    /// Call with this number, if all these conditions on its arguments hold.
    Where(i64, &'static [Argument]),
    /// Call with this number, if its first argument is the ID of this process.
    OnItself(i64),
    /// `ioctl` with this request.
    Ioctl(u32),
    /// `ioctl` with any request of this type. A driver uses one type for all its requests.
    IoctlsOf(u8),
}

/// Condition on one argument of a system call. Arguments count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The argument at this index has this 32-bit value.
    Is(u8, u32),
    /// The first field is the index of the argument. The argument, masked with the second field, equals the third field.
    Bits(u8, u32, u32),
    /// The argument at this index is a null pointer.
    Null(u8),
}

impl Call {
    /// Returns the number of the call.
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

    /// Returns the name of the call, for messages.
    pub fn name(self) -> String {
        CallName(self.number()).alone()
    }
}

/// Task of a thread, with the system calls that it makes in addition to the calls that every thread may make.
#[derive(Clone, Copy, Debug)]
pub struct ThreadRole {
    /// Name of the role, for messages.
    pub name: &'static str,
    /// System calls of the role, in lists that several roles may share.
    pub calls: &'static [&'static [Call]],
}
