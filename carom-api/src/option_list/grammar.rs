// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Commas, brackets and double quotes of an option, as Cloud Hypervisor reads them (its `option_parser/src/lib.rs`).
//!
//! A comma separates two parts unless it is in brackets or in double quotes. Double quotes enclose a whole value, or a whole element
//! of a list. Within them, two double quotes stand for one.

use thiserror::Error;

/// Reason why an argument cannot be read.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Malformed {
    /// A part without `=`.
    #[error("'{0}' is no key=value")]
    NoValue(String),
    /// A part without `=` where words may stand, but not this one.
    #[error("'{word}' is neither key=value nor one of {known}")]
    UnknownWord {
        /// The word.
        word: String,
        /// Words of the option.
        known: String,
    },
    /// A key that the option does not have.
    #[error("unknown key '{key}', known are: {known}")]
    UnknownKey {
        /// The key.
        key: String,
        /// Keys of the option.
        known: String,
    },
    /// A key that is given twice.
    #[error("'{0}' is given twice")]
    Repeated(String),
    /// A double quote is not closed.
    #[error("a double quote is not closed")]
    UnclosedQuote,
    /// A double quote within a value that does not enclose all of it.
    #[error(
        "'{0}' has a double quote in the middle: enclose the whole value in double quotes, and double those within"
    )]
    StrayQuote(String),
    /// A list is not closed.
    #[error("a list is not closed: ']' is missing")]
    UnclosedList,
    /// A list is closed that was not opened.
    #[error("a list is closed that was not opened: '[' is missing before ']'")]
    UnopenedList,
    /// An empty part.
    #[error("empty part in '{0}'")]
    Empty(String),
}

/// Splits `text` at the commas outside of brackets and double quotes, which stay in the parts.
pub(super) fn split_at_commas(text: &str) -> Result<Vec<&str>, Malformed> {
    let (mut parts, mut start) = (Vec::new(), 0);
    let (mut quoted, mut lists) = (false, 0usize);
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            _ if quoted => {}
            '[' => lists += 1,
            ']' => lists = lists.checked_sub(1).ok_or(Malformed::UnopenedList)?,
            ',' if lists == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    match (quoted, lists) {
        (true, _) => Err(Malformed::UnclosedQuote),
        (false, 0) => Ok(parts),
        (false, _) => Err(Malformed::UnclosedList),
    }
}

/// Splits `text` at the first `@` outside of double quotes.
pub(super) fn split_at_sign(text: &str) -> Option<(&str, &str)> {
    let mut quoted = false;
    let sign = text.char_indices().find(|(_, c)| {
        quoted ^= *c == '"';
        *c == '@' && !quoted
    });
    sign.map(|(at, _)| (&text[..at], &text[at + 1..]))
}

/// Elements of the list `text`, each as it is written; `None` if `text` is not in brackets.
pub(super) fn elements(text: &str) -> Option<Result<Vec<&str>, Malformed>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    Some(if inner.trim().is_empty() { Ok(Vec::new()) } else { split_at_commas(inner) })
}

/// Removes the double quotes of a value or of an element of a list. A list keeps its brackets, and loses the quotes of its elements.
///
/// # Errors
/// A double quote encloses only a part of a value: which file that names would be a guess.
pub(super) fn unquoted(text: &str) -> Result<String, Malformed> {
    let stray = || Malformed::StrayQuote(text.to_string());
    let (mut plain, mut quoted, mut lists) = (String::with_capacity(text.len()), false, 0usize);
    let mut chars = text.chars().peekable();
    let mut before = None;
    while let Some(c) = chars.next() {
        let next = chars.peek().copied();
        match c {
            '"' if quoted && next == Some('"') => {
                chars.next();
                plain.push('"');
            }
            '"' => {
                // The character outside: before the first quote, or after the last one.
                let (outside, marks) = if quoted { (next, [']', ',', '@']) } else { (before, ['[', ',', '@']) };
                let at_mark = |c: char| marks.contains(&c) || c.is_whitespace();
                if outside.is_some_and(|c| lists == 0 || !at_mark(c)) {
                    return Err(stray());
                }
                quoted = !quoted;
            }
            c => {
                match c {
                    '[' if !quoted => lists += 1,
                    ']' if !quoted => lists = lists.saturating_sub(1),
                    _ => {}
                }
                plain.push(c);
            }
        }
        before = Some(c);
    }
    if quoted { Err(Malformed::UnclosedQuote) } else { Ok(plain) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_brackets_or_quotes_split_nothing() {
        let split = |text| split_at_commas(text).unwrap();
        assert_eq!(split("a=1,b=[2,[3,4]],c=\"5,6\""), ["a=1", "b=[2,[3,4]]", "c=\"5,6\""]);
        assert_eq!(split("a=\"[\",b=\"]\""), ["a=\"[\"", "b=\"]\""]);
        assert_eq!(split("path=/disk[1,2].img,id=x"), ["path=/disk[1,2].img", "id=x"]);
        assert_eq!(split(","), ["", ""]);
    }

    #[test]
    fn brackets_and_quotes_must_match() {
        for (text, error) in [
            ("[a,b", Malformed::UnclosedList),
            ("[[a]", Malformed::UnclosedList),
            ("a]", Malformed::UnopenedList),
            ("[a]]", Malformed::UnopenedList),
            ("\"a", Malformed::UnclosedQuote),
            ("\"\"\"", Malformed::UnclosedQuote),
            ("[\"]", Malformed::UnclosedQuote),
        ] {
            assert_eq!(split_at_commas(text), Err(error), "{text}");
        }
    }

    #[test]
    fn doubled_quote_within_quotes_is_one_quote() {
        for (text, plain) in [
            (r#""/we""ird""#, r#"/we"ird"#),
            (r#""""""#, "\""),
            (r#""""a""""#, "\"a\""),
            (r#""""#, ""),
            (r#""a,b=c""#, "a,b=c"),
            (r#"["a,b",c]"#, "[a,b,c]"),
            (r#"["@""b"@[1,2]]"#, "[@\"b@[1,2]]"),
            (r#"[ "a" , b ]"#, "[ a , b ]"),
            ("/plain", "/plain"),
        ] {
            assert_eq!(unquoted(text).as_deref(), Ok(plain), "{text}");
        }
    }

    #[test]
    fn quote_around_a_part_of_a_value_is_refused() {
        for text in
            [r#"/a"b"c"#, r#"/a"b""#, r#""a"b"#, r#"a"""#, r#"["a"b]"#, r#"[a"b"]"#, r#"[1].img"x""#, r#"/a" ""#]
        {
            assert_eq!(unquoted(text), Err(Malformed::StrayQuote(text.into())), "{text}");
        }
    }

    #[test]
    fn sign_in_quotes_splits_no_pair() {
        assert_eq!(split_at_sign("a@[1,2]"), Some(("a", "[1,2]")));
        assert_eq!(split_at_sign(r#""a@b"@1"#), Some((r#""a@b""#, "1")));
        assert_eq!(split_at_sign(r#""a@b""#), None);
    }
}
