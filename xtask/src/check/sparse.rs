// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks that the patch adds no sparse warnings.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::tree::{CheckTree, Mode, jobs};

/// Each pair has a C source that an old sparse may not understand, and the option that replaces the unknown word. The option is used only
/// if sparse complains about the source.
///
/// sparse 0.6.4 of Debian 12 lacks two builtins that Linux 7.3 uses. `__typeof__`, which replaces `__typeof_unqual__`, keeps qualifiers. So
/// sparse may report more warnings, but not fewer. `MODULE_*()` and `module_param()` use a constant `__builtin_strlen()` to assert that a
/// text contains no NUL. The compiler has already checked that assertion.
///
/// An option must not contain a space: scripts/checker-valid.sh of 7.3 splits its arguments.
const LACKS: [(&str, &str); 2] = [
    (
        "static inline int f(const int *p) { __typeof_unqual__(*p) v = *p; return v; }\n",
        "-D__typeof_unqual__=__typeof__",
    ),
    ("_Static_assert(__builtin_strlen(\"ab\") == 2, \"\");\n", "'-D__builtin_strlen(s)=(sizeof(s)-1)'"),
];

impl CheckTree<'_> {
    pub(super) fn check_sparse(&mut self) -> Result<String> {
        self.tools.need_command("sparse", "sparse", "checking the guest patch")?;
        self.patch_all()?;
        self.tools.progress.show("building the patched objects");
        self.configure(Mode::On)?;
        self.build(Mode::On, &[])?;
        self.tools.progress.show("sparse, patched");
        let (ours, patched) = self.sparse_says("patched")?;
        // Check the unpatched mainline files with the same configuration.
        self.tools.progress.show("sparse, unpatched");
        self.renew()?;
        self.configure(Mode::On)?;
        self.build(Mode::On, &[])?;
        let (mainline, unpatched) = self.sparse_says("unpatched")?;
        let new = new_lines(&patched, unpatched);
        ensure!(new.is_empty(), "sparse warns about the patch:\n{}", new.join("\n"));
        Ok(format!("sparse has no warnings about the patch: {ours} files checked, {mainline} of them from mainline"))
    }

    /// Returns the number of objects that sparse checked, and its messages without line numbers.
    fn sparse_says(&self, name: &str) -> Result<(usize, Vec<String>)> {
        let is_checked = |object: &String| {
            let source = self.tree.join(object).with_extension("c");
            source.exists() && self.object(Mode::On, object).exists()
        };
        let sources = self.touched.iter().filter(|file| !file.contains("/i915"));
        let objects = sources.filter_map(|file| Some(format!("{}.o", file.strip_suffix(".c")?)));
        let objects: Vec<String> = objects.filter(is_checked).collect();
        ensure!(!objects.is_empty(), "sparse has no object to check");
        let log = self.work.join(format!("sparse-{name}.log"));
        // C=2 also runs sparse on files that need no compiling.
        let mut make = self.make(Mode::On);
        make.arg(jobs()).args(["C=2", &format!("CF={}", self.options()?.join(" "))]).args(&objects);
        self.tools.run_quietly(&mut make, &log).context("cannot run sparse")?;
        let said = fs::read_to_string(&log).with_context(|| format!("cannot read {}", log.display()))?;
        // If the kernel's build system finds sparse too old, make does not run sparse and reports no error. After an error, sparse does not
        // print the file's warnings.
        if let Some(object) = objects.iter().find(|object| !was_checked(&said, object)) {
            bail!("sparse did not check {object}: see {}", log.display());
        }
        let errors: Vec<&str> = said.lines().filter(|line| line.contains("error:")).collect();
        ensure!(errors.is_empty(), "sparse stopped at errors:\n{}", errors.join("\n"));
        let warnings = said.lines().filter(|line| line.contains("warning:") && self.is_of_touched(line));
        Ok((objects.len(), warnings.map(|line| without_place(&self.short(line))).collect()))
    }

    /// Returns the options that make this sparse understand the kernel's headers.
    fn options(&self) -> Result<Vec<&'static str>> {
        let file = self.work.join("sparse-probe.c");
        let mut options = Vec::new();
        for (source, option) in LACKS {
            fs::write(&file, source).with_context(|| format!("cannot write {}", file.display()))?;
            let output =
                Command::new("sparse").arg(&file).stdin(Stdio::null()).output().context("cannot start sparse")?;
            if !(output.stdout.is_empty() && output.stderr.is_empty()) {
                options.push(option);
            }
        }
        Ok(options)
    }
}

/// True if make reports that sparse checked this object's source.
fn was_checked(said: &str, object: &str) -> bool {
    let source = format!("{}.c", object.strip_suffix(".o").unwrap_or(object));
    said.lines()
        .filter_map(|line| line.trim_start().strip_prefix("CHECK "))
        .any(|line| line.strip_suffix(&source).is_some_and(|rest| rest.is_empty() || rest.ends_with([' ', '/'])))
}

/// Returns a warning `FILE:LINE:COLUMN: …` without line and column.
fn without_place(line: &str) -> String {
    let mut parts = line.splitn(4, ':');
    let number = |part: Option<&str>| part.is_some_and(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
    match (parts.next(), number(parts.next()) && number(parts.next()), parts.next()) {
        (Some(file), true, Some(rest)) => format!("{file}:{rest}"),
        _ => line.into(),
    }
}

/// Returns the lines that occur more often in `now` than in `before`.
fn new_lines(now: &[String], mut before: Vec<String>) -> Vec<&str> {
    let mut new = Vec::new();
    for line in now {
        match before.iter().position(|known| known == line) {
            Some(at) => {
                before.swap_remove(at);
            }
            None => new.push(line.as_str()),
        }
    }
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_warning_is_new_only_if_more_frequent() {
        let lines = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(new_lines(&lines("a b b c"), lines("c b a")), ["b"]);
        assert!(new_lines(&lines("a"), lines("a b")).is_empty());
    }

    #[test]
    fn messages_are_read() {
        assert_eq!(without_place("a.c:12:3: warning: x:1:2: y"), "a.c: warning: x:1:2: y");
        assert_eq!(without_place("warning: x"), "warning: x");
        let said = "  CC      drivers/a.o\n  CHECK   /tree/drivers/iommu/a.c\n  CHECK   drivers/b.c\n";
        assert!(was_checked(said, "drivers/iommu/a.o") && was_checked(said, "drivers/b.o"));
        assert!(!was_checked(said, "drivers/a.o") && !was_checked(said, "ivers/b.o"));
    }
}
