// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Keeps other work away from a guest's CPU, so that measurements contain only the work of the guest's kernel.
//!
//! The host's kernel sometimes uses the same CPU for the guest and for device interrupts. While the host handles an interrupt
//! on this CPU, the guest does not run, but its clock continues. So the guest counts this time as its own work.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// File with the hexadecimal CPU mask for interrupts that drivers request later (Linux
/// Documentation/core-api/irq/irq-affinity.rst).
const DEFAULT_AFFINITY: &str = "/proc/irq/default_smp_affinity";

/// Placement of vCPU threads on the last CPUs, and of new device interrupts on the first CPU. Dropping this value restores the
/// previous CPUs for interrupts that drivers request afterwards.
#[derive(Debug)]
pub(crate) struct Apart {
    /// CPUs on which this process may run.
    cpus: Vec<usize>,
    /// Numbers of the vCPUs whose threads have been placed.
    placed: BTreeSet<usize>,
    /// Previous contents of [`DEFAULT_AFFINITY`], if this value changed them.
    affinity: Option<String>,
}

impl Apart {
    /// If `interrupts` is true, assigns the first CPU to all interrupts that drivers request from now on. Use `true` only on a
    /// machine that does no other work. Existing interrupts keep their CPUs.
    ///
    /// # Errors
    /// Fails if the kernel rejects the mask.
    pub(crate) fn new(interrupts: bool) -> Result<Self> {
        let may_run = sched_getaffinity(None).context("cannot get the CPUs on which this process may run")?;
        let cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| may_run.is_set(cpu)).collect();
        let affinity = interrupts.then(|| {
            let before = fs::read_to_string(DEFAULT_AFFINITY)?;
            fs::write(DEFAULT_AFFINITY, "1").map(|()| before)
        });
        let affinity = affinity.transpose().context(DEFAULT_AFFINITY)?;
        Ok(Self { cpus, placed: BTreeSet::new(), affinity })
    }

    /// Places the vCPU threads of VMM `pid` that have not been placed yet. vCPU 0 gets the last CPU, vCPU 1 the second last
    /// CPU, and so on. If there are more vCPUs than CPUs, the placement starts again with the last CPU.
    pub(crate) fn place(&mut self, pid: u32) {
        // Ignore errors, because the VMM or a thread may have ended.
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return };
        for task in tasks.flatten() {
            let Some(vcpu) = vcpu_of(&task.path()).filter(|vcpu| !self.placed.contains(vcpu)) else { continue };
            let thread = task.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
            let mut set = CpuSet::new();
            set.set(self.cpus[self.cpus.len() - 1 - vcpu % self.cpus.len()]);
            if thread.is_some_and(|thread| sched_setaffinity(Some(thread), &set).is_ok()) {
                self.placed.insert(vcpu);
            }
        }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let Some(before) = self.affinity.as_deref().map(str::trim) else { return };
        if let Err(error) = fs::write(DEFAULT_AFFINITY, before) {
            eprintln!("cannot reset {DEFAULT_AFFINITY} to {before}: {error}");
        }
    }
}

/// Returns the number of a thread's vCPU, which is part of the thread's name. Returns `None` for other threads.
fn vcpu_of(task: &Path) -> Option<usize> {
    parse_name(fs::read_to_string(task.join("comm")).ok()?.trim_end())
}

/// Parses a thread's name: `vcpu0` in Carom and Cloud Hypervisor, `CPU 0/KVM` in QEMU.
fn parse_name(name: &str) -> Option<usize> {
    let number = name.strip_prefix("vcpu").or_else(|| name.strip_prefix("CPU ")?.strip_suffix("/KVM"))?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use rustix::thread::gettid;

    use super::*;

    #[test]
    fn thread_of_a_vcpu_gets_the_last_cpu_and_another_thread_stays() {
        let mut apart = Apart::new(false).unwrap();
        let ids = ["vcpu0", "api"].map(|name| {
            let (sender, receiver) = mpsc::channel();
            let (end, ended) = mpsc::channel::<()>();
            let thread = thread::Builder::new().name(name.into()).spawn(move || {
                sender.send(gettid()).unwrap();
                let _ = ended.recv();
            });
            (receiver.recv().unwrap(), end, thread.unwrap())
        });
        let before = sched_getaffinity(Some(ids[1].0)).unwrap();

        apart.place(std::process::id());

        let placed = sched_getaffinity(Some(ids[0].0)).unwrap();
        assert!(placed.count() == 1 && placed.is_set(*apart.cpus.last().unwrap()), "{placed:?}");
        assert_eq!(sched_getaffinity(Some(ids[1].0)).unwrap(), before);
        for (_, end, thread) in ids {
            drop(end);
            thread.join().unwrap();
        }
    }

    #[test]
    fn vcpu_threads_are_known_by_their_names_in_each_vmm() {
        assert_eq!(parse_name("vcpu0"), Some(0));
        assert_eq!(parse_name("CPU 12/KVM"), Some(12));
        for other in ["carom", "vcpu", "CPU 0/TCG", "CPU x/KVM", "api"] {
            assert_eq!(parse_name(other), None, "{other}");
        }
    }
}
