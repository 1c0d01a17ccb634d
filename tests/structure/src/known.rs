// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Known findings that are not fixed yet. No finding may be added to the list.

use std::collections::BTreeSet;

/// Parses the list: one finding per line. Empty lines and lines that begin with `#` are ignored.
pub(crate) fn parse(text: &str) -> BTreeSet<String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).map(String::from).collect()
}

/// Returns the lines of the list whose finding no longer exists.
pub(crate) fn mended<'a>(known: &'a BTreeSet<String>, found: &'a BTreeSet<String>) -> Vec<&'a String> {
    known.difference(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_without_a_finding_is_reported() {
        let known = parse("# why\n\na.rs -> b.rs\n  b.rs\n");
        let found = BTreeSet::from(["a.rs -> b.rs".to_string()]);
        assert_eq!(mended(&known, &found), ["b.rs"]);
        assert!(mended(&found, &known).is_empty());
    }
}
