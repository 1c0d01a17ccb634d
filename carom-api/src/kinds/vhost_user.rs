// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What holds for every device that a vhost-user server serves.

use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::Field;
use crate::option_list::{OptionList, Special};

/// Most bytes of a socket's path, as the host's kernel has it.
const MAX_PATH: usize = 107;
/// Sizes that a queue may have.
pub(super) const QUEUE_SIZES: RangeInclusive<u16> = 4..=1024;

/// Checks a number of queues.
pub(super) fn check_queues(field: Field, queues: u16, most: u16) -> Result<(), ConfigError> {
    ensure((1..=most).contains(&queues), field, || format!("{queues} is not 1 to {most}"))
}

/// Checks the size of a queue.
pub(super) fn check_queue_size(field: Field, size: u16, sizes: RangeInclusive<u16>) -> Result<(), ConfigError> {
    let (least, most) = (sizes.start(), sizes.end());
    let fits = size.is_power_of_two() && sizes.contains(&size);
    ensure(fits, field, || format!("{size} is no power of two from {least} to {most}"))
}

/// Checks the path of a socket.
pub(super) fn check_socket(field: Field, path: &Path) -> Result<(), ConfigError> {
    let path = path.as_os_str().as_bytes();
    let fits = (1..=MAX_PATH).contains(&path.len()) && !path.contains(&0);
    ensure(fits, field, || format!("is no path of 1 to {MAX_PATH} bytes, none of them zero"))
}

/// Checks that the server can be given the guest's RAM.
pub(super) fn check_memory(field: Field, memory: &MemoryConfig) -> Result<(), ConfigError> {
    ensure_in_terms(memory.can_be_shared(), field, |terms| {
        format!("the server is given all guest RAM, which needs {}", MemoryConfig::SHARED.turned_on(terms))
    })
}

/// The keys of the server's socket.
pub(super) const SOCKET_KEYS: Special = Special::By("vhost_socket", &["socket", "vhost_socket"]);

/// The server's socket: `socket`, as Cloud Hypervisor's command line has it, or `vhost_socket`, as its API does.
///
/// # Errors
/// Both are given.
pub(super) fn socket(list: &OptionList, field: Field) -> Result<Option<PathBuf>, ConfigError> {
    let (socket, vhost_socket) = (list.get("socket"), list.get("vhost_socket"));
    ensure(socket.is_none() || vhost_socket.is_none(), field, || "is given twice, as vhost_socket too")?;
    Ok(socket.or(vhost_socket).map(PathBuf::from))
}
