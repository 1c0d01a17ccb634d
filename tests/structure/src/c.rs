// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Dependencies between C files. A file depends on the headers that the file includes. A file also depends on the files that define the
//! functions and objects that it uses.
//!
//! An inline function of a header counts as a part of each file that calls the function. So these files also have the dependencies of the
//! inline function. A static name is visible only in the file that defines it, as in linking.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};
use tree_sitter::{Node, Parser};

use crate::imports::Ties;

/// Includes and definitions of a C file.
#[derive(Default)]
struct Source {
    /// Headers that the file includes with `#include "…"`. The paths are relative to the file's folder.
    includes: BTreeSet<PathBuf>,
    definitions: BTreeMap<String, Definition>,
}

/// Function or object that a file defines.
#[derive(Default)]
struct Definition {
    is_static: bool,
    /// Names used in the definition.
    uses: BTreeSet<String>,
}

/// Returns all C files below `directory`, sorted.
pub(crate) fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(self::files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "c" || extension == "h") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns the dependencies between `files`.
pub(crate) fn ties(files: &[PathBuf]) -> Result<Ties> {
    let mut parser = Parser::new();
    parser.set_language(&tree_sitter_c::LANGUAGE.into()).context("cannot load the C grammar")?;
    let mut sources = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let tree = parser.parse(&text, None).with_context(|| format!("cannot parse {}", file.display()))?;
        let mut reader = Reader { directory: file.parent().unwrap_or(file), text: &text, source: Source::default() };
        reader.items(tree.root_node());
        sources.insert(file.as_path(), reader.source);
    }
    Ok(Linker::new(&sources).ties())
}

/// Reader of one file.
struct Reader<'a> {
    directory: &'a Path,
    text: &'a str,
    source: Source,
}

impl Reader<'_> {
    fn text(&self, node: Node) -> &str {
        &self.text[node.byte_range()]
    }

    /// Records the items at the outermost level of the file, including items in conditional parts (`#if`).
    fn items(&mut self, parent: Node) {
        for node in parent.named_children(&mut parent.walk()) {
            match node.kind() {
                "preproc_include" => self.include(node),
                "function_definition" => self.define(node),
                "declaration" => self.declaration(node),
                "expression_statement" => self.macro_call(node),
                kind if kind.starts_with("preproc_") || kind == "linkage_specification" => self.items(node),
                _ => {}
            }
        }
    }

    fn include(&mut self, node: Node) {
        let Some(path) = node.child_by_field_name("path").filter(|path| path.kind() == "string_literal") else {
            return;
        };
        let mut file = self.directory.to_path_buf();
        for part in Path::new(self.text(path).trim_matches('"')).components() {
            match part {
                Component::ParentDir => drop(file.pop()),
                part => file.push(part),
            }
        }
        self.source.includes.insert(file);
    }

    /// Records a declaration if it defines an object. A declaration that is `extern`, or that declares a function, defines no
    /// object.
    fn declaration(&mut self, node: Node) {
        if !self.has_storage(node, "extern") && named(node).is_some_and(|name| !is_function(name, node)) {
            self.define(node);
        }
    }

    /// Records a macro call such as `DEFINE_MUTEX(name)`. The call defines its first argument, and may use its other arguments.
    fn macro_call(&mut self, node: Node) {
        let call = node.named_child(0).filter(|call| call.kind() == "call_expression");
        let Some(arguments) = call.and_then(|call| call.child_by_field_name("arguments")) else { return };
        if let Some(first) = arguments.named_child(0).filter(|first| first.kind() == "identifier") {
            self.note(self.text(first).to_string(), node);
        }
    }

    fn define(&mut self, node: Node) {
        if let Some(name) = named(node) {
            self.note(self.text(name).to_string(), node);
        }
    }

    fn note(&mut self, name: String, node: Node) {
        let mut uses = BTreeSet::new();
        self.identifiers(node, &mut uses);
        uses.remove(&name);
        let is_static = self.has_storage(node, "static");
        let definition = self.source.definitions.entry(name).or_default();
        definition.is_static |= is_static;
        definition.uses.extend(uses);
    }

    fn has_storage(&self, node: Node, class: &str) -> bool {
        node.named_children(&mut node.walk())
            .any(|child| child.kind() == "storage_class_specifier" && self.text(child) == class)
    }

    fn identifiers(&self, node: Node, into: &mut BTreeSet<String>) {
        if node.kind() == "identifier" {
            into.insert(self.text(node).to_string());
        }
        for child in node.named_children(&mut node.walk()) {
            self.identifiers(child, into);
        }
    }
}

/// Returns the name that a definition or declaration introduces.
fn named(node: Node) -> Option<Node> {
    let mut at = node.child_by_field_name("declarator")?;
    while at.kind() != "identifier" {
        let inner = at.child_by_field_name("declarator");
        at = inner.or_else(|| at.named_children(&mut at.walk()).find(|child| child.kind().ends_with("declarator")))?;
    }
    Some(at)
}

/// True if `declaration` declares `name` as a function. A pointer to a function is an object.
fn is_function(name: Node, declaration: Node) -> bool {
    let mut at = name;
    while let Some(parent) = at.parent().filter(|parent| *parent != declaration) {
        match parent.kind() {
            "function_declarator" => return true,
            // For the function pointer `int (*name)(int)`, the loop finds the pointer before the function, because the pointer is inside
            // the parentheses.
            "pointer_declarator" => return false,
            _ => at = parent,
        }
    }
    false
}

/// Parsed C files, and the search for the file that defines a name.
struct Linker<'a> {
    sources: &'a BTreeMap<&'a Path, Source>,
    /// Files that define a name visible to other files.
    global: BTreeMap<&'a str, Vec<&'a Path>>,
}

impl<'a> Linker<'a> {
    fn new(sources: &'a BTreeMap<&'a Path, Source>) -> Self {
        let mut global: BTreeMap<&str, Vec<&Path>> = BTreeMap::new();
        for (file, source) in sources {
            for (name, definition) in &source.definitions {
                if is_header(file) || !definition.is_static {
                    global.entry(name).or_default().push(file);
                }
            }
        }
        Self { sources, global }
    }

    fn ties(&self) -> Ties {
        let mut ties = Ties::new();
        for (file, source) in self.sources {
            for header in source.includes.iter().filter(|header| self.sources.contains_key(header.as_path())) {
                let name = header.file_name().unwrap_or_default().to_string_lossy().into_owned();
                ties.entry((file.to_path_buf(), header.clone())).or_default().insert(name);
            }
            if is_header(file) {
                continue;
            }
            for definition in source.definitions.values() {
                for name in &definition.uses {
                    self.follow(file, name, &mut ties, &mut BTreeSet::new());
                }
            }
        }
        ties
    }

    /// Adds the dependency of `file` on the file that defines `name`. If a header defines `name` as an inline function, follows the names
    /// that the function uses.
    fn follow(&self, file: &Path, name: &'a str, ties: &mut Ties, seen: &mut BTreeSet<&'a str>) {
        if self.sources[file].definitions.contains_key(name) || !seen.insert(name) {
            return;
        }
        let definers = self.global.get(name).map(Vec::as_slice).unwrap_or_default();
        // A name may have two definitions: a fallback in a header for kernels without a feature, and the real function in a C file.
        let (headers, sources): (Vec<&Path>, Vec<&Path>) = definers.iter().partition(|definer| is_header(definer));
        for header in headers {
            for inner in &self.sources[header].definitions[name].uses {
                self.follow(file, inner, ties, seen);
            }
        }
        // If several C files define the name, as each program defines `main`, the name is no dependency.
        if let [definer] = sources[..] {
            ties.entry((file.to_path_buf(), definer.to_path_buf())).or_default().insert(name.to_string());
        }
    }
}

fn is_header(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "h")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the dependencies between files with these texts, as `from to: names`.
    fn found(texts: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        for (file, text) in texts {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let short = |path: &Path| path.strip_prefix(root.path()).unwrap().display().to_string();
        ties(&files(root.path()).unwrap())
            .unwrap()
            .iter()
            .map(|((from, to), names)| {
                format!("{} {}: {}", short(from), short(to), Vec::from_iter(names.clone()).join(" "))
            })
            .collect()
    }

    #[test]
    fn function_call_or_address_ties_to_the_defining_file() {
        let uses = [
            "void f(void)\n{\n\tif (g(1))\n\t\treturn;\n}",
            "static int f(int x)\n{\n\treturn x ?: g(x);\n}",
            "static const struct ops ops = { .call = g };",
            "static int (* const all[])(int) = { g };",
            "#ifdef CONFIG_X\nvoid f(void)\n{\n\tlist_for_each(a, b) {\n\t\tg(a);\n\t}\n}\n#endif",
        ];
        for text in uses {
            assert_eq!(found(&[("a.c", text), ("b.c", "int g(int x)\n{\n\treturn x;\n}")]), ["a.c b.c: g"], "{text}");
        }
    }

    #[test]
    fn object_ties_to_the_defining_file_not_to_a_declaring_one() {
        let (user, declarer) = ("int f(void)\n{\n\treturn size;\n}", "extern int size; int size_of(int);");
        for text in ["int size = 3;", "int size;", "DEFINE_INT(size);", "int (*size)(int);"] {
            assert_eq!(found(&[("a.c", user), ("b.c", text), ("c.c", declarer)]), ["a.c b.c: size"], "{text}");
        }
    }

    #[test]
    fn static_duplicate_and_own_names_add_no_dependency() {
        let user = "int f(void)\n{\n\treturn g(1);\n}";
        assert!(found(&[("a.c", user), ("b.c", "static int g(int x)\n{\n\treturn x;\n}")]).is_empty());
        let main = "int main(void)\n{\n\treturn 0;\n}";
        assert!(found(&[("a.c", main), ("b.c", main), ("c.c", "void f(void)\n{\n\tmain();\n}")]).is_empty());
        let own = "static int g(int x)\n{\n\treturn x;\n}\nint f(void)\n{\n\treturn g(1);\n}";
        assert!(found(&[("a.c", own), ("b.c", "int g(int x)\n{\n\treturn x;\n}")]).is_empty());
        assert!(found(&[("a.c", "void f(struct s *x)\n{\n\tx->g = 1;\n}"), ("b.c", "int g(void)\n{\n}")]).is_empty());
    }

    #[test]
    fn function_with_a_header_stub_ties_to_the_defining_file() {
        let header = "#ifdef CONFIG_X\nint g(int);\n#else\nstatic inline int g(int x)\n{\n\treturn 0;\n}\n#endif";
        let files =
            [("a.c", "int f(void)\n{\n\treturn g(1);\n}"), ("b.c", "int g(int x)\n{\n\treturn x;\n}"), ("h.h", header)];
        assert_eq!(found(&files), ["a.c b.c: g"]);
    }

    #[test]
    fn callers_of_inline_functions_get_their_dependencies() {
        let header = "int g(int);\nstatic inline int i(int x)\n{\n\treturn g(x);\n}\nstatic inline int j(int x)\n{\n\treturn i(x);\n}";
        let files = [
            ("a.c", "#include \"sub/h.h\"\nint f(void)\n{\n\treturn j(1);\n}"),
            ("b.c", "#include <linux/h.h>\nint g(int x)\n{\n\treturn x;\n}"),
            ("c.c", "#include \"sub/../sub/h.h\"\nint k;"),
            ("sub/h.h", header),
        ];
        assert_eq!(found(&files), ["a.c b.c: g", "a.c sub/h.h: h.h", "c.c sub/h.h: h.h"]);
    }
}
