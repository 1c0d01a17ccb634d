// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Types whose JSON form is a string.

/// Implements the conversions through `FromStr` and `Display` that serde needs for `try_from = "String", into = "String"`.
macro_rules! text_form {
    ($text:ty) => {
        impl TryFrom<String> for $text {
            type Error = <Self as std::str::FromStr>::Err;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$text> for String {
            fn from(value: $text) -> Self {
                value.to_string()
            }
        }
    };
}
pub(crate) use text_form;
