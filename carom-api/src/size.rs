// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sizes in bytes as users write them.

/// Parses a number of bytes with an optional suffix K, M or G (powers of 1024). The error states the expected form.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("'{text}' is not a size: write a number with an optional K, M or G, such as 512M"));
    }
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("'{text}' does not fit in 64 bits: use a smaller size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_powers_of_1024() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("2K"), Ok(2048));
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("3g"), Ok(3 << 30));
    }

    #[test]
    fn malformed_sizes_are_refused_with_their_text() {
        for text in ["", "M", "12X", "-1", "+5", "1.5G", " 1", "0x10", "ÿ"] {
            assert!(parse_size(text).unwrap_err().contains(text), "{text}");
        }
    }

    #[test]
    fn size_beyond_64_bits_is_refused() {
        assert!(parse_size("18446744073709551616").unwrap_err().contains("64 bits"));
        assert!(parse_size("17179869184G").unwrap_err().contains("64 bits"));
    }
}
