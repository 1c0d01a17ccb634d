// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What of the host's files a device is made of, for Landlock.

use std::path::Path;

/// Files of the host that a device is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostFile<'p> {
    /// This one, which is only read.
    Read(&'p Path),
    /// This one, which is read and written.
    ReadWrite(&'p Path),
    /// A socket that is made here, and others beside it of which the name begins so.
    Socket(&'p Path),
    /// A tap interface (`/dev/net/tun`), or the macvtap interface of this name (`/dev/tapN`).
    Interface(Option<&'p str>),
    /// A function of the host's, by its directory in sysfs, and what VFIO has of it.
    Function(&'p Path),
}
