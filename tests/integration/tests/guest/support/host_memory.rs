// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a host does with the memory of a VMM: it limits it, swaps it and keeps equal pages once.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A block device to which the host swaps as long as this value lives.
pub(crate) struct Swap(PathBuf);

impl Swap {
    pub(crate) fn on(device: &Path) -> Self {
        succeed(Command::new("mkswap").arg(device));
        succeed(Command::new("swapon").arg(device));
        Self(device.into())
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        succeed(Command::new("swapoff").arg(&self.0));
    }
}

fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A control group of processes whose memory is counted, and limited on request (Linux Documentation/admin-guide/cgroup-v2.rst). The
/// processes have to be gone before this value is.
pub(crate) struct MemoryGroup {
    dir: PathBuf,
    /// Where the file system of groups was mounted, if it was not before.
    mounted: Option<TempDir>,
}

impl MemoryGroup {
    pub(crate) fn new(name: &str) -> Self {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let known = mounts.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [_, place, "cgroup2", ..] => Some(PathBuf::from(place)),
            _ => None,
        });
        let mounted = known.is_none().then(|| tempfile::tempdir().unwrap());
        if let Some(place) = &mounted {
            succeed(Command::new("mount").args(["-t", "cgroup2", "none"]).arg(place.path()));
        }
        let root = known.or_else(|| Some(mounted.as_ref()?.path().into())).unwrap();
        fs::write(root.join("cgroup.subtree_control"), "+memory").unwrap();
        let dir = root.join(name);
        fs::create_dir(&dir).unwrap();
        Self { dir, mounted }
    }

    /// Adds a process. What it has of memory already stays with the group it comes from.
    pub(crate) fn add(&self, pid: u32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Limits the memory of all its processes, in bytes. What they have above is taken from them now.
    pub(crate) fn limit(&self, bytes: u64) {
        fs::write(self.dir.join("memory.max"), bytes.to_string()).unwrap();
    }

    /// Bytes of memory of its processes that no file has, and that of memfds.
    pub(crate) fn without_a_file(&self) -> u64 {
        let stat = self.read("memory.stat");
        ["anon ", "shmem "].iter().map(|key| number_after(&stat, key)).sum()
    }

    /// Bytes of its processes that are on swap devices.
    pub(crate) fn swapped(&self) -> u64 {
        self.read("memory.swap.current").trim().parse().unwrap()
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.dir.join(file)).unwrap()
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // A process that has ended leaves its group a moment later.
        let start = Instant::now();
        while let Err(error) = fs::remove_dir(&self.dir) {
            if start.elapsed() > Duration::from_secs(10) {
                eprintln!("{} cannot be removed: {error}", self.dir.display());
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        if let Some(place) = &self.mounted {
            succeed(Command::new("umount").arg(place.path()));
        }
    }
}

/// Pages that the whole host has read back from swap devices, since it started (`pswpin` of proc_vmstat(5)).
pub(crate) fn pages_swapped_in() -> u64 {
    number_after(&fs::read_to_string("/proc/vmstat").unwrap(), "pswpin ")
}

/// Where the kernel has the switches of its merging of equal pages (Linux Documentation/admin-guide/mm/ksm.rst).
const MERGING: &str = "/sys/kernel/mm/ksm";

/// The host merges equal pages of those who agree, as long as this value lives. They stay merged afterwards.
pub(crate) struct Merging(Vec<(&'static str, String)>);

impl Merging {
    /// At a rate at which all pages of a small guest are looked at within seconds.
    pub(crate) fn on() -> Self {
        let wanted = [("pages_to_scan", "1000"), ("sleep_millisecs", "20"), ("run", "1")];
        let before = wanted.map(|(name, _)| (name, fs::read_to_string(Path::new(MERGING).join(name)).unwrap()));
        for (name, value) in wanted {
            fs::write(Path::new(MERGING).join(name), value).unwrap();
        }
        Self(before.into())
    }

    /// The host merges no more, and what it has merged stays so: from now on the saved pages only get fewer.
    pub(crate) fn pause(&self) {
        fs::write(Path::new(MERGING).join("run"), "0").unwrap();
    }

    /// Pages of the whole host that are saved now, as others are the same (`pages_sharing`).
    pub(crate) fn pages_saved(&self) -> u64 {
        fs::read_to_string(Path::new(MERGING).join("pages_sharing")).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Merging {
    fn drop(&mut self) {
        for (name, value) in &self.0 {
            fs::write(Path::new(MERGING).join(name), value).unwrap();
        }
    }
}

/// The number behind the first line's `key`.
fn number_after(text: &str, key: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_else(|| panic!("no {key}in {text}"));
    value.trim().parse().unwrap()
}
