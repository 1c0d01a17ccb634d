// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM's counters for a process's VM, such as exits and their reasons.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Returns the counters by name (Linux `arch/x86/kvm/x86.c`, `kvm_vm_stats_desc` and `kvm_vcpu_stats_desc`), each summed over all
/// vCPUs. Returns no counters if the process has no VM, or if debugfs is not mounted.
pub(crate) fn read(pid: u32) -> BTreeMap<String, u64> {
    read_below(Path::new("/sys/kernel/debug/kvm"), &Path::new("/proc").join(pid.to_string()).join("task"))
}

/// Reads the counters from `vms`, which contains a directory `TID-FD` for each VM. TID is the thread that created the VM. VMs
/// whose TID is not in `threads` are ignored.
fn read_below(vms: &Path, threads: &Path) -> BTreeMap<String, u64> {
    let is_of_a_thread = |name: &str| name.split_once('-').is_some_and(|(number, _)| threads.join(number).is_dir());
    let Ok(vms) = fs::read_dir(vms) else { return BTreeMap::new() };
    vms.flatten()
        .filter(|vm| is_of_a_thread(&vm.file_name().to_string_lossy()))
        .flat_map(|vm| fs::read_dir(vm.path()).into_iter().flatten().flatten())
        .filter_map(|file| {
            let value = fs::read_to_string(file.path()).ok()?.trim().parse().ok()?;
            Some((file.file_name().to_string_lossy().into_owned(), value))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_vms_created_by_any_thread_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let (vms, threads) = (dir.path().join("kvm"), dir.path().join("task"));
        for thread in ["100", "104"] {
            fs::create_dir_all(threads.join(thread)).unwrap();
        }
        for (vm, exits) in [("104-12", "7\n"), ("10-12", "8\n"), ("200-9", "9\n")] {
            fs::create_dir_all(vms.join(vm).join("vcpu0")).unwrap();
            fs::write(vms.join(vm).join("exits"), exits).unwrap();
        }
        assert_eq!(read_below(&vms, &threads), [("exits".into(), 7)].into());
        assert_eq!(read_below(&dir.path().join("none"), &threads), BTreeMap::new());
    }
}
