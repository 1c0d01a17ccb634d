// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks the structure of the workspace's source files, and of the guest's C files.
//!
//! - Files must not import each other in a circle, except a module and its submodules. C files must not depend on each other in
//!   a circle.
//! - Folders directly below a crate's `src` must not import each other in a circle. Tests may import from any folder.
//! - A file has at most 600 lines, or gives a reason for its length.
//! - The table of unsafe code in `docs/security.md` has a row for each file with unsafe code. The row names the file's tests.
//! - The table of features in `tests/README.md` names each test program, and only paths that exist.
//! - Files and tests in the table of promises of `docs/security.md` exist. A row with slow tests contains `--all`, because such tests run
//!   only with this option.
//!
//! `known.txt` lists known findings that are not fixed yet. No finding may be added to it.
//!
//! `cargo run -p carom-structure` prints all complaints, and exits with status 1 if it finds any.

mod c;
mod feature_map;
mod folders;
mod imports;
mod known;
mod length;
mod names;
mod promises;
mod source;
mod unsafe_code;
mod workspace;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::imports::{Ties, circles, imports};
use crate::source::Crate;

/// Path of the list of known findings in the workspace.
const KNOWN: &str = "tests/structure/known.txt";
/// Path of the C files in the workspace.
const C: &str = "guest";

fn main() -> Result<ExitCode> {
    let (root, targets) = workspace::targets(Path::new("."))?;
    let list = root.join(KNOWN);
    let known = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
    let mut complaints = check(&root, &targets, &c::files(&root.join(C))?, &known::parse(&known))?;
    let read = |document: &str| {
        let document = root.join(document);
        fs::read_to_string(&document).with_context(|| format!("cannot read {}", document.display()))
    };
    complaints.extend(unsafe_code::complaints(&read(unsafe_code::DOCUMENT)?, &with_unsafe_code(&root, &targets)?));
    complaints.extend(promises::complaints(&read(promises::DOCUMENT)?, &sources(&root, &targets)?));
    complaints.extend(feature_map::complaints(&read(feature_map::DOCUMENT)?, &root, &targets));
    for complaint in &complaints {
        println!("{complaint}");
    }
    Ok(if complaints.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the complaints about the crates whose root files are `targets`, and about the C files `c_files`. Paths are relative to `root`.
/// Known findings are omitted.
fn check(root: &Path, targets: &[PathBuf], c_files: &[PathBuf], known: &BTreeSet<String>) -> Result<Vec<String>> {
    let mut ties: Ties = c::ties(c_files)?;
    let mut files = BTreeSet::from_iter(c_files.iter().cloned());
    let mut folders = Ties::new();
    for target in targets {
        let krate = Crate::read(target)?;
        ties.extend(imports(&krate));
        folders.extend(folders::imports(&krate));
        files.extend(krate.modules.into_iter().map(|module| module.file));
    }
    let short = |path: &Path| path.strip_prefix(root).unwrap_or(path).display().to_string();
    let mut complaints = Vec::new();
    let mut found = BTreeSet::new();
    let is_of_folders = |circle: &Ties| circle.keys().any(|(from, _)| from.is_dir());
    let of_folders = circles(&folders).into_iter().filter(is_of_folders).collect();
    for (units, circles) in [("files", circles(&ties)), ("folders", of_folders)] {
        for circle in circles {
            let (mut lines, mut is_new) = (Vec::new(), false);
            for ((from, to), names) in circle {
                let import = format!("{} -> {}", short(&from), short(&to));
                let note = if known.contains(&import) { " (known)" } else { "" };
                lines.push(format!("    {import}: {}{note}", Vec::from_iter(names).join(", ")));
                is_new |= !known.contains(&import);
                found.insert(import);
            }
            if is_new {
                complaints.push(format!("these {units} depend on each other in a circle:"));
                complaints.extend(lines);
            }
        }
    }
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        if let Some(complaint) = length::complaint(&text) {
            let file = short(&file);
            if !known.contains(&file) {
                complaints.push(format!("{file} {complaint}"));
            }
            found.insert(file);
        }
    }
    for line in known::mended(known, &found) {
        complaints.push(format!("{KNOWN}: '{line}' is fixed: remove the line"));
    }
    Ok(complaints)
}

/// Returns the files below `root` that contain unsafe code and belong to a library or program in `targets`. Tests are omitted.
fn with_unsafe_code(root: &Path, targets: &[PathBuf]) -> Result<BTreeSet<String>> {
    let mut files = BTreeSet::new();
    for target in targets {
        let path = target.strip_prefix(root).unwrap_or(target);
        if path.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "benches") {
            continue;
        }
        let modules = Crate::read(target)?.modules.into_iter().filter(|module| module.has_unsafe && !module.for_tests);
        files
            .extend(modules.map(|module| module.file.strip_prefix(root).unwrap_or(&module.file).display().to_string()));
    }
    Ok(files)
}

/// Returns the source files of all `targets`, by their path below `root`.
fn sources(root: &Path, targets: &[PathBuf]) -> Result<promises::Sources> {
    let mut sources = promises::Sources::new();
    for target in targets {
        for module in Crate::read(target)?.modules {
            let text =
                fs::read_to_string(&module.file).with_context(|| format!("cannot read {}", module.file.display()))?;
            sources.insert(module.file.strip_prefix(root).unwrap_or(&module.file).display().to_string(), text);
        }
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the complaints about a crate of two files, where `more` is appended to the second file and `known` lists known
    /// findings.
    fn complaints(more: &str, known: &str) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let files =
            [("lib.rs", "mod a; mod b;"), ("a.rs", "use super::b::B; pub struct A;"), ("b.rs", "pub struct B;")];
        for (file, text) in files {
            fs::write(root.path().join(file), text).unwrap();
        }
        fs::write(root.path().join("b.rs"), format!("pub struct B;{more}")).unwrap();
        check(root.path(), &[root.path().join("lib.rs")], &[], &known::parse(known)).unwrap()
    }

    #[test]
    fn sound_tree_has_no_complaints() {
        assert!(complaints("", "").is_empty());
    }

    #[test]
    fn unknown_circle_is_reported_with_files_and_names() {
        let circle = " use crate::a::A;";
        let reported = complaints(circle, "a.rs -> b.rs");
        let expected =
            ["these files depend on each other in a circle:", "    a.rs -> b.rs: B (known)", "    b.rs -> a.rs: A"];
        assert_eq!(reported, expected);
        assert!(complaints(circle, "a.rs -> b.rs\nb.rs -> a.rs").is_empty());
    }

    #[test]
    fn circle_of_folders_is_found_without_one_of_files() {
        let found = |text: &str| {
            let root = tempfile::tempdir().unwrap();
            let files = [
                ("lib.rs", "mod a; mod b; mod c;"),
                ("a.rs", "mod low; use crate::b::B;"),
                ("a/low.rs", "pub struct Low;"),
                ("b.rs", text),
                ("c.rs", "use crate::b::B;"),
            ];
            fs::create_dir(root.path().join("a")).unwrap();
            for (file, text) in files {
                fs::write(root.path().join(file), text).unwrap();
            }
            check(root.path(), &[root.path().join("lib.rs")], &[], &BTreeSet::new()).unwrap()
        };
        let expected = ["these folders depend on each other in a circle:", "    a -> b: B", "    b -> a: Low"];
        assert_eq!(found("pub struct B; use crate::a::low::Low;"), expected);
        for text in ["pub struct B;", "pub struct B; #[cfg(test)] mod tests { use crate::a::low::Low; }"] {
            assert!(found(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn unsafe_code_is_found_everywhere_except_in_tests() {
        let found = |text: &str| {
            let root = tempfile::tempdir().unwrap();
            let file = root.path().join("lib.rs");
            fs::write(&file, text).unwrap();
            !with_unsafe_code(root.path(), &[file]).unwrap().is_empty()
        };
        for text in [
            "fn a() { unsafe { b() } }",
            "unsafe fn a() {}",
            "impl A { unsafe fn a() {} }",
            "unsafe impl Send for A {}",
            "unsafe extern \"C\" { fn a(); }",
            "fn a() { b!(unsafe { c() }) }",
            "mod a { fn b() { unsafe { c() } } }",
        ] {
            assert!(found(text), "{text}");
        }
        for text in
            ["#![forbid(unsafe_code)]", "fn a() { \"unsafe\"; }", "#[cfg(test)] mod a { fn b() { unsafe { c() } } }"]
        {
            assert!(!found(text), "{text}");
        }
    }

    #[test]
    fn unknown_long_file_is_reported() {
        let lines = "\n".repeat(700);
        assert!(complaints(&lines, "")[0].starts_with("b.rs has 700 lines"));
        assert!(complaints(&lines, "b.rs").is_empty());
    }

    #[test]
    fn circular_and_long_c_files_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let (a, b) = (root.path().join("a.c"), root.path().join("b.c"));
        fs::write(&a, "void f(void)\n{\n\tg();\n}\n").unwrap();
        fs::write(&b, "void g(void)\n{\n\tf();\n}\n".to_string() + &"\n".repeat(700)).unwrap();
        let reported = check(root.path(), &[], &[a, b], &BTreeSet::new()).unwrap();
        assert_eq!(
            reported[..3],
            ["these files depend on each other in a circle:", "    a.c -> b.c: g", "    b.c -> a.c: f"]
        );
        assert!(reported[3].starts_with("b.c has 704 lines"));
    }

    #[test]
    fn fixed_finding_must_be_removed_from_the_list() {
        assert_eq!(
            complaints("", "b.rs -> a.rs"),
            ["tests/structure/known.txt: 'b.rs -> a.rs' is fixed: remove the line"]
        );
    }
}
