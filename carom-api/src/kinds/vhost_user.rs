// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What holds for every device that a vhost-user server serves.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::{OptionList, Special};

/// Most bytes of a socket's path, as the host's kernel has it.
const MAX_PATH: usize = 107;
/// Least size of a queue.
const MIN_QUEUE_SIZE: u16 = 4;
/// Largest size of a queue.
const MAX_QUEUE_SIZE: u16 = 1024;

/// Checks the size of a queue.
pub(super) fn check_queue_size(field: Field, size: u16) -> Result<(), ConfigError> {
    if size.is_power_of_two() && (MIN_QUEUE_SIZE..=MAX_QUEUE_SIZE).contains(&size) {
        return Ok(());
    }
    Err(ConfigError::new(field, format!("{size} is no power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}")))
}

/// Checks the path of a server's socket.
pub(super) fn check_socket(field: Field, path: &Path) -> Result<(), ConfigError> {
    let path = path.as_os_str().as_bytes();
    if path.is_empty() || path.len() > MAX_PATH || path.contains(&0) {
        return Err(ConfigError::new(field, format!("is no path of 1 to {MAX_PATH} bytes, none of them zero")));
    }
    Ok(())
}

/// Checks that the server can be given the guest's RAM.
pub(super) fn check_memory(field: Field, memory: &MemoryConfig) -> Result<(), ConfigError> {
    if memory.can_be_shared() {
        return Ok(());
    }
    Err(ConfigError::in_terms(field, |terms| {
        format!("the server is given all guest RAM, which needs {}", MemoryConfig::SHARED.turned_on(terms))
    }))
}

/// The keys of the server's socket.
pub(super) const SOCKET_KEYS: Special = Special::By("vhost_socket", &["socket", "vhost_socket"]);

/// The server's socket: `socket`, as Cloud Hypervisor's command line has it, or `vhost_socket`, as its API does.
///
/// # Errors
/// Both are given.
pub(super) fn socket(list: &OptionList, field: Field) -> Result<Option<PathBuf>, ConfigError> {
    let (socket, vhost_socket) = (list.get("socket"), list.get("vhost_socket"));
    if socket.is_some() && vhost_socket.is_some() {
        return Err(ConfigError::new(field, "is given twice, as vhost_socket too"));
    }
    Ok(socket.or(vhost_socket).map(PathBuf::from))
}
