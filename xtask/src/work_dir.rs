// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Work directory of one run. Directories of killed runs are removed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, geteuid, test_kill_process};
use tempfile::TempDir;

/// Creates a directory in `parent`, named after `name` and this process's ID. First removes such directories that ended processes of this
/// user have left.
///
/// # Errors
/// Fails if the directory cannot be created.
pub fn create(parent: &Path, name: &str) -> Result<TempDir> {
    remove_stale(parent, name);
    let prefix = format!("{name}.{}.", std::process::id());
    let made = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent);
    made.with_context(|| format!("cannot create a directory in {}", parent.display()))
}

/// Removes directories of ended processes. A directory that cannot be read or removed stays and does no harm.
fn remove_stale(parent: &Path, name: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let owned = || entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == geteuid().as_raw());
        if owner(&file.to_string_lossy(), name).is_some_and(is_gone) && owned() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn owner(file: &str, name: &str) -> Option<Pid> {
    Pid::from_raw(file.strip_prefix(name)?.strip_prefix('.')?.split_once('.')?.0.parse().ok()?)
}

fn is_gone(process: Pid) -> bool {
    test_kill_process(process) == Err(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const NAME: &str = "carom-rig";

    #[test]
    fn directories_of_killed_runs_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let stale = parent.path().join(format!("{NAME}.{}.abc", ended.id()));
        let others = [format!("{NAME}.1.abc"), format!("{NAME}.x.abc"), "other.999999.abc".into()];
        fs::create_dir_all(stale.join("inner")).unwrap();
        for other in &others {
            fs::create_dir(parent.path().join(other)).unwrap();
        }
        let first = create(parent.path(), NAME).unwrap();

        let second = create(parent.path(), NAME).unwrap();

        assert!(!stale.exists());
        assert!(first.path().exists() && second.path().exists() && first.path() != second.path());
        assert!(others.iter().all(|other| parent.path().join(other).exists()));
    }
}
