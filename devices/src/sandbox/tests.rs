// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of threads that are pinned to host CPUs.

use std::sync::mpsc::channel;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::{HostCpus, PinError, ThreadRole, start, start_on};

const ROLE: ThreadRole = ThreadRole { name: "test", calls: &[] };

/// Returns the affinity of a thread that is pinned to `cpus`, and of a thread that the pinned thread starts.
fn places(cpus: HostCpus) -> Result<(CpuSet, CpuSet), PinError> {
    let (sender, receiver) = channel();
    let run = move || {
        let own = sched_getaffinity(None).unwrap();
        let of_child = move || sender.send((own, sched_getaffinity(None).unwrap())).unwrap();
        start(ROLE, "child".into(), of_child).unwrap().join().unwrap();
    };
    start_on(ROLE, "held".into(), Some(cpus), run)?.join().unwrap();
    Ok(receiver.recv().unwrap())
}

#[test]
fn pinned_thread_runs_on_its_cpu_and_its_child_on_any() {
    let all = sched_getaffinity(None).unwrap();
    for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)) {
        let cpus = HostCpus::new([u32::try_from(cpu).unwrap()]).unwrap();
        assert_eq!(places(cpus).unwrap(), (cpus.0, all), "CPU {cpu}");
    }
}

#[test]
fn missing_cpu_is_named_and_no_thread_runs() {
    let all = sched_getaffinity(None).unwrap();
    let there = u32::try_from((0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap()).unwrap();
    let highest = u32::try_from(CpuSet::MAX_CPU - 1).unwrap();
    for numbers in [vec![highest], vec![there, highest]] {
        let refused = places(HostCpus::new(numbers).unwrap()).unwrap_err();
        assert!(matches!(refused, PinError::Missing(cpu) if cpu == highest), "{refused}");
    }
    assert!(matches!(HostCpus::new([there, highest + 1]), Err(PinError::Missing(cpu)) if cpu == highest + 1));
}

#[test]
fn thread_whose_name_has_a_nul_runs_without_it() {
    let (sender, receiver) = channel();
    let run = move || sender.send(std::thread::current().name().map(str::to_string)).unwrap();
    start(ROLE, "a\0b".into(), run).unwrap().join().unwrap();
    assert_eq!(receiver.recv().unwrap().as_deref(), Some("ab"));
}
