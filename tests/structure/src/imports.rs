// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Imports between the files of a crate, and circles of such imports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use crate::names::{Definition, resolve};
use crate::source::{Crate, ModuleId};

/// Importing file, and the file that it imports from.
pub(crate) type Import = (PathBuf, PathBuf);

/// Imports, each with the imported names.
pub(crate) type Ties = BTreeMap<Import, BTreeSet<String>>;

/// Returns all imports between files of `krate`. Imports between a module and its submodules are omitted, because the language
/// requires them.
pub(crate) fn imports(krate: &Crate) -> Ties {
    let mut ties = Ties::new();
    for (importer, source, name) in references(krate) {
        let files = [importer, source].map(|module| krate.modules[module].file.clone());
        if !is_inside(krate, importer, source) && !is_inside(krate, source, importer) {
            ties.entry(files.into()).or_default().insert(name);
        }
    }
    ties
}

/// Returns all references from modules of `krate` to items in other files. A reference consists of the referring module, the item's module,
/// and the item's name.
pub(crate) fn references(krate: &Crate) -> Vec<(ModuleId, ModuleId, String)> {
    let mut found = Vec::new();
    for (id, module) in krate.modules.iter().enumerate() {
        for path in &module.references {
            // A path that names only a module is not a dependency. Items taken from the module have their own paths.
            if let Some(Definition::Item(source, name)) = resolve(krate, id, path)
                && krate.modules[source].file != module.file
            {
                found.push((id, source, name));
            }
        }
    }
    found
}

/// Returns the outermost module of the file that contains `module`. If `module` is inline, the result is another module.
fn module_of_file(krate: &Crate, mut module: ModuleId) -> ModuleId {
    while let Some(parent) = krate.modules[module].parent {
        if krate.modules[parent].file != krate.modules[module].file {
            break;
        }
        module = parent;
    }
    module
}

/// True if the file of `inner` is a submodule of the file of `outer`, at any depth.
fn is_inside(krate: &Crate, inner: ModuleId, outer: ModuleId) -> bool {
    let outer = module_of_file(krate, outer);
    let parents = std::iter::successors(Some(module_of_file(krate, inner)), |id| krate.modules[*id].parent);
    parents.skip(1).any(|parent| module_of_file(krate, parent) == outer)
}

/// Returns the circles of imports. A circle is a set of files. Each file of a circle imports all other files of the circle, directly or
/// indirectly. A returned circle contains the imports between these files.
pub(crate) fn circles(ties: &Ties) -> Vec<Ties> {
    let graph: DiGraphMap<&Path, ()> = ties.keys().map(|(from, to)| (from.as_path(), to.as_path())).collect();
    let mut circles: Vec<Ties> = tarjan_scc(&graph)
        .iter()
        .filter(|files| files.len() > 1)
        .map(|files| {
            let within = |(from, to): &Import| files.contains(&from.as_path()) && files.contains(&to.as_path());
            ties.iter()
                .filter(|(import, _)| within(import))
                .map(|(import, names)| (import.clone(), names.clone()))
                .collect()
        })
        .collect();
    circles.sort();
    circles
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::*;

    /// Creates a crate of these files. The first file is the root.
    fn krate(files: &[(&str, &str)]) -> (TempDir, Crate) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let krate = Crate::read(&root.path().join(files[0].0)).unwrap();
        (root, krate)
    }

    /// Returns the imports between the files of each circle, as `from to: names`.
    fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let (root, krate) = krate(files);
        let short = |path: &Path| path.strip_prefix(root.path()).unwrap().display().to_string();
        let line = |((from, to), names): (&Import, &BTreeSet<String>)| {
            format!("{} {}: {}", short(from), short(to), Vec::from_iter(names.clone()).join(" "))
        };
        circles(&imports(&krate)).iter().map(|circle| circle.iter().map(line).collect()).collect()
    }

    #[test]
    fn mutual_imports_are_a_circle_with_the_names_that_tie_them() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use super::b::{One, Two}; pub struct A(One, Two);"),
            ("b.rs", "use crate::a::A; pub struct One; pub struct Two(Box<A>);"),
        ];
        assert_eq!(found(&files), [["a.rs b.rs: One Two", "b.rs a.rs: A"]]);
    }

    #[test]
    fn chain_of_files_is_not_a_circle() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use super::b::B;"),
            ("b.rs", "use super::c::C; pub struct B;"),
            ("c.rs", "pub struct C;"),
        ];
        assert!(found(&files).is_empty());
    }

    #[test]
    fn circle_over_three_files_is_found_as_one() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use super::b::B; pub struct A;"),
            ("b.rs", "use super::c::C; pub struct B;"),
            ("c.rs", "use super::a::A; pub struct C;"),
        ];
        assert_eq!(found(&files), [["a.rs b.rs: B", "b.rs c.rs: C", "c.rs a.rs: A"]]);
    }

    #[test]
    fn parent_and_child_may_import_each_other_at_any_depth() {
        let files = [
            ("lib.rs", "mod a; pub struct Root;"),
            ("a.rs", "mod b; use b::c::C; pub struct A(C);"),
            ("a/b.rs", "pub mod c; use crate::Root;"),
            ("a/b/c.rs", "use crate::a::A; use crate::Root; pub struct C;"),
        ];
        assert!(found(&files).is_empty());
    }

    #[test]
    fn reexported_name_ties_to_the_file_that_defines_it() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod low; mod high; pub use low::Low; pub use self::high::*;"),
            ("a/low.rs", "pub struct Low;"),
            ("a/high.rs", "use crate::b::B; pub struct High(B);"),
            ("b.rs", "use crate::a::Low; pub struct B(Low);"),
        ];
        assert!(found(&files).is_empty());
        let mut circle = files;
        circle[4].1 = "use crate::a::High; pub struct B(Box<High>);";
        assert_eq!(found(&circle), [["a/high.rs b.rs: B", "b.rs a/high.rs: High"]]);
    }

    #[test]
    fn names_are_found_in_types_expressions_macros_and_local_uses() {
        let uses = [
            "fn f(_: &crate::b::B) {}",
            "fn f() { let _ = super::b::B { x: 1 }; }",
            "fn f() { assert!(matches!(1, crate::b::B)); }",
            "fn f() { use super::b; let _: b::B; }",
            "use super::b as other; fn f() -> Vec<other::B> { vec![] }",
            "use super::*; type T = b::B;",
            "impl crate::b::B { }",
            "mod inner { use super::super::b::B; }",
            "trait T { type X; } impl T for u8 { type X = <u8 as crate::b::B>::X; }",
        ];
        for text in uses {
            let a = format!("{text} pub struct A;");
            let files = [("lib.rs", "mod a; mod b;"), ("a.rs", &a), ("b.rs", "use crate::a::A; pub struct B;")];
            assert_eq!(found(&files), [["a.rs b.rs: B", "b.rs a.rs: A"]], "{text}");
        }
    }

    #[test]
    fn names_of_other_crates_and_modules_add_no_import() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use super::b; use std::fmt::{self, Debug}; use ::b::B; pub struct A;"),
            ("b.rs", "use super::a::A; pub struct B;"),
        ];
        assert!(found(&files).is_empty());
    }

    #[test]
    fn files_elsewhere_and_inline_modules_are_followed() {
        let files = [
            ("src/lib.rs", "#[path = \"../odd/place.rs\"] mod a; mod inline { pub mod b; }"),
            ("odd/place.rs", "use crate::inline::b::B; pub struct A;"),
            ("src/inline/b.rs", "use crate::a::A; pub struct B;"),
        ];
        let circle = found(&files);
        assert_eq!(circle.len(), 1);
        assert_eq!(circle[0][1], "src/inline/b.rs src/../odd/place.rs: A");
    }

    #[test]
    fn unresolvable_imports_terminate() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "pub use super::b::*; pub use super::b::X;"),
            ("b.rs", "pub use super::a::*; pub use super::a::X;"),
        ];
        assert!(found(&files).is_empty());
    }

    #[test]
    fn missing_file_and_broken_syntax_are_named() {
        let root = tempfile::tempdir().unwrap();
        let lib = root.path().join("lib.rs");
        for (text, part) in [("mod gone;", "module gone has no file"), ("fn {", "lib.rs")] {
            fs::write(&lib, text).unwrap();
            let error = Crate::read(&lib).err().unwrap();
            assert!(format!("{error:#}").contains(part), "{error:#}");
        }
    }
}
