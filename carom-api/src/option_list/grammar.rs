// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Syntax of option values: commas, brackets and double quotes. The syntax matches Cloud Hypervisor's parser (`option_parser/src/lib.rs`).
//!
//! A comma separates two parts, except in brackets or double quotes. Double quotes must enclose a complete value, or a complete element of
//! a list. Within double quotes, two double quotes stand for one double quote.

use thiserror::Error;

/// Syntax error in an option value.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum Malformed {
    /// Part without `=`.
    #[error("'{0}' is not key=value")]
    NoValue(String),
    /// Part without `=` that is not one of the allowed words.
    #[error("'{word}' is neither key=value nor one of {known}")]
    UnknownWord {
        /// The word.
        word: String,
        /// Allowed words.
        known: String,
    },
    /// Key that the option does not have.
    #[error("unknown key '{key}'; known keys: {known}")]
    UnknownKey {
        /// The key.
        key: String,
        /// Keys of the option.
        known: String,
    },
    /// Key that is given twice.
    #[error("'{0}' is given twice: leave one out")]
    Repeated(String),
    /// Double quote without its closing quote.
    #[error("a double quote is not closed: add the closing quote")]
    UnclosedQuote,
    /// Double quotes that enclose only part of a value.
    #[error(
        "'{0}' has a double quote in the middle: enclose the whole value in double quotes, and write each double quote within it twice"
    )]
    StrayQuote(String),
    /// List without its closing bracket.
    #[error("a list is not closed: ']' is missing")]
    UnclosedList,
    /// Closing bracket without an opening bracket.
    #[error("a list is not opened: '[' is missing before ']'")]
    UnopenedList,
    /// An empty part.
    #[error("empty part in '{0}': remove the extra comma")]
    Empty(String),
}

/// Splits `text` at commas outside of brackets and double quotes. The parts keep their brackets and quotes.
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

/// Returns the elements of the list `text` as written, or `None` if `text` is not in brackets.
pub(super) fn elements(text: &str) -> Option<Result<Vec<&str>, Malformed>> {
    let inner = text.strip_prefix('[')?.strip_suffix(']')?;
    Some(if inner.trim().is_empty() { Ok(Vec::new()) } else { split_at_commas(inner) })
}

/// Removes the double quotes of a value or list element. A list keeps its brackets, and its elements lose their quotes.
///
/// # Errors
/// Double quotes enclose only part of a value. Carom does not guess which file such a value names.
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
                // `outside` is the character before an opening quote, or after a closing quote.
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
    fn quotes_around_part_of_a_value_are_refused() {
        for text in
            [r#"/a"b"c"#, r#"/a"b""#, r#""a"b"#, r#"a"""#, r#"["a"b]"#, r#"[a"b"]"#, r#"[1].img"x""#, r#"/a" ""#]
        {
            assert_eq!(unquoted(text), Err(Malformed::StrayQuote(text.into())), "{text}");
        }
    }

    #[test]
    fn at_sign_in_quotes_does_not_split_a_pair() {
        assert_eq!(split_at_sign("a@[1,2]"), Some(("a", "[1,2]")));
        assert_eq!(split_at_sign(r#""a@b"@1"#), Some((r#""a@b""#, "1")));
        assert_eq!(split_at_sign(r#""a@b""#), None);
    }
}
