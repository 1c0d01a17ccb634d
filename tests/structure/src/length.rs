// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limit on the length of a file.

/// Maximum number of lines of a file that gives no reason for its length.
pub(crate) const MOST_LINES: usize = 600;
/// Start of the line that gives the reason.
pub(crate) const REASON: &str = "// Long because";
/// Number of lines at the start of a file that may contain the reason.
const HEAD: usize = 5;

/// Returns the complaint about the length of a file with this text, or `None`.
pub(crate) fn complaint(text: &str) -> Option<String> {
    let lines = text.lines().count();
    let has_reason = text.lines().take(HEAD).any(|line| line.starts_with(REASON) && line.len() > REASON.len());
    match (lines > MOST_LINES, has_reason) {
        (true, false) => Some(format!(
            "has {lines} lines, more than {MOST_LINES}: split the file, or give the reason below the licence line: `{REASON} …`"
        )),
        (false, true) => Some(format!("has {lines} lines, not more than {MOST_LINES}: remove the line `{REASON} …`")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_file_needs_a_reason_and_a_short_one_must_have_none() {
        let long = "fn f() {}\n".repeat(MOST_LINES + 1);
        assert!(complaint(&long).unwrap().starts_with("has 601 lines"));
        assert!(complaint(&format!("// SPDX\n\n{REASON} it is one table.\n{long}")).is_none());
        assert!(complaint(&format!("{REASON}\n{long}")).unwrap().starts_with("has 602 lines"));
        assert!(complaint(&format!("{long}{REASON} it is one table.\n")).is_some());
        assert!(complaint(&"fn f() {}\n".repeat(MOST_LINES)).is_none());
        assert!(complaint(&format!("{REASON} it is one table.\nfn f() {{}}\n")).unwrap().contains("has 2 lines"));
    }
}
