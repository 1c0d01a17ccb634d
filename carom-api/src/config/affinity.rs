// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CPU affinity of the VM's threads.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::MAX_HOST_CPU;

/// Host CPUs that a vCPU may run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuAffinity {
    /// Number of the vCPU.
    pub vcpu: u32,
    /// Numbers of the host CPUs, at least one, each 0 to 1023.
    pub host_cpus: Vec<u32>,
}

/// Host CPUs that the thread of a disk queue may run on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VirtQueueAffinity {
    /// Number of the queue, counted from 0.
    pub queue_index: u16,
    /// Numbers of the host CPUs, at least one, each 0 to 1023.
    pub host_cpus: Vec<u32>,
}

impl CpuAffinity {
    /// Checks the affinities of a VM with at most `vcpus` vCPUs.
    pub(super) fn check_all(all: &[Self], field: Field, vcpus: u32) -> Result<(), ConfigError> {
        check(field, "vCPU", vcpus, all.iter().map(|of| (of.vcpu, &of.host_cpus)))
    }
}

impl VirtQueueAffinity {
    /// Checks the affinities of a device with `queues` queues.
    pub(crate) fn check_all(all: &[Self], field: Field, queues: u16) -> Result<(), ConfigError> {
        check(field, "queue", queues.into(), all.iter().map(|of| (of.queue_index.into(), &of.host_cpus)))
    }
}

/// Checks the affinities of `count` vCPUs or queues. `what` is `vCPU` or `queue`, for the text of an error.
fn check<'a>(
    field: Field,
    what: &str,
    count: u32,
    all: impl Iterator<Item = (u32, &'a Vec<u32>)>,
) -> Result<(), ConfigError> {
    let mut seen = BTreeSet::new();
    for (number, host_cpus) in all {
        let rule = if number >= count {
            format!("{what} {number} does not exist: the last {what} is {}", count.saturating_sub(1))
        } else if !seen.insert(number) {
            format!("{what} {number} is given twice: list it once")
        } else if host_cpus.is_empty() {
            format!("{what} {number} has an empty list of host CPUs: name at least one")
        } else if let Some(cpu) = host_cpus.iter().find(|cpu| **cpu > MAX_HOST_CPU) {
            format!(
                "{what} {number} cannot run on host CPU {cpu}: the highest CPU number that Carom supports is {MAX_HOST_CPU}"
            )
        } else {
            continue;
        };
        return Err(ConfigError::new(field, rule));
    }
    Ok(())
}
