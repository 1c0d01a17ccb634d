// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Patched source tree: Debian's source with our files, which are the files of `guest/src` and the mainline files that the patches change.
//! Unchanged files keep their time stamps, so that a build compiles only what a change affects.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::files::{copy, read};
use crate::key::files_below;
use crate::mails::{Part, changed_files, earlier_forms, patch_name, steps, until};
use crate::tools::Tools;

impl Tools<'_> {
    /// Creates or refreshes `tree`: a copy of `pristine` (by hard links) with our files. With `part`, the tree contains our files
    /// as they are at the end of that part.
    pub(super) fn patched_tree(&self, pristine: &Path, tree: &Path, patches: &Path, part: Option<Part>) -> Result<()> {
        if !tree.is_dir() {
            self.progress.show("preparing the patched source tree");
            let new = tree.with_extension("new");
            self.run(Command::new("rm").arg("-rf").arg(&new))?;
            self.run(Command::new("cp").arg("-al").arg(pristine).arg(&new))?;
            fs::rename(&new, tree).with_context(|| format!("cannot create {}", tree.display()))?;
        }
        let ours = tempfile::tempdir().context("cannot create a directory for our files")?;
        match part {
            None => self.our_files(pristine, ours.path(), patches)?,
            Some(part) => self.our_files_until(part, pristine, ours.path(), patches)?,
        }
        let list = tree.with_extension("touched");
        let mut touched: BTreeSet<PathBuf> =
            fs::read_to_string(&list).unwrap_or_default().lines().map(PathBuf::from).collect();
        let files = files_below(ours.path())?;
        touched.extend(files.into_iter().map(|(file, _)| Path::new(".").join(file)));
        let lines: String = touched.iter().map(|file| format!("{}\n", file.display())).collect();
        fs::write(&list, lines).with_context(|| format!("cannot write {}", list.display()))?;
        for file in &touched {
            refresh(file, ours.path(), pristine, tree)?;
        }
        Ok(())
    }

    /// Writes our files to `ours`, in their final form.
    fn our_files(&self, pristine: &Path, ours: &Path, patches: &Path) -> Result<()> {
        let series = read(&patches.join("series"))?;
        let mut names: Vec<&str> = Vec::new();
        for name in series.lines().filter_map(patch_name) {
            let text = read(&patches.join(name))?;
            let mut changed = changed_files(&text).peekable();
            // Skip a patch file without a diff: it contains only the text of a mail that adds files of `guest/src` (see `crate::mails`).
            if changed.peek().is_some() {
                names.push(name);
            }
            for file in changed {
                copy(&pristine.join(file), &ours.join(file))?;
            }
        }
        let src = self.checkout.join("guest/src");
        for (file, _) in files_below(&src)? {
            copy(&src.join(&file), &ours.join(&file))?;
        }
        for name in names {
            self.patch(ours, &patches.join(name))?;
        }
        Ok(())
    }

    /// Does the same as [`Tools::our_files`], but without the patches after `part`.
    fn our_files_until(&self, part: Part, pristine: &Path, ours: &Path, patches: &Path) -> Result<()> {
        let forms = tempfile::tempdir().context("cannot create a directory for our files")?;
        let all = steps(patches)?;
        let files = earlier_forms(self, &self.checkout.join("guest/src"), &all, forms.path())?;
        for step in until(part, all, patches)? {
            let patch = patches.join(&step.patch);
            let text = read(&patch)?;
            let mut changed = changed_files(&text).peekable();
            let changes = changed.peek().is_some();
            // An earlier patch may have changed the file already, so do not overwrite that copy.
            for file in changed.filter(|file| !ours.join(file).exists()) {
                copy(&pristine.join(file), &ours.join(file))?;
            }
            if changes {
                self.patch(ours, &patch)?;
            }
            for file in files.iter().filter(|file| step.brings(file)) {
                copy(&forms.path().join(file), &ours.join(file))?;
            }
            for later in &step.later {
                self.patch(ours, later)?;
            }
        }
        Ok(())
    }
}

/// Copies `file` from `ours` to `tree`, or from `pristine` if `ours` lacks the file. If both lack the file, removes `file` from `tree`.
fn refresh(file: &Path, ours: &Path, pristine: &Path, tree: &Path) -> Result<()> {
    let target = tree.join(file);
    let source = [ours, pristine].into_iter().map(|top| top.join(file)).find(|source| source.exists());
    let Some(source) = source else {
        return match fs::remove_file(&target) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", target.display()))
            }
            _ => Ok(()),
        };
    };
    let wanted = fs::read(&source).with_context(|| format!("cannot read {}", source.display()))?;
    if fs::read(&target).is_ok_and(|known| known == wanted) {
        return Ok(());
    }
    // Replace the file instead of writing to it: it may be a hard link to Debian's source.
    let new = tree.join(".carom-new");
    fs::write(&new, wanted).with_context(|| format!("cannot write {}", new.display()))?;
    let parent = target.parent().unwrap_or(tree);
    fs::create_dir_all(parent)
        .and_then(|()| fs::rename(&new, &target))
        .with_context(|| format!("cannot write {}", target.display()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use tempfile::TempDir;

    use super::*;
    use crate::tools::with_tools;

    const PATCH: &str = "--- a/drivers/a.c\n+++ b/drivers/a.c\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n";

    /// Directory with a checkout, patches, and a pristine tree that contains `drivers/a.c`.
    struct Files(TempDir);

    impl Files {
        fn new() -> Self {
            let files = Self(tempfile::tempdir().unwrap());
            files.write("pristine/drivers/a.c", "one\ntwo\nthree\n");
            fs::create_dir(files.at("work")).unwrap();
            files
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path)
        }

        fn write(&self, path: &str, text: &str) {
            let file = self.at(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }

        /// Refreshes the patched tree.
        fn refresh(&self, patches: &str, part: Option<Part>) {
            with_tools(&self.at("checkout"), &self.at("cache"), |tools| {
                let (pristine, patched) = (self.at("pristine"), self.at("work/patched"));
                tools.patched_tree(&pristine, &patched, &self.at(patches), part).unwrap();
            });
        }

        /// Reads a file of the patched tree.
        fn read(&self, path: &str) -> Option<String> {
            fs::read_to_string(self.at("work/patched").join(path)).ok()
        }
    }

    #[test]
    fn tree_has_our_files_and_rewrites_only_changed_ones() {
        let files = Files::new();
        files.write("pristine/drivers/b.c", "b\n");
        files.write("checkout/guest/src/drivers/new.c", "new\n");
        files.write("checkout/guest/src/drivers/old.c", "old\n");
        files.write("patches/series", "# hooks\n0001-a.patch\n\n");
        files.write("patches/0001-a.patch", PATCH);

        files.refresh("patches", None);

        assert_eq!(files.read("drivers/a.c").as_deref(), Some("one\n2\nthree\n"));
        assert_eq!(files.read("drivers/new.c").as_deref(), Some("new\n"));
        assert_eq!(fs::read_to_string(files.at("pristine/drivers/a.c")).unwrap(), "one\ntwo\nthree\n");

        let early = SystemTime::now() - Duration::from_secs(3600);
        for file in ["drivers/a.c", "drivers/new.c"] {
            let file = fs::File::options().append(true).open(files.at("work/patched").join(file)).unwrap();
            file.set_modified(early).unwrap();
        }
        files.write("checkout/guest/src/drivers/new.c", "newer\n");
        fs::remove_file(files.at("checkout/guest/src/drivers/old.c")).unwrap();
        files.write("patches/series", "");

        files.refresh("patches", None);

        assert_eq!(files.read("drivers/a.c").as_deref(), Some("one\ntwo\nthree\n"), "as Debian has it again");
        assert_eq!(files.read("drivers/new.c").as_deref(), Some("newer\n"));
        assert_eq!(files.read("drivers/old.c"), None);

        let time = |file: &str| fs::metadata(files.at("work/patched").join(file)).unwrap().modified().unwrap();
        let before = time("drivers/new.c");
        files.refresh("patches", None);
        assert_eq!(time("drivers/new.c"), before);
    }

    #[test]
    fn part_tree_has_files_in_the_form_of_its_mails() {
        let files = Files::new();
        files.write("checkout/guest/src/drivers/new.c", "first\nthird\n");
        files.write("checkout/guest/src/drivers/last.c", "last\n");
        files.write("patches/files", "a drivers/new.c\nc drivers/last.c\n");
        files.write("patches/parts", "B b\nC c\nD d\nE e\n");
        files.write("patches/9.9/series", "0001-a.patch\n0002-b.patch\n0003-c.patch\n0004-d.patch\n0005-e.patch\n");
        files.write("patches/9.9/0001-a.patch", PATCH);
        files.write("patches/9.9/0002-b.patch", &PATCH.replace("-two\n+2\n", "-2\n+II\n"));
        for name in ["0003-c", "0004-d", "0005-e"] {
            files.write(&format!("patches/9.9/{name}.patch"), "");
        }
        let hunk = |old: &str, new: &str| {
            format!("--- a/drivers/new.c\n+++ b/drivers/new.c\n@@ -1,2 +1,2 @@\n first\n-{old}\n+{new}\n")
        };
        files.write("patches/later/b.diff", &hunk("second", "2nd"));
        files.write("patches/later/e.9.9.diff", &hunk("2nd", "third"));

        for (part, hooked, new, last) in [
            (Part::D, "one\nII\nthree\n", "first\n2nd\n", Some("last\n")),
            (Part::B, "one\nII\nthree\n", "first\n2nd\n", None),
            (Part::A, "one\n2\nthree\n", "first\nsecond\n", None),
        ] {
            files.refresh("patches/9.9", Some(part));
            assert_eq!(files.read("drivers/a.c").as_deref(), Some(hooked), "{part:?}");
            assert_eq!(files.read("drivers/new.c").as_deref(), Some(new), "{part:?}");
            assert_eq!(files.read("drivers/last.c").as_deref(), last, "{part:?}");
        }
    }
}
