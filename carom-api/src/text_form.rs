// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Types that are a text in JSON.

/// Lets serde read and write a type by its `FromStr` and `Display` (`try_from = "String", into = "String"`).
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
