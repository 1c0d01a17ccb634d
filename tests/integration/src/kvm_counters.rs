// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What KVM counts of a process' VM: exits and their reasons among it.

use std::collections::BTreeMap;
use std::fs;

/// The counters by name (`/sys/kernel/debug/kvm/PID-FD/`; Linux `arch/x86/kvm/x86.c`, `kvm_vm_stats_desc` and `kvm_vcpu_stats_desc`). Those
/// of the vCPUs are summed up. Empty where there is no such VM, or debugfs is not mounted.
pub(crate) fn read(pid: u32) -> BTreeMap<String, u64> {
    let Ok(vms) = fs::read_dir("/sys/kernel/debug/kvm") else { return BTreeMap::new() };
    let prefix = format!("{pid}-");
    vms.flatten()
        .filter(|vm| vm.file_name().to_string_lossy().starts_with(&prefix))
        .flat_map(|vm| fs::read_dir(vm.path()).into_iter().flatten().flatten())
        .filter_map(|file| {
            let value = fs::read_to_string(file.path()).ok()?.trim().parse().ok()?;
            Some((file.file_name().to_string_lossy().into_owned(), value))
        })
        .collect()
}
