// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Cache entries: directories that are either complete or absent.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::tools::Tools;

/// Interval between attempts to take a lock that another process holds.
const PAUSE: Duration = Duration::from_millis(100);

impl Tools<'_> {
    /// Returns the cache directory `kind`/`key`. If the entry does not exist, `build` fills a temporary directory, which is then renamed.
    /// Meanwhile, other processes that need this entry wait.
    pub(crate) fn cached(&self, kind: &str, key: &str, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let parent = self.cache.join(kind);
        let entry = parent.join(key);
        if entry.is_dir() {
            return Ok(entry);
        }
        fs::create_dir_all(&parent).with_context(|| format!("cannot create {}", parent.display()))?;
        let _lock = self.lock(&parent.join(format!(".lock-{key}")), &format!("waiting for another build of {kind}"))?;
        if entry.is_dir() {
            return Ok(entry);
        }
        let prefix = format!(".tmp-{key}.");
        remove_left_over(&parent, &prefix)?;
        let made = tempfile::Builder::new().prefix(&prefix).tempdir_in(&parent);
        let made = made.with_context(|| format!("cannot create a directory in {}", parent.display()))?;
        let failed = || format!("cannot make {kind}/{key} in the cache");
        fs::set_permissions(made.path(), Permissions::from_mode(0o755)).with_context(failed)?;
        build(made.path()).with_context(failed)?;
        fs::rename(made.path(), &entry).with_context(failed)?;
        Ok(entry)
    }

    /// Locks a file until the returned value is dropped. Creates the file if it is missing. Shows `waiting` while another process
    /// holds the lock.
    pub(crate) fn lock(&self, path: &Path, waiting: &str) -> Result<File> {
        let file = File::options().create(true).truncate(false).write(true).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(error).with_context(|| format!("cannot lock {}", path.display())),
            }
            self.go_on()?;
            self.progress.show(waiting);
            thread::sleep(PAUSE);
        }
    }
}

/// Removes the temporary directories of killed builds.
fn remove_left_over(parent: &Path, prefix: &str) -> Result<()> {
    for entry in fs::read_dir(parent).with_context(|| format!("cannot read {}", parent.display()))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            fs::remove_dir_all(entry.path()).with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;
    use crate::tools::with_tools;

    fn cached(cache: &Path, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        with_tools(cache, cache, |tools| tools.cached("kind", "key", build))
    }

    #[test]
    fn cache_entry_is_built_once_and_absent_after_failure() {
        let dir = tempfile::tempdir().unwrap();
        let left_over = dir.path().join("kind/.tmp-key.abc/inner");
        fs::create_dir_all(&left_over).unwrap();

        let failed = cached(dir.path(), |made| {
            fs::write(made.join("half"), "")?;
            bail!("no")
        });
        assert!(failed.is_err() && !dir.path().join("kind/key").exists() && !left_over.exists());

        let write = |text: &'static str| move |made: &Path| Ok(fs::write(made.join("file"), text)?);
        let first = cached(dir.path(), write("first")).unwrap();
        let second = cached(dir.path(), write("second")).unwrap();
        assert_eq!(first, second);
        assert_eq!(fs::read_to_string(first.join("file")).unwrap(), "first");
        assert_eq!(fs::read_dir(dir.path().join("kind")).unwrap().count(), 2, "the entry and its lock");
    }
}
