// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Directory of one run, and the removal of those that killed runs left behind.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::process::{Pid, geteuid, test_kill_process};
use tempfile::TempDir;

/// The number of the process that a directory belongs to follows, then a dot.
const PREFIX: &str = "carom-rig.";

/// Makes a directory of this process in `parent`, after removing those of this user's processes that are gone.
pub(super) fn create(parent: &Path) -> Result<TempDir> {
    remove_stale(parent);
    let prefix = format!("{PREFIX}{}.", std::process::id());
    let made = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent);
    made.with_context(|| format!("making a directory in {}", parent.display()))
}

/// What cannot be read or removed stays: it does no harm here.
fn remove_stale(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owned = || entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == geteuid().as_raw());
        if owner(&name.to_string_lossy()).is_some_and(is_gone) && owned() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn owner(name: &str) -> Option<Pid> {
    Pid::from_raw(name.strip_prefix(PREFIX)?.split_once('.')?.0.parse().ok()?)
}

fn is_gone(process: Pid) -> bool {
    test_kill_process(process) == Err(Errno::SRCH)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn directories_of_killed_runs_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let stale = parent.path().join(format!("{PREFIX}{}.abc", ended.id()));
        let others = [format!("{PREFIX}1.abc"), format!("{PREFIX}x.abc"), "other.999999.abc".into()];
        fs::create_dir_all(stale.join("inner")).unwrap();
        for other in &others {
            fs::create_dir(parent.path().join(other)).unwrap();
        }
        let first = create(parent.path()).unwrap();

        let second = create(parent.path()).unwrap();

        assert!(!stale.exists());
        assert!(first.path().exists() && second.path().exists() && first.path() != second.path());
        assert!(others.iter().all(|other| parent.path().join(other).exists()));
    }
}
