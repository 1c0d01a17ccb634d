// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host CPUs for the threads of a VM. The CPUs are checked before the VM is built.

use std::collections::BTreeMap;

use carom_api::config::{CpuAffinity, CpusConfig, VirtQueueAffinity};
use carom_api::{ConfigError, DiskConfig, Field};
use devices::sandbox::{self, HostCpus, PinError, ThreadRole};
use devices::virtio::block;

use crate::error::VmError;
use crate::process::thread_roles::VCPU;

/// Returns the host CPUs of vCPUs, by vCPU number.
///
/// # Errors
/// A CPU cannot be used.
pub fn of_vcpus(affinity: &[CpuAffinity]) -> Result<BTreeMap<u32, HostCpus>, VmError> {
    let lists = affinity.iter().map(|of| (of.vcpu, of.host_cpus.as_slice()));
    check(VCPU, CpusConfig::AFFINITY, "vCPU", lists)
}

/// Returns the host CPUs of a disk's queues, by queue number.
///
/// # Errors
/// A CPU cannot be used.
pub fn of_queues(affinity: &[VirtQueueAffinity]) -> Result<BTreeMap<u16, HostCpus>, VmError> {
    let lists = affinity.iter().map(|of| (of.queue_index, of.host_cpus.as_slice()));
    check(block::ROLE, DiskConfig::QUEUE_AFFINITY, "queue", lists)
}

fn check<'a, N: Ord + Copy + std::fmt::Display>(
    role: ThreadRole,
    field: Field,
    what: &str,
    lists: impl Iterator<Item = (N, &'a [u32])> + Clone,
) -> Result<BTreeMap<N, HostCpus>, VmError> {
    let all: Vec<u32> = lists.clone().flat_map(|(_, cpus)| cpus.iter().copied()).collect();
    if all.is_empty() {
        return Ok(BTreeMap::new());
    }
    // One temporary thread checks all these CPUs.
    match HostCpus::new(all).and_then(|cpus| sandbox::check_host_cpus(role, cpus)) {
        Ok(()) => {}
        Err(error @ PinError::Missing(missing)) => {
            let of = lists.clone().find(|(_, cpus)| cpus.contains(&missing));
            let of = of.map(|(number, _)| format!("{what} {number}: ")).unwrap_or_default();
            return Err(ConfigError::new(field, format!("{of}{error}")).into());
        }
        Err(PinError::Host(source)) => {
            return Err(VmError::Device {
                what: "check whether threads can run on the host CPUs in affinity or queue_affinity",
                source,
            });
        }
    }
    let sets = lists.map(|(number, cpus)| Ok((number, HostCpus::new(cpus.iter().copied())?)));
    let sets: Result<_, PinError> = sets.collect();
    sets.map_err(|error| ConfigError::new(field, error.to_string()).into())
}

#[cfg(test)]
mod tests {
    use carom_api::{Explain, Terms};
    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::*;

    #[test]
    fn missing_host_cpu_is_named_with_its_vcpu_or_queue() {
        let usable = sched_getaffinity(None).unwrap();
        let there = u32::try_from((0..CpuSet::MAX_CPU).find(|cpu| usable.is_set(*cpu)).unwrap()).unwrap();
        let of = |vcpu, host_cpus: &[u32]| CpuAffinity { vcpu, host_cpus: host_cpus.into() };
        let refused = of_vcpus(&[of(1, &[there]), of(0, &[there, 1023])]).unwrap_err();
        let rule = "vCPU 0: cannot use CPU 1023 of the host: the CPU must be online, and in Cpus_allowed_list of \
                    /proc/self/status";
        assert_eq!(refused.explain(Terms::Json), format!("cpus.affinity: {rule}"));
        assert!(refused.is_user_error());
        let queue = VirtQueueAffinity { queue_index: 3, host_cpus: vec![1023] };
        let refused = of_queues(&[queue]).unwrap_err().explain(Terms::Options);
        assert!(refused.starts_with("--disk queue_affinity: queue 3: cannot use CPU 1023 of the host: "), "{refused}");
    }

    #[test]
    fn existing_host_cpus_are_accepted_by_number() {
        let usable = sched_getaffinity(None).unwrap();
        let all: Vec<u32> = (0..1024).filter(|cpu| usable.is_set(*cpu as usize)).collect();
        let affinity =
            [CpuAffinity { vcpu: 5, host_cpus: all.clone() }, CpuAffinity { vcpu: 2, host_cpus: all[..1].into() }];
        let taken = of_vcpus(&affinity).unwrap();
        assert_eq!(taken.keys().copied().collect::<Vec<_>>(), [2, 5]);
        assert_eq!(taken[&2], HostCpus::new([all[0]]).unwrap());
        assert_eq!(of_queues(&[]).unwrap(), BTreeMap::new());
    }
}
