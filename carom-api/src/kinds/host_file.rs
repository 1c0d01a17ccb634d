// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host files that a device uses, for Landlock rules.

use std::path::Path;

/// Host files that a device uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostFile<'p> {
    /// File that is only read.
    Read(&'p Path),
    /// File that is read and written.
    ReadWrite(&'p Path),
    /// Socket that the VMM creates, and all sockets in the same directory whose names begin with the name of this socket.
    Socket(&'p Path),
    /// Tap interface (`/dev/net/tun`), or the macvtap interface of this name (`/dev/tapN`).
    Interface(Option<&'p str>),
    /// PCI function of the host, given by its sysfs directory, with its VFIO files.
    Function(&'p Path),
}
