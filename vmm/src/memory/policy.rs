// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Binding of memory to a NUMA node of the host (`mbind`). This module makes the system call directly, because no crate that Carom uses has
//! a wrapper.

use std::io;

use carom_api::ConfigError;
use carom_api::config::MemoryZoneConfig;
use vm_memory::MmapRegion;

use super::MemoryError;

/// Bits in a word of a node set.
const BITS: u32 = u64::BITS;
/// Number of words in a node set.
const WORDS: usize = 16;
/// Policy that allocates memory only from the given nodes (`MPOL_BIND`).
const BIND: libc::c_int = libc::MPOL_BIND;

/// Binds `mapping` to NUMA node `node` of the host. The mapping must not have pages yet.
///
/// # Errors
/// The node does not exist, or the host rejects the call.
pub fn hold_to_node(mapping: &MmapRegion, node: u32) -> Result<(), MemoryError> {
    let no_node = || {
        let rule = format!(
            "node {node} of the host has no memory that carom may use: choose a node from Mems_allowed_list in /proc/self/status"
        );
        MemoryError::from(ConfigError::new(MemoryZoneConfig::HOST_NUMA_NODE, rule))
    };
    let mut nodes = [0u64; WORDS];
    let word = usize::try_from(node / BITS).ok().and_then(|word| nodes.get_mut(word)).ok_or_else(no_node)?;
    *word = 1 << (node % BITS);
    // The kernel reads one bit fewer than `bits`.
    let bits = WORDS * BITS as usize + 1;
    // SAFETY: The range is the memory of `mapping`, and a NUMA policy does not change the bytes in it. The kernel reads the words of
    // `nodes`, which live until the call returns.
    let result =
        unsafe { libc::syscall(libc::SYS_mbind, mapping.as_ptr(), mapping.size(), BIND, nodes.as_ptr(), bits, 0) };
    if result == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    Err(match source.raw_os_error() {
        Some(libc::EINVAL) => no_node(),
        _ => MemoryError::Node { node, source },
    })
}

#[cfg(test)]
mod tests {
    use carom_api::{Explain, Terms};

    use super::*;

    #[test]
    fn memory_is_bound_to_its_node_and_missing_nodes_are_refused() {
        let mapping = MmapRegion::<()>::new(1 << 20).unwrap();
        match hold_to_node(&mapping, 0) {
            Ok(()) => {
                let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
                let start = format!("{:x} ", mapping.as_ptr() as usize);
                let line = maps.lines().find(|line| line.starts_with(&start)).unwrap();
                assert!(line.contains("bind:0"), "{line}");
            }
            // This kernel has no NUMA support.
            Err(MemoryError::Node { source, .. }) => assert_eq!(source.raw_os_error(), Some(libc::ENOSYS)),
            Err(error) => panic!("{error}"),
        }
        for node in [1000, 1023, 1024, u32::MAX] {
            let refused = hold_to_node(&mapping, node).unwrap_err().explain(Terms::Json);
            let rule = format!("memory.zones.host_numa_node: node {node} of the host has no memory");
            assert!(refused.starts_with(&rule), "{refused}");
        }
    }
}
