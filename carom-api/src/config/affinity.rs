// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which CPUs of the host threads of the VM run on.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::MAX_HOST_CPU;

/// The CPUs of the host that a vCPU runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuAffinity {
    /// Number of the vCPU.
    pub vcpu: u32,
    /// Numbers of the host's CPUs, one at least, 0 to 1023 each.
    pub host_cpus: Vec<u32>,
}

/// The CPUs of the host that the thread of a disk's queue runs on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VirtQueueAffinity {
    /// Number of the queue, from 0.
    pub queue_index: u16,
    /// Numbers of the host's CPUs, one at least, 0 to 1023 each.
    pub host_cpus: Vec<u32>,
}

impl CpuAffinity {
    /// Checks those of a VM that can have `vcpus` vCPUs.
    pub(super) fn check_all(all: &[Self], field: Field, vcpus: u32) -> Result<(), ConfigError> {
        check(field, "vCPU", vcpus, all.iter().map(|of| (of.vcpu, &of.host_cpus)))
    }
}

impl VirtQueueAffinity {
    /// Checks those of a device that has `queues` queues.
    pub(crate) fn check_all(all: &[Self], field: Field, queues: u16) -> Result<(), ConfigError> {
        check(field, "queue", queues.into(), all.iter().map(|of| (of.queue_index.into(), &of.host_cpus)))
    }
}

/// Checks a list for `what`, of which there are `count`.
fn check<'a>(
    field: Field,
    what: &str,
    count: u32,
    all: impl Iterator<Item = (u32, &'a Vec<u32>)>,
) -> Result<(), ConfigError> {
    let mut seen = BTreeSet::new();
    for (number, host_cpus) in all {
        let rule = if number >= count {
            format!("there is no {what} {number}: the last is {}", count.saturating_sub(1))
        } else if !seen.insert(number) {
            format!("{what} {number} is given twice")
        } else if host_cpus.is_empty() {
            format!("{what} {number} has no CPU of the host to run on")
        } else if let Some(cpu) = host_cpus.iter().find(|cpu| **cpu > MAX_HOST_CPU) {
            format!("{what} {number} is to run on CPU {cpu} of the host, but numbers go to {MAX_HOST_CPU}")
        } else {
            continue;
        };
        return Err(ConfigError::new(field, rule));
    }
    Ok(())
}
