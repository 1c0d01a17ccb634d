// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Downloads and unpacks Debian packages, but does not install the packages. apt runs with separate sources and package lists, so the
//! machine's apt configuration stays unchanged. apt checks the signatures of the package lists.

mod fetch;
mod sources;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use rustix::process::geteuid;

pub(crate) use self::fetch::only_file;
use crate::packages::program;
use crate::tools::Tools;

/// Debian suite of the packages. The suite is fixed, so that all machines get the same kernels.
pub(crate) const SUITE: &str = "bookworm";

/// Backports suite of [`SUITE`].
const BACKPORTS: &str = "bookworm-backports";

/// Debian's unstable suite, which is never released.
const UNSTABLE: &str = "sid";

/// Keyring with the keys of Debian's archive.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Maximum age of package lists.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// First line of the generated sources.list. Change this line whenever this program generates other sources. Otherwise, a cache keeps the
/// package lists of the old sources for up to a day.
const STAMP: &str = "# carom sources 3";

/// Set of package lists. Each set has its own sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lists {
    /// Lists of [`SUITE`], its backports and the backports of the next release.
    Stable,
    /// Lists of the unstable suite, for packages that no other suite has. Such packages are unpacked, never installed.
    Unstable,
}

impl Tools<'_> {
    fn apt_dir(&self, lists: Lists) -> PathBuf {
        self.cache.join(match lists {
            Lists::Stable => "apt",
            Lists::Unstable => "apt-unstable",
        })
    }

    /// Returns a command that runs `apt-get` or `apt-cache` with the sources and package lists of `lists`.
    fn apt(&self, lists: Lists, tool: &str) -> Command {
        let dir = self.apt_dir(lists);
        let mut command = Command::new(tool);
        for (option, value) in [
            ("Dir::Etc::sourcelist", dir.join("sources.list")),
            ("Dir::Etc::sourceparts", "/dev/null".into()),
            ("Dir::Etc::preferences", "/dev/null".into()),
            ("Dir::Etc::preferencesparts", "/dev/null".into()),
            ("Dir::State::lists", dir.join("lists")),
            ("Dir::Cache", dir.join("cache")),
            ("Acquire::Languages", "none".into()),
        ] {
            command.arg("-o").arg(format!("{option}={}", value.display()));
        }
        if geteuid().is_root() {
            // By default, apt fetches as an unprivileged user, who cannot enter a cache below root's home.
            command.args(["-o", "APT::Sandbox::User=root"]);
        }
        command
    }

    /// Refreshes the package lists if `force` is set, if the lists are older than a day, or if the machine's sources or the generated
    /// sources changed.
    fn refresh_lists(&self, lists: Lists, force: bool) -> Result<()> {
        ensure!(program("apt-get").is_some(), "apt-get not found: fetching packages needs a Debian system");
        let _lock = self.lock(&self.cache.join(".lock-apt"), "waiting for another reader of Debian's package lists")?;
        let dir = self.apt_dir(lists);
        for needed in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(needed)).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        if !Path::new(KEYRING).exists() {
            self.need_packages("keys of Debian's archive", &["debian-archive-keyring"])?;
        }
        if !force && is_fresh(&dir, Path::new("/etc/apt/sources.list.d")) {
            return Ok(());
        }
        let (list, new) = (dir.join("sources.list"), dir.join("sources.list.new"));
        fs::write(&new, format!("{STAMP}\n{}", self.apt_sources(lists)?))
            .and_then(|()| fs::rename(&new, &list))
            .with_context(|| format!("cannot write {}", list.display()))?;
        self.progress.show("reading Debian's package lists");
        let updated = dir.join("updated");
        let log = dir.join("update.log");
        if self.succeeds(self.apt(lists, "apt-get").args(["update", "-qq"])) {
            File::create(&updated).with_context(|| format!("cannot write {}", updated.display()))?;
        } else if updated.exists() {
            self.go_on()?;
            self.progress.say("cannot refresh Debian's package lists; continuing with the older lists");
        } else {
            self.run_quietly(self.apt(lists, "apt-get").args(["update", "-qq"]), &log)
                .context("cannot read Debian's package lists")?;
            File::create(&updated).with_context(|| format!("cannot write {}", updated.display()))?;
        }
        Ok(())
    }

    /// Returns the answer of `ask`, which queries the package lists. Keeps the answer in a file until the lists change, because starting
    /// apt takes seconds.
    fn answer(&self, lists: Lists, name: &str, ask: impl FnOnce() -> Result<String>) -> Result<String> {
        self.refresh_lists(lists, false)?;
        let dir = self.apt_dir(lists);
        let file = dir.join(format!("answer-{}", plain(name, "+.-")));
        if is_newer(&file, &dir.join("updated")) {
            let known = fs::read_to_string(&file).unwrap_or_default();
            if !known.trim().is_empty() {
                return Ok(known.trim().into());
            }
        }
        let answer = ask()?;
        let new = dir.join(format!(".answer-{}", std::process::id()));
        fs::write(&new, format!("{answer}\n"))
            .and_then(|()| fs::rename(&new, &file))
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(answer)
    }
}

/// Returns `text` with `_` for each character that is not a letter, a digit or one of `others`.
fn plain(text: &str, others: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || others.contains(c) { c } else { '_' }).collect()
}

/// True if the lists in `dir` were made from the current generated sources, are less than a day old, and are newer than the machine's
/// sources in `theirs`.
fn is_fresh(dir: &Path, theirs: &Path) -> bool {
    let is_of_today = modified(&dir.join("updated")).and_then(|time| time.elapsed().ok()).is_some_and(|age| age < DAY);
    let list = fs::read_to_string(dir.join("sources.list")).unwrap_or_default();
    is_of_today && list.lines().next() == Some(STAMP) && is_newer(&dir.join("sources.list"), theirs)
}

/// True if `file` exists, and `other` is older or missing.
fn is_newer(file: &Path, other: &Path) -> bool {
    modified(file).is_some_and(|time| modified(other).is_none_or(|other| time > other))
}

fn modified(file: &Path) -> Option<SystemTime> {
    fs::metadata(file).and_then(|meta| meta.modified()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_anew_when_they_are_old_or_sources_changed() {
        let dir = tempfile::tempdir().unwrap();
        let (list, updated, theirs) =
            (dir.path().join("sources.list"), dir.path().join("updated"), dir.path().join("theirs"));
        let set = |file: &Path, age: u64| {
            let time = SystemTime::now() - Duration::from_secs(age);
            File::options().append(true).create(true).open(file).unwrap().set_modified(time).unwrap();
        };
        fs::write(&list, format!("{STAMP}\ndeb …\n")).unwrap();
        assert!(!is_fresh(dir.path(), &theirs), "never updated");
        set(&updated, 60);
        assert!(is_fresh(dir.path(), &theirs));
        set(&theirs, 0);
        set(&list, 60);
        assert!(!is_fresh(dir.path(), &theirs), "the machine's sources are newer");
        set(&theirs, 120);
        assert!(is_fresh(dir.path(), &theirs));
        set(&updated, 25 * 60 * 60);
        assert!(!is_fresh(dir.path(), &theirs), "a day has passed");
        set(&updated, 60);
        fs::write(&list, "# another version\n").unwrap();
        assert!(!is_fresh(dir.path(), &theirs), "another version wrote the sources");
    }

    #[test]
    fn names_of_files_are_plain() {
        assert_eq!(plain("1:10.0.3+ds-0~bpo", "+.~-"), "1_10.0.3+ds-0~bpo");
        assert_eq!(plain("a ^b/c", "+.-"), "a__b_c");
    }
}
