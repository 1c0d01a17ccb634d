// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The findings that are known and not yet mended. The list only ever gets shorter.

use std::collections::BTreeSet;

/// Reads a list: one finding a line; empty lines and those with `#` say nothing.
pub(crate) fn parse(text: &str) -> BTreeSet<String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from).collect()
}

/// Lines of the list that were not found any more.
pub(crate) fn mended<'a>(known: &'a BTreeSet<String>, found: &'a BTreeSet<String>) -> Vec<&'a String> {
    known.difference(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_what_is_not_found_any_more_is_named() {
        let known = parse("# why\n\na.rs -> b.rs\n  b.rs\n");
        let found = BTreeSet::from(["a.rs -> b.rs".to_string()]);
        assert_eq!(mended(&known, &found), ["b.rs"]);
        assert!(mended(&found, &known).is_empty());
    }
}
