// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest patch as a series of mails, which is divided into parts.
//!
//! A mail is a patch of `guest/patches/N` together with the files of `guest/src` that `guest/patches/files` assigns to it.
//! `guest/src` contains these files as they are after the last patch.
//!
//! If a patch changes a file that an earlier mail added, `guest/patches/later` contains this change as a diff. A diff is for all series, or
//! only for the series in its name. The code that builds the series first reverts all these diffs in copies of the files. Then it applies
//! each diff together with its patch.
//!
//! `guest/patches/parts` names the first mails of the parts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::commands::patch_command;
use crate::files::{copy, read};
use crate::key::files_below;
use crate::tools::Tools;

/// Part of the series, which includes all earlier parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "UPPER")]
pub enum Part {
    /// Fixes of mainline code.
    A,
    /// DMA attributes that declare that the device overwrites a buffer. A driver sets these attributes.
    B,
    /// Pool of kernel pages.
    C,
    /// Bounce windows.
    D,
}

/// Mail of the series.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Patch of mainline files. The patch may contain no diff, only the text of the mail.
    pub(crate) patch: String,
    /// Path prefixes of the files of `guest/src` that this mail adds.
    starts: Vec<String>,
    /// Diffs of files that earlier mails added.
    pub(crate) later: Vec<PathBuf>,
}

impl Step {
    pub(crate) fn brings_files(&self) -> bool {
        !self.starts.is_empty()
    }

    /// True if the mail adds files of `guest/src`, or changes files that earlier mails added.
    pub(crate) fn changes_files(&self) -> bool {
        self.brings_files() || !self.later.is_empty()
    }

    pub(crate) fn brings(&self, file: &Path) -> bool {
        starts_one_of(&self.starts, file)
    }
}

/// Copies the files of `source`, which is `guest/src`, to `forms`. Then reverts the diffs in `later` of `steps` in these copies. `steps`
/// must be the last mails of the series. Returns the files' paths.
///
/// # Errors
/// Fails if a diff does not match the files.
pub(crate) fn earlier_forms(tools: &Tools<'_>, source: &Path, steps: &[Step], forms: &Path) -> Result<Vec<PathBuf>> {
    let files = sources(source)?;
    for file in &files {
        copy(&source.join(file), &forms.join(file))?;
    }
    for later in steps.iter().rev().flat_map(|step| step.later.iter().rev()) {
        tools
            .run(patch_command(forms, later).arg("-R"))
            .with_context(|| format!("cannot revert {}: the diff does not match guest/src", later.display()))?;
    }
    Ok(files)
}

/// Returns the files of `guest/src`, given as `source`, sorted by path.
///
/// # Errors
/// Fails if the directory cannot be read.
pub(crate) fn sources(source: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = files_below(source)?.into_iter().map(|(file, _)| file).collect();
    files.sort();
    Ok(files)
}

/// True if the path of `file` begins with one of the prefixes in `starts`.
pub(crate) fn starts_one_of(starts: &[String], file: &Path) -> bool {
    starts.iter().any(|start| file.to_string_lossy().starts_with(start))
}

/// Returns the mails of the series whose mainline patches are in `patches`.
///
/// # Errors
/// Fails if a list of mails cannot be read.
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

/// Parses a line of `guest/patches/files` or `guest/patches/parts`. A line of `files` lists a patch and the path prefixes of the patch's
/// files. A line of `parts` lists a part and the patches that may begin this part.
pub(crate) fn brought(line: &str) -> Option<(&str, Vec<String>)> {
    let mut words = line.split('#').next()?.split_whitespace();
    Some((words.next()?, words.map(String::from).collect()))
}

/// Returns the mails of `steps` up to the end of `part`. `steps` is the whole series in `patches`.
///
/// # Errors
/// Fails if the list of parts cannot be read, or if the end of `part` is not found.
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

/// Returns a patch's name without its number and suffix.
fn title(name: &str) -> &str {
    let name = name.strip_suffix(".patch").unwrap_or(name);
    name.split_once('-').map_or(name, |(_number, title)| title)
}

/// Returns the patch that a line of quilt's `series` names.
pub(crate) fn patch_name(line: &str) -> Option<&str> {
    let name = line.split('#').next().unwrap_or_default().trim();
    (!name.is_empty()).then_some(name)
}

/// Returns the files that a patch changes, without the files that the patch adds.
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
        for (series, counts) in [("6.12", [6, 8, 18, 19]), ("7.3", [7, 9, 17, 18])] {
            let dir = patches.join(series);
            let count = |part| until(part, steps(&dir).unwrap(), &dir).unwrap().len();
            assert_eq!([Part::A, Part::B, Part::C, Part::D].map(count), counts, "{series}");
        }
    }

    #[test]
    fn part_without_its_end_is_an_error() {
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
