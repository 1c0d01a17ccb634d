// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/guest-series`: the guest patch as one series of mails, made in a repository of the files that it changes.
//!
//! A mail is a patch of `guest/patches/N` with the files of `guest/src` that `guest/patches/files` names for it. Those files are as
//! the last patch leaves them. What a patch changes in files of earlier ones is in `guest/patches/later`, in a diff for all series, and
//! one for those that have the files: taken away from all files first, and put back with its patch.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::commands::patch_command;
use crate::kernel::{GuestKernel, changed_files, patch_name, patches_of};
use crate::key::files_below;
use crate::tools::{Tools, Usage};

/// What is to be written.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The kernel series.
    #[arg(long, value_name = "N", default_value = "6.12")]
    pub(crate) series: String,
    /// Also apply it to Debian's source.
    #[arg(long)]
    pub(crate) check: bool,
    /// Directory for the mails.
    pub(crate) directory: PathBuf,
}

/// What `git format-patch` leaves in a cover letter.
const SUBJECT: &str = "*** SUBJECT HERE ***";
const BLURB: &str = "*** BLURB HERE ***";

const NAME: &str = "Carom maintainers";
const MAIL: &str = "maintainers@carom.invalid";
const DATE: &str = "2026-11-21T12:00:00Z";

/// The repository in which the series is made.
struct Repository<'a> {
    tools: &'a Tools<'a>,
    directory: PathBuf,
    /// Debian's source.
    pristine: PathBuf,
    source: PathBuf,
    patches: PathBuf,
    steps: Vec<Step>,
}

/// One mail.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Its patch of mainline files, which may change none.
    pub(crate) patch: String,
    /// How the paths of the files of `guest/src` start that come with it.
    starts: Vec<String>,
    /// What it changes in files that came before.
    later: Vec<PathBuf>,
}

impl Tools<'_> {
    /// Writes the series.
    ///
    /// # Errors
    /// It cannot be made or does not apply, the directory exists, or a signal came.
    pub fn guest_series(&self, options: &Options) -> Result<()> {
        let target = &options.directory;
        if target.exists() {
            bail!(Usage(format!("'{}' exists already", target.display())));
        }
        let patches = patches_of(&self.checkout, &options.series)?;
        self.need_command("git", "git", "making patches")?;
        let series = Some(options.series.clone());
        let pristine = self.kernel_source(&GuestKernel { series, stock: true, ..GuestKernel::default() })?;
        let tmp = tempfile::tempdir().context("making a directory")?;
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
            fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
        }
        self.run(Command::new("cp").arg("-r").arg(&out).arg(target))?;
        self.progress.say(&format!("{count} patches and a cover letter are in {}", target.display()));
        Ok(())
    }
}

impl Repository<'_> {
    /// Leaves the mails in `out`; returns how many patches they are. `texts` has the cover letter and the list of
    /// files.
    fn make(&self, out: &Path, texts: &Path) -> Result<usize> {
        self.base()?;
        let listed = read(&texts.join("files"))?;
        for file in self.sources()? {
            let is_listed = listed.lines().filter_map(brought).any(|(_, starts)| starts_one_of(&starts, &file));
            ensure!(is_listed, "{} of guest/src comes with no patch: see guest/patches/files", file.display());
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

    /// Begins with the mainline files that the series changes.
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

    /// Each file of `guest/src` that a mail brings is in the end as it is there, and each that none brings is missing.
    fn compare(&self, by: &str) -> Result<()> {
        for file in self.sources()? {
            let made = fs::read(self.directory.join(&file)).ok();
            let is_brought = self.steps.iter().any(|step| step.brings(&file));
            let wanted = if is_brought { fs::read(self.source.join(&file)).ok() } else { None };
            ensure!(made == wanted, "{} is not as in guest/src, made by {by}", file.display());
        }
        Ok(())
    }

    /// Applies the series to Debian's source by each tool, and compares what comes of it with our files.
    fn check(&self, out: &Path, series: &str) -> Result<()> {
        self.tools.need_packages("checking that the series applies", &["quilt"])?;
        let mails = read(&out.join("series"))?;
        for tool in ["git", "quilt"] {
            fs::remove_dir_all(&self.directory).context("removing the repository")?;
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

    /// git, which gives the same commits to everyone.
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

impl Step {
    pub(crate) fn brings_files(&self) -> bool {
        !self.starts.is_empty()
    }

    /// Whether it brings files of ours, or changes some that came before.
    pub(crate) fn changes_files(&self) -> bool {
        self.brings_files() || !self.later.is_empty()
    }

    pub(crate) fn brings(&self, file: &Path) -> bool {
        starts_one_of(&self.starts, file)
    }
}

/// Copies the files of `source`, which is `guest/src`, to `forms` as they are before the last of the mails, `steps`, change what
/// earlier ones have brought. Returns their paths.
///
/// # Errors
/// What a mail changes is not what they have.
pub(crate) fn earlier_forms(tools: &Tools<'_>, source: &Path, steps: &[Step], forms: &Path) -> Result<Vec<PathBuf>> {
    let files = sources(source)?;
    for file in &files {
        copy(&source.join(file), &forms.join(file))?;
    }
    for later in steps.iter().rev().flat_map(|step| step.later.iter().rev()) {
        tools
            .run(patch_command(forms, later).arg("-R"))
            .with_context(|| format!("{} is not what guest/src has", later.display()))?;
    }
    Ok(files)
}

fn sources(source: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = files_below(source)?.into_iter().map(|(file, _)| file).collect();
    files.sort();
    Ok(files)
}

fn starts_one_of(starts: &[String], file: &Path) -> bool {
    starts.iter().any(|start| file.to_string_lossy().starts_with(start))
}

/// The mails of the series whose patches of mainline are in `patches`.
///
/// # Errors
/// A list of them cannot be read.
pub(crate) fn steps(patches: &Path) -> Result<Vec<Step>> {
    let top = patches.parent().unwrap_or(patches);
    let number = patches.file_name().unwrap_or_default().to_string_lossy();
    let files = read(&top.join("files"))?;
    let brought: BTreeMap<&str, Vec<String>> = files.lines().filter_map(brought).collect();
    let series = read(&patches.join("series"))?;
    let step = |name: &str| {
        let title = title(name);
        let later =
            [format!("{title}.diff"), format!("{title}.{number}.diff")].map(|name| top.join("later").join(name));
        Step {
            patch: name.into(),
            starts: brought.get(title).cloned().unwrap_or_default(),
            later: later.into_iter().filter(|diff| diff.is_file()).collect(),
        }
    };
    Ok(series.lines().filter_map(patch_name).map(step).collect())
}

/// A line of `guest/patches/files`: a patch, and how the paths of the files start that come with it.
fn brought(line: &str) -> Option<(&str, Vec<String>)> {
    let mut words = line.split('#').next()?.split_whitespace();
    Some((words.next()?, words.map(String::from).collect()))
}

/// A patch's name without its number and the end.
fn title(name: &str) -> &str {
    let name = name.strip_suffix(".patch").unwrap_or(name);
    name.split_once('-').map_or(name, |(_number, title)| title)
}

/// A cover letter with a text, whose first line is the subject.
fn with_text(cover: &str, text: &str) -> String {
    let (subject, rest) = text.split_once('\n').unwrap_or((text, ""));
    let blurb = rest.strip_prefix('\n').unwrap_or(rest);
    cover.replace(SUBJECT, subject).replace(&format!("{BLURB}\n"), blurb)
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

fn copy(source: &Path, target: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let parent = target.parent().unwrap_or(target);
    fs::create_dir_all(parent)
        .and_then(|()| fs::copy(source, target))
        .and_then(|_| fs::set_permissions(target, fs::Permissions::from_mode(0o644)))
        .with_context(|| format!("copying {}", source.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mail_has_a_patch_the_files_that_it_brings_and_what_it_changes_in_others() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        fs::create_dir_all(top.join("9.9")).unwrap();
        fs::create_dir_all(top.join("later")).unwrap();
        fs::write(top.join("9.9/series"), "# order\n0001-a-Add-x.patch\n0002-a-Add-y.patch\n").unwrap();
        fs::write(top.join("files"), "# who brings what\na-Add-y drivers/y. drivers/z.h\n").unwrap();
        let later = ["later/a-Add-y.diff", "later/a-Add-y.9.9.diff"].map(|name| top.join(name));
        for diff in later.iter().chain([&top.join("later/a-Add-y.9.8.diff")]) {
            fs::write(diff, "").unwrap();
        }
        let steps = steps(&top.join("9.9")).unwrap();
        let nothing = Step { patch: "0001-a-Add-x.patch".into(), starts: vec![], later: vec![] };
        let starts = vec!["drivers/y.".into(), "drivers/z.h".into()];
        assert_eq!(steps, [nothing, Step { patch: "0002-a-Add-y.patch".into(), starts, later: later.into() }]);
        assert!(steps[1].brings(Path::new("drivers/y.c")) && !steps[1].brings(Path::new("drivers/yy.c")));
    }

    #[test]
    fn cover_letter_has_subject_and_text() {
        let cover = "Subject: [PATCH 0/2] *** SUBJECT HERE ***\n\n*** BLURB HERE ***\n\nCarom (2):\n";
        let expected = "Subject: [PATCH 0/2] Bounce\n\nText\nof two lines\n\nCarom (2):\n";
        assert_eq!(with_text(cover, "Bounce\n\nText\nof two lines\n"), expected);
    }
}
