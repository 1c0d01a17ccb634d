// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian packages that are unpacked and never installed, by apt with sources and lists of our own; the machine's stay as they
//! are. apt checks signatures.

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

/// The suite that packages come from: fixed, so that all machines get the same kernels.
pub(crate) const SUITE: &str = "bookworm";

/// Its backports.
const BACKPORTS: &str = "bookworm-backports";

/// The suite that is never released.
const UNSTABLE: &str = "sid";

/// Keys of Debian's archive.
pub(crate) const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// How old lists may be.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// First line of our sources. A change of them needs another one here: several checkouts share a cache.
const STAMP: &str = "# carom sources 3";

/// Lists of packages, with sources of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lists {
    /// Those of [`SUITE`], its backports and what is next.
    Stable,
    /// Those of the suite that is never released: for what is nowhere else. Packages are unpacked from there, never installed.
    Unstable,
}

impl Tools<'_> {
    fn apt_dir(&self, lists: Lists) -> PathBuf {
        self.cache.join(match lists {
            Lists::Stable => "apt",
            Lists::Unstable => "apt-unstable",
        })
    }

    /// `apt-get` or `apt-cache` on our sources and lists.
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
            // The unprivileged user that apt fetches as cannot enter a cache below root's home.
            command.args(["-o", "APT::Sandbox::User=root"]);
        }
        command
    }

    /// Brings the lists up to date: at most once a day, when the machine's sources or ours changed, or with `force`.
    fn refresh_lists(&self, lists: Lists, force: bool) -> Result<()> {
        ensure!(program("apt-get").is_some(), "this is no Debian system: apt-get is needed to fetch packages");
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
            self.progress.say("could not refresh Debian's package lists; going on with older ones");
        } else {
            self.run_quietly(self.apt(lists, "apt-get").args(["update", "-qq"]), &log)
                .context("could not read Debian's package lists")?;
            File::create(&updated).with_context(|| format!("cannot write {}", updated.display()))?;
        }
        Ok(())
    }

    /// What `ask` finds in the lists, from a file while these have not changed since, as starting apt takes seconds.
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

/// `text` with `_` for each character that is no letter, digit or one of `others`.
fn plain(text: &str, others: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || others.contains(c) { c } else { '_' }).collect()
}

/// Whether the lists in `dir` are of our sources, of this day, and newer than `theirs`, the machine's sources.
fn is_fresh(dir: &Path, theirs: &Path) -> bool {
    let is_of_today = modified(&dir.join("updated")).and_then(|time| time.elapsed().ok()).is_some_and(|age| age < DAY);
    let list = fs::read_to_string(dir.join("sources.list")).unwrap_or_default();
    is_of_today && list.lines().next() == Some(STAMP) && is_newer(&dir.join("sources.list"), theirs)
}

/// Whether `file` exists and is newer than `other`, or that one does not exist.
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
