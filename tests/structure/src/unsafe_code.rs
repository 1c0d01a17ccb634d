// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks the table of unsafe code in `docs/security.md`. The table must have a row for each file with unsafe code, except tests, and no
//! other row.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Meta};

/// Path of the document in the workspace.
pub(crate) const DOCUMENT: &str = "docs/security.md";
/// Heading of the document's table.
const HEADING: &str = "## Unsafe code";

/// Returns the complaints about the document. `files` are the files with unsafe code.
pub(crate) fn complaints(document: &str, files: &BTreeSet<String>) -> Vec<String> {
    let listed = listed(document);
    let missing = files.difference(&listed);
    let missing = missing.map(|file| {
        format!("{DOCUMENT}: {file} has unsafe code, but is not in the table: add a row that names its tests")
    });
    let stale = listed.difference(files).map(|file| format!("{DOCUMENT}: {file} has no unsafe code: remove the row"));
    missing.chain(stale).collect()
}

/// Returns the files in the first column of the table.
fn listed(document: &str) -> BTreeSet<String> {
    let section = document.lines().skip_while(|line| *line != HEADING).skip(1);
    let rows = section.take_while(|line| !line.starts_with("## ")).filter_map(|line| line.strip_prefix("| `"));
    rows.filter_map(|row| Some(row.split_once('`')?.0.to_string())).collect()
}

/// True if a module with these attributes exists only in tests or fuzzing.
pub(crate) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("cfg") && names_test(list.tokens.clone()),
        _ => false,
    })
}

/// True if a condition is `test`, or an `any(…)` that begins with `test`.
fn names_test(condition: TokenStream) -> bool {
    let mut tokens = condition.into_iter();
    match tokens.next() {
        Some(TokenTree::Ident(name)) if name == "test" => true,
        Some(TokenTree::Ident(name)) if name == "any" => match tokens.next() {
            Some(TokenTree::Group(group)) => names_test(group.stream()),
            _ => false,
        },
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_names_each_file_and_no_other() {
        let document = "| `x.rs` | no |\n## Unsafe code\n| file | tests |\n| --- | --- |\n| `a.rs` | one |\n| `b.rs` | two |\n## More\n| `c.rs` | |\n";
        let files = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        assert!(complaints(document, &files(&["a.rs", "b.rs"])).is_empty());
        let reported = complaints(document, &files(&["b.rs", "c.rs"]));
        assert!(
            reported.len() == 2 && reported[0].contains("c.rs has unsafe code") && reported[1].contains("a.rs has no"),
            "{reported:?}"
        );
    }

    #[test]
    fn modules_of_tests_are_recognised_by_their_condition() {
        let is_for_tests = |text: &str| {
            let item: syn::ItemMod = syn::parse_str(text).unwrap();
            is_for_tests(&item.attrs)
        };
        assert!(is_for_tests("#[cfg(test)] mod a {}"));
        assert!(is_for_tests("#[cfg(any(test, feature = \"fuzzing\"))] mod a {}"));
        assert!(!is_for_tests("#[cfg(not(test))] mod a {}"));
        assert!(!is_for_tests("#[cfg(feature = \"test\")] mod a {}"));
        assert!(!is_for_tests("/// test\nmod a {}"));
    }
}
