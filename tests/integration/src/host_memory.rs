// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of the host: swap devices, memory limits of VMMs, and memory for DMA.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

/// Block device that the host uses as swap as long as this value lives.
#[derive(Debug)]
pub struct Swap(PathBuf);

impl Swap {
    /// Enables swap on a device. All data on the device is lost.
    ///
    /// # Errors
    /// Fails if the host rejects the device.
    pub fn on(device: &Path) -> Result<Self> {
        succeed(Command::new("mkswap").arg(device))?;
        succeed(Command::new("swapon").arg(device))?;
        Ok(Self(device.into()))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Err(error) = succeed(Command::new("swapoff").arg(&self.0)) {
            eprintln!("the host still swaps to {}: {error:#}", self.0.display());
        }
    }
}

/// Runs a command and fails unless its exit status is 0.
fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Control group that counts the memory of its processes, and can limit this memory (Linux
/// Documentation/admin-guide/cgroup-v2.rst). The processes must end before this value is dropped.
#[derive(Debug)]
pub struct MemoryGroup {
    dir: PathBuf,
    /// Mount point of the cgroup file system, if this value mounted it.
    mounted: Option<TempDir>,
}

impl MemoryGroup {
    /// Creates an empty group.
    ///
    /// # Errors
    /// Fails if the host has no memory control groups, or if the group exists.
    pub fn new(name: &str) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/mounts").context("cannot read /proc/mounts")?;
        let known = mounts.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
            [_, place, "cgroup2", ..] => Some(PathBuf::from(place)),
            _ => None,
        });
        let (root, mounted) = match known {
            Some(root) => (root, None),
            None => {
                let place = tempfile::tempdir().context("cannot create a directory for control groups")?;
                succeed(Command::new("mount").args(["-t", "cgroup2", "none"]).arg(place.path()))?;
                (place.path().to_owned(), Some(place))
            }
        };
        write(&root.join("cgroup.subtree_control"), "+memory")?;
        let dir = root.join(name);
        fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Self { dir, mounted })
    }

    /// Returns the group's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Adds a process. Memory that the process has already allocated stays charged to its previous group.
    ///
    /// # Errors
    /// Fails if there is no such process.
    pub fn add(&self, pid: u32) -> Result<()> {
        write(&self.dir.join("cgroup.procs"), &pid.to_string())
    }

    /// Limits the total memory of the group's processes, in bytes. The host immediately reclaims memory above the limit.
    ///
    /// # Errors
    /// Fails if the host rejects the limit.
    pub fn limit(&self, bytes: u64) -> Result<()> {
        write(&self.dir.join("memory.max"), &bytes.to_string())
    }

    /// Returns the size of the group's memory without a file on a disk: its anonymous memory and its memfds, in bytes.
    ///
    /// # Errors
    /// Fails if the value cannot be read.
    pub fn without_a_file(&self) -> Result<u64> {
        let stat = self.read("memory.stat")?;
        Ok(number_after(&stat, "anon ")? + number_after(&stat, "shmem ")?)
    }

    /// Returns the bytes of the group's memory that are on swap devices.
    ///
    /// # Errors
    /// Fails if the value cannot be read.
    pub fn swapped(&self) -> Result<u64> {
        self.read("memory.swap.current")?.trim().parse().context("memory.swap.current is not a number")
    }

    /// Returns the number of processes that the kernel killed because the group could not stay below its limit.
    ///
    /// # Errors
    /// Fails if the value cannot be read.
    pub fn killed(&self) -> Result<u64> {
        number_after(&self.read("memory.events")?, "oom_kill ")
    }

    /// Returns how many times the group reached its limit and the host had to reclaim memory.
    ///
    /// # Errors
    /// Fails if the value cannot be read.
    pub fn limited(&self) -> Result<u64> {
        number_after(&self.read("memory.events")?, "max ")
    }

    fn read(&self, file: &str) -> Result<String> {
        let file = self.dir.join(file);
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // An ended process leaves its group only after a moment, so try repeatedly to remove the group.
        let start = Instant::now();
        while let Err(error) = fs::remove_dir(&self.dir) {
            if start.elapsed() > Duration::from_secs(60) {
                eprintln!("cannot remove {}: {error}", self.dir.display());
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        if let Some(Err(error)) = self.mounted.as_ref().map(|place| succeed(Command::new("umount").arg(place.path()))) {
            eprintln!("cannot unmount the control groups: {error:#}");
        }
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {text} to {}", file.display()))
}

/// Returns the number of pages that the host has read back from swap since its start (`pswpin` of proc_vmstat(5)).
///
/// # Errors
/// Fails if the value cannot be read.
pub fn pages_swapped_in() -> Result<u64> {
    number_after(&fs::read_to_string("/proc/vmstat").context("cannot read /proc/vmstat")?, "pswpin ")
}

/// Memory that the host's kernel keeps for DMA of devices: pinned pages and page tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMemory {
    /// Number of references to pinned pages (`nr_foll_pin_acquired` minus `nr_foll_pin_released` of `/proc/vmstat`).
    pub pins: u64,
    /// Number of pages in IOMMU page tables (`nr_iommu_pages`, since Linux 6.11). `None` if the kernel does not count them.
    pub table_pages: Option<u64>,
}

impl DmaMemory {
    /// Reads the current values.
    ///
    /// # Errors
    /// Fails if the values cannot be read.
    pub fn now() -> Result<Self> {
        // Each CPU first counts by itself. When this file is read, the kernel adds the counts of all CPUs to the sums in
        // `/proc/vmstat`.
        let _ = fs::read("/proc/sys/vm/stat_refresh");
        let text = fs::read_to_string("/proc/vmstat").context("cannot read /proc/vmstat")?;
        let acquired = number_after(&text, "nr_foll_pin_acquired ")?;
        let pins = acquired.saturating_sub(number_after(&text, "nr_foll_pin_released ")?);
        Ok(Self { pins, table_pages: number_after(&text, "nr_iommu_pages ").ok() })
    }

    /// Waits until each current value is at most the value in `self`. The wait is necessary because the kernel frees page
    /// tables only after a moment.
    ///
    /// # Errors
    /// Fails if a current value is still larger after a minute.
    pub fn wait_until_back(self) -> Result<()> {
        let start = Instant::now();
        loop {
            let now = Self::now()?;
            if now.pins <= self.pins && now.table_pages <= self.table_pages {
                return Ok(());
            }
            ensure!(
                start.elapsed() < Duration::from_secs(60),
                "the host still uses more memory for DMA than before: {self:?} before, {now:?} now"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Returns the number after `key` in the first line that begins with `key`.
fn number_after(text: &str, key: &str) -> Result<u64> {
    let value =
        text.lines().find_map(|line| line.strip_prefix(key)).with_context(|| format!("no value {key}in:\n{text}"))?;
    value.trim().parse().with_context(|| format!("not a number: {key}{value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_follows_the_key_at_the_start_of_a_line() {
        let text = "low 1\noom 2\noom_kill 3\noom_group_kill 4\n";
        assert_eq!(number_after(text, "oom_kill ").unwrap(), 3);
        assert!(number_after(text, "high ").is_err() && number_after("oom_kill x", "oom_kill ").is_err());
    }
}
