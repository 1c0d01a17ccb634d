// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest patch as mails: what each of them has, and which of them are a part that can be sent by itself.
//!
//! A mail is a patch of `guest/patches/N` with the files of `guest/src` that `guest/patches/files` names for it. Those files are as
//! the last patch leaves them. What a patch changes in files of earlier ones is in `guest/patches/later`, in a diff for all series, and
//! one for those that have the files: taken away from all files first, and put back with its patch. `guest/patches/parts` says with
//! which mails parts begin.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::commands::patch_command;
use crate::files::{copy, read};
use crate::key::files_below;
use crate::tools::Tools;

/// A part of the series, without those that come after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "UPPER")]
pub enum Part {
    /// Fixes of mainline.
    A,
    /// The attributes by which a driver says that the device overwrites a buffer.
    B,
    /// The pool over pages of the kernel.
    C,
    /// Windows.
    D,
}

/// One mail.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Its patch of mainline files, which may change none.
    pub(crate) patch: String,
    /// How the paths of the files of `guest/src` start that come with it.
    starts: Vec<String>,
    /// What it changes in files that came before.
    pub(crate) later: Vec<PathBuf>,
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

/// The files of `guest/src`, which is `source`, in their order.
///
/// # Errors
/// They cannot be read.
pub(crate) fn sources(source: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = files_below(source)?.into_iter().map(|(file, _)| file).collect();
    files.sort();
    Ok(files)
}

/// Whether the path of `file` starts like one of them.
pub(crate) fn starts_one_of(starts: &[String], file: &Path) -> bool {
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

/// A line of `guest/patches/files`: a patch, and how the paths of the files start that come with it. Or one of `guest/patches/parts`:
/// a part, and the patches of which one begins it.
pub(crate) fn brought(line: &str) -> Option<(&str, Vec<String>)> {
    let mut words = line.split('#').next()?.split_whitespace();
    Some((words.next()?, words.map(String::from).collect()))
}

/// Those of `steps`, a whole series in `patches`, that there are when `part` is its last.
///
/// # Errors
/// The list of the parts cannot be read, or does not have the part's end.
pub(crate) fn until(part: Part, mut steps: Vec<Step>, patches: &Path) -> Result<Vec<Step>> {
    let list = read(&patches.with_file_name("parts"))?;
    let next = match part {
        Part::A => "B",
        Part::B => "C",
        Part::C => "D",
        Part::D => "E",
    };
    let begins = list.lines().filter_map(brought).find_map(|(name, titles)| (name == next).then_some(titles));
    let begins = begins.unwrap_or_default();
    let count = steps.iter().position(|step| begins.iter().any(|begin| begin == title(&step.patch)));
    steps.truncate(count.with_context(|| format!("no patch of {} begins part {next}", patches.display()))?);
    Ok(steps)
}

/// A patch's name without its number and the end.
fn title(name: &str) -> &str {
    let name = name.strip_suffix(".patch").unwrap_or(name);
    name.split_once('-').map_or(name, |(_number, title)| title)
}

/// The patch that a line of quilt's `series` names.
pub(crate) fn patch_name(line: &str) -> Option<&str> {
    let name = line.split('#').next().unwrap_or_default().trim();
    (!name.is_empty()).then_some(name)
}

/// The files that a patch changes, without those that it adds.
pub(crate) fn changed_files(patch: &str) -> impl Iterator<Item = &str> {
    patch.lines().filter_map(|line| line.strip_prefix("--- a/")?.split_whitespace().next())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn mail_has_a_patch_its_new_files_and_its_changes_to_others() {
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
    fn parts_of_each_series_follow_each_other_and_leave_the_last() {
        let patches = crate::checkout().join("guest/patches");
        for (series, counts) in [("6.12", [4, 6, 16, 17]), ("7.3", [5, 7, 15, 16])] {
            let dir = patches.join(series);
            let count = |part| until(part, steps(&dir).unwrap(), &dir).unwrap().len();
            assert_eq!([Part::A, Part::B, Part::C, Part::D].map(count), counts, "{series}");
        }
    }

    #[test]
    fn part_whose_end_is_not_there_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("parts"), "B a-Add-y\n").unwrap();
        let patches = dir.path().join("9.9");
        let step = |name: &str| Step { patch: name.into(), starts: vec![], later: vec![] };
        let all = || vec![step("0001-a-Add-x.patch"), step("0002-a-Add-y.patch"), step("0003-a-Add-z.patch")];
        assert_eq!(until(Part::A, all(), &patches).unwrap(), [step("0001-a-Add-x.patch")]);
        let error = until(Part::B, all(), &patches).unwrap_err().to_string();
        assert!(error.ends_with("9.9 begins part C"), "{error}");
    }
}
