// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a host does with the memory of VMMs: it limits it, and swaps it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

/// A block device to which the host swaps as long as this value lives.
#[derive(Debug)]
pub struct Swap(PathBuf);

impl Swap {
    /// Has it swap. What is on the device is lost.
    ///
    /// # Errors
    /// When the host does not take the device.
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

/// Runs a command that must end well.
fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A control group of processes whose memory is counted, and limited on request (Linux Documentation/admin-guide/cgroup-v2.rst). The
/// processes have to be gone before this value is.
#[derive(Debug)]
pub struct MemoryGroup {
    dir: PathBuf,
    /// Where the file system of groups was mounted, if it was not before.
    mounted: Option<TempDir>,
}

impl MemoryGroup {
    /// A group of this name that has no processes yet.
    ///
    /// # Errors
    /// When the host has no such groups, or has one of the name.
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

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Adds a process. What it has of memory already stays with the group it comes from.
    ///
    /// # Errors
    /// When there is no such process.
    pub fn add(&self, pid: u32) -> Result<()> {
        write(&self.dir.join("cgroup.procs"), &pid.to_string())
    }

    /// Limits the memory of all its processes, in bytes. What they have above is taken from them now.
    ///
    /// # Errors
    /// When the host does not take the limit.
    pub fn limit(&self, bytes: u64) -> Result<()> {
        write(&self.dir.join("memory.max"), &bytes.to_string())
    }

    /// Bytes of memory of its processes that no file has, and that of memfds.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn without_a_file(&self) -> Result<u64> {
        let stat = self.read("memory.stat")?;
        Ok(number_after(&stat, "anon ")? + number_after(&stat, "shmem ")?)
    }

    /// Bytes of its processes that are on swap devices.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn swapped(&self) -> Result<u64> {
        self.read("memory.swap.current")?.trim().parse().context("memory.swap.current")
    }

    /// How many of its processes the kernel has killed because there was no memory within the limit.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn killed(&self) -> Result<u64> {
        number_after(&self.read("memory.events")?, "oom_kill ")
    }

    /// How often its processes were about to go beyond the limit, and memory was taken from them first.
    ///
    /// # Errors
    /// When it cannot be read.
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
        // A process that has ended leaves its group a moment later.
        let start = Instant::now();
        while let Err(error) = fs::remove_dir(&self.dir) {
            if start.elapsed() > Duration::from_secs(60) {
                eprintln!("{} cannot be removed: {error}", self.dir.display());
                break;
            }
            thread::sleep(Duration::from_millis(50));
        }
        if let Some(Err(error)) = self.mounted.as_ref().map(|place| succeed(Command::new("umount").arg(place.path()))) {
            eprintln!("control groups stay mounted: {error:#}");
        }
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {text} to {}", file.display()))
}

/// Pages that the whole host has read back from swap devices, since it started (`pswpin` of proc_vmstat(5)).
///
/// # Errors
/// When it cannot be read.
pub fn pages_swapped_in() -> Result<u64> {
    number_after(&fs::read_to_string("/proc/vmstat").context("cannot read /proc/vmstat")?, "pswpin ")
}

/// What the whole host's kernel keeps for devices' DMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaMemory {
    /// References to pages that are pinned (`nr_foll_pin_acquired` less `nr_foll_pin_released` of `/proc/vmstat`).
    pub pins: u64,
    /// Pages with tables of IOMMUs (`nr_iommu_pages`, Linux 6.11); none where the kernel does not count them.
    pub table_pages: Option<u64>,
}

impl DmaMemory {
    /// What there is now.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn now() -> Result<Self> {
        // Each CPU counts for itself for a while.
        let _ = fs::read("/proc/sys/vm/stat_refresh");
        let text = fs::read_to_string("/proc/vmstat").context("cannot read /proc/vmstat")?;
        let acquired = number_after(&text, "nr_foll_pin_acquired ")?;
        let pins = acquired.saturating_sub(number_after(&text, "nr_foll_pin_released ")?);
        Ok(Self { pins, table_pages: number_after(&text, "nr_iommu_pages ").ok() })
    }

    /// Waits until there is no more than this was. The kernel gives tables back a moment later.
    ///
    /// # Errors
    /// When there is more still after a minute.
    pub fn wait_until_back(self) -> Result<()> {
        let start = Instant::now();
        loop {
            let now = Self::now()?;
            if now.pins <= self.pins && now.table_pages <= self.table_pages {
                return Ok(());
            }
            ensure!(start.elapsed() < Duration::from_secs(60), "there were {self:?}, and now there are {now:?}");
            thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The number behind the first line's `key`.
fn number_after(text: &str, key: &str) -> Result<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)).with_context(|| format!("no {key}in {text}"))?;
    value.trim().parse().with_context(|| format!("{key}{value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_that_of_the_line_which_begins_with_the_key() {
        let text = "low 1\noom 2\noom_kill 3\noom_group_kill 4\n";
        assert_eq!(number_after(text, "oom_kill ").unwrap(), 3);
        assert!(number_after(text, "high ").is_err() && number_after("oom_kill x", "oom_kill ").is_err());
    }
}
