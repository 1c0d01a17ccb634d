// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/guest-series`: writes the guest patch as one series of mails. Makes the mails in a temporary repository of the files that the
//! patch changes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::files::{copy, read, write};
use crate::kernel::{GuestKernel, patches_of};
use crate::key::files_below;
use crate::mails::{Step, brought, changed_files, earlier_forms, sources, starts_one_of, steps};
use crate::tools::{Tools, Usage};

/// Options of `scripts/guest-series`.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Kernel series.
    #[arg(long, value_name = "N", default_value = "6.12")]
    pub(crate) series: String,
    /// Also apply the series to Debian's source.
    #[arg(long)]
    pub(crate) check: bool,
    /// Directory for the mails.
    pub(crate) directory: PathBuf,
}

/// Placeholders that `git format-patch` puts into a cover letter.
const SUBJECT: &str = "*** SUBJECT HERE ***";
const BLURB: &str = "*** BLURB HERE ***";

const NAME: &str = "Carom maintainers";
const MAIL: &str = "maintainers@carom.invalid";
const DATE: &str = "2026-11-21T12:00:00Z";

/// Temporary repository for making the series.
struct Repository<'a> {
    tools: &'a Tools<'a>,
    directory: PathBuf,
    /// Debian's source.
    pristine: PathBuf,
    source: PathBuf,
    patches: PathBuf,
    steps: Vec<Step>,
}

impl Tools<'_> {
    /// Writes the series of mails.
    ///
    /// # Errors
    /// Fails if the series cannot be made or does not apply, if the directory exists, or on a signal.
    pub fn guest_series(&self, options: &Options) -> Result<()> {
        let target = &options.directory;
        if target.exists() {
            bail!(Usage(format!("'{}' exists already: name a new directory", target.display())));
        }
        let patches = patches_of(&self.checkout, &options.series)?;
        self.need_command("git", "git", "making patches")?;
        let series = Some(options.series.clone());
        let pristine = self.kernel_source(&GuestKernel { series, stock: true, ..GuestKernel::default() })?;
        let tmp = tempfile::tempdir().context("cannot create a temporary directory for the repository")?;
        let repository = Repository {
            tools: self,
            directory: tmp.path().join("repo"),
            pristine,
            source: self.checkout.join("guest/src"),
            steps: steps(&patches)?,
            patches,
        };
        let out = tmp.path().join("out");
        let count = repository.make(&out, &self.checkout.join("guest/patches"))?;
        if options.check {
            repository.check(&out, &options.series)?;
        }
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
        }
        self.run(Command::new("cp").arg("-r").arg(&out).arg(target))?;
        self.progress.say(&format!("{count} patches and a cover letter are in {}", target.display()));
        Ok(())
    }
}

impl Repository<'_> {
    /// Writes the mails to `out` and returns the number of patches. `texts` is the directory that contains the cover letter and the list of
    /// files.
    fn make(&self, out: &Path, texts: &Path) -> Result<usize> {
        self.base()?;
        let listed = read(&texts.join("files"))?;
        for file in self.sources()? {
            let is_listed = listed.lines().filter_map(brought).any(|(_, starts)| starts_one_of(&starts, &file));
            ensure!(is_listed, "{} of guest/src belongs to no patch: add it to guest/patches/files", file.display());
        }
        let forms = out.with_extension("forms");
        earlier_forms(self.tools, &self.source, &self.steps, &forms)?;
        for step in &self.steps {
            self.tools.run(self.git().args(["am", "-q", "--empty=keep"]).arg(self.patches.join(&step.patch)))?;
            for file in self.sources()? {
                let target = self.directory.join(&file);
                if step.brings(&file) && !target.exists() {
                    copy(&forms.join(&file), &target)?;
                }
            }
            for later in &step.later {
                self.tools.patch(&self.directory, later)?;
            }
            self.commit(&["-q", "--amend", "--no-edit"])?;
        }
        self.compare("the mails")?;
        let root = self.tools.output(self.git().args(["rev-list", "--max-parents=0", "HEAD"]))?;
        let mut format = self.git();
        format
            .args(["format-patch", "-q", "--zero-commit", "--signature=", "--cover-letter", "-o"])
            .arg(out)
            .arg(root.trim());
        self.tools.run(&mut format)?;
        let mut names = Vec::new();
        for (file, _) in files_below(out)? {
            let name = file.to_string_lossy().into_owned();
            if name.ends_with(".patch") && !name.starts_with("0000-") {
                names.push(name);
            }
        }
        names.sort();
        write(&out.join("series"), &names.iter().map(|name| format!("{name}\n")).collect::<String>())?;
        let cover = out.join("0000-cover-letter.patch");
        write(&cover, &with_text(&read(&cover)?, &read(&texts.join("cover-letter.txt"))?))?;
        Ok(names.len())
    }

    /// Commits the mainline files that the series changes, in their original form.
    fn base(&self) -> Result<()> {
        let mut files = BTreeSet::new();
        for step in &self.steps {
            files.extend(changed_files(&read(&self.patches.join(&step.patch))?).map(String::from));
        }
        self.tools.run(Command::new("git").args(["init", "-q"]).arg(&self.directory))?;
        for file in files {
            copy(&self.pristine.join(&file), &self.directory.join(&file))?;
        }
        self.commit(&["-qm", "base"])
    }

    /// Compares the repository with `guest/src`. A file that a mail adds must be identical to the file in `guest/src`. A file of
    /// `guest/src` that no mail adds must be missing from the repository.
    fn compare(&self, by: &str) -> Result<()> {
        for file in self.sources()? {
            let made = fs::read(self.directory.join(&file)).ok();
            let is_brought = self.steps.iter().any(|step| step.brings(&file));
            let wanted = if is_brought { fs::read(self.source.join(&file)).ok() } else { None };
            ensure!(made == wanted, "{} as made by {by} differs from guest/src", file.display());
        }
        Ok(())
    }

    /// Applies the series to Debian's source, by git and by quilt, and compares the results with `guest/src`.
    fn check(&self, out: &Path, series: &str) -> Result<()> {
        self.tools.need_packages("checking that the series applies", &["quilt"])?;
        let mails = read(&out.join("series"))?;
        for tool in ["git", "quilt"] {
            fs::remove_dir_all(&self.directory).context("cannot remove the repository")?;
            self.base()?;
            if tool == "git" {
                self.tools.run(self.git().args(["am", "-q"]).args(mails.lines().map(|name| out.join(name))))?;
            } else {
                let mut quilt = Command::new("quilt");
                quilt.args(["push", "-aq"]).current_dir(&self.directory).env("QUILT_PATCHES", out);
                self.tools.run_quietly(&mut quilt, &out.with_extension("log"))?;
            }
            self.compare(tool)?;
            self.tools.progress.say(&format!("the series for {series} applies by {tool}"));
        }
        Ok(())
    }

    fn sources(&self) -> Result<Vec<PathBuf>> {
        sources(&self.source)
    }

    fn commit(&self, arguments: &[&str]) -> Result<()> {
        self.tools.run(self.git().args(["add", "-A"]))?;
        self.tools.run(self.git().arg("commit").args(arguments))
    }

    /// Returns a git command that makes identical commits for every user.
    fn git(&self) -> Command {
        let mut git = Command::new("git");
        git.arg("-C").arg(&self.directory);
        git.envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_SYSTEM", "/dev/null")]);
        for who in ["AUTHOR", "COMMITTER"] {
            git.env(format!("GIT_{who}_NAME"), NAME);
            git.env(format!("GIT_{who}_EMAIL"), MAIL);
            git.env(format!("GIT_{who}_DATE"), DATE);
        }
        git
    }
}

/// Inserts a text into a cover letter. The text's first line is the subject.
fn with_text(cover: &str, text: &str) -> String {
    let (subject, rest) = text.split_once('\n').unwrap_or((text, ""));
    let blurb = rest.strip_prefix('\n').unwrap_or(rest);
    cover.replace(SUBJECT, subject).replace(&format!("{BLURB}\n"), blurb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cover_letter_has_subject_and_text() {
        let cover = "Subject: [PATCH 0/2] *** SUBJECT HERE ***\n\n*** BLURB HERE ***\n\nCarom (2):\n";
        let expected = "Subject: [PATCH 0/2] Bounce\n\nText\nof two lines\n\nCarom (2):\n";
        assert_eq!(with_text(cover, "Bounce\n\nText\nof two lines\n"), expected);
    }
}
