// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks and options shared by all devices that a vhost-user server serves.

use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::Field;
use crate::option_list::{OptionList, Special};

/// Maximum bytes of a socket path (`sun_path` in Linux, without the zero byte).
const MAX_PATH: usize = 107;
/// Valid sizes of a queue.
pub(super) const QUEUE_SIZES: RangeInclusive<u16> = 4..=1024;

/// Checks the number of queues.
pub(super) fn check_queues(field: Field, queues: u16, most: u16) -> Result<(), ConfigError> {
    ensure((1..=most).contains(&queues), field, || format!("{queues} is not between 1 and {most}"))
}

/// Checks the size of a queue.
pub(super) fn check_queue_size(field: Field, size: u16, sizes: RangeInclusive<u16>) -> Result<(), ConfigError> {
    let (least, most) = (sizes.start(), sizes.end());
    let fits = size.is_power_of_two() && sizes.contains(&size);
    ensure(fits, field, || format!("{size} is not a power of two from {least} to {most}"))
}

/// Checks the path of a socket.
pub(super) fn check_socket(field: Field, path: &Path) -> Result<(), ConfigError> {
    let path = path.as_os_str().as_bytes();
    let fits = (1..=MAX_PATH).contains(&path.len()) && !path.contains(&0);
    ensure(fits, field, || format!("the path is invalid: use 1 to {MAX_PATH} bytes that contain no NUL byte"))
}

/// Checks that the guest's RAM can be shared with the server.
pub(super) fn check_memory(field: Field, memory: &MemoryConfig) -> Result<(), ConfigError> {
    ensure_in_terms(memory.can_be_shared(), field, |terms| {
        format!(
            "the server must be able to map all guest RAM, so the device needs {}",
            MemoryConfig::SHARED.turned_on(terms)
        )
    })
}

/// Keys for the server's socket.
pub(super) const SOCKET_KEYS: Special = Special::By("vhost_socket", &["socket", "vhost_socket"]);

/// Returns the path of the server's socket. The key is `socket`, as on Cloud Hypervisor's command line, or `vhost_socket`, as in Cloud
/// Hypervisor's API.
///
/// # Errors
/// Both keys are given.
pub(super) fn socket(list: &OptionList, field: Field) -> Result<Option<PathBuf>, ConfigError> {
    let (socket, vhost_socket) = (list.get("socket"), list.get("vhost_socket"));
    ensure(
        socket.is_none() || vhost_socket.is_none(),
        field,
        || "is given twice, as socket and as vhost_socket: leave one out",
    )?;
    Ok(socket.or(vhost_socket).map(PathBuf::from))
}
