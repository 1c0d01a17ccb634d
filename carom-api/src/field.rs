// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fields of the configuration, with their names on the command line and in JSON.

/// Choice of the field names in a message: the names on the command line, or the names in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// Command line: `--memory size`.
    Options,
    /// JSON: `memory.size`.
    Json,
}

/// Field of the configuration: an option or a key of an option, and its name in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    option: &'static str,
    option_key: &'static str,
    json: &'static str,
    json_key: &'static str,
}

impl Field {
    /// Creates a field from `option`, such as `--memory`, and its JSON name `json`.
    pub const fn new(option: &'static str, json: &'static str) -> Self {
        Self { option, option_key: "", json, json_key: "" }
    }

    /// Creates a field that has the same name everywhere: an option without a JSON field, or a JSON field without an option.
    pub const fn only(name: &'static str) -> Self {
        Self::new(name, name)
    }

    /// Returns the field for `key` of this option. The key has the same name in JSON.
    pub const fn key(self, key: &'static str) -> Self {
        self.keys(key, key)
    }

    /// Returns the field for `option_key` of this option, named `json_key` in JSON. An empty `option_key` stands for the option
    /// itself.
    pub const fn keys(self, option_key: &'static str, json_key: &'static str) -> Self {
        Self { option_key, json_key, ..self }
    }

    /// Name of the option, such as `--memory`.
    pub const fn option(self) -> &'static str {
        self.option
    }

    /// Name of the JSON field, such as `memory`.
    pub const fn json(self) -> &'static str {
        self.json
    }

    /// Key on the command line, or empty if the field is the option itself.
    pub(crate) const fn option_key(self) -> &'static str {
        self.option_key
    }

    /// Key in JSON, or empty if the field is the JSON field itself.
    pub(crate) const fn json_key(self) -> &'static str {
        self.json_key
    }

    /// Returns the full path: `--memory size` or `memory.size`.
    pub fn name(self, terms: Terms) -> String {
        let (head, separator, key) = match terms {
            Terms::Options => (self.option, " ", self.option_key),
            Terms::Json => (self.json, ".", self.json_key),
        };
        if key.is_empty() { head.into() } else { [head, separator, key].concat() }
    }

    /// Returns the option or JSON field with its value: `--kernel /k` or `payload.kernel: /k`.
    pub fn with_value(self, value: &str, terms: Terms) -> String {
        match terms {
            Terms::Options => [self.option, " ", value].concat(),
            Terms::Json => [&self.name(terms), ": ", value].concat(),
        }
    }

    /// Returns the text that asks a user to turn the field on: `--memory shared=on`, or `memory.shared to be true`.
    pub fn turned_on(self, terms: Terms) -> String {
        match terms {
            Terms::Options => self.name(terms) + "=on",
            Terms::Json => self.name(terms) + " to be true",
        }
    }
}

/// Declares constants for keys of `Self::OPTION`. Each key is also the name of a field of the type.
macro_rules! keys {
    ($($name:ident = $key:literal),* $(,)?) => {
        $(
            #[doc = concat!("[`Self::", $key, "`].")]
            pub const $name: $crate::field::Field = Self::OPTION.key($key);
        )*
    };
}
pub(crate) use keys;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_prints_its_path_as_each_front_end_spells_it() {
        let size = Field::new("--memory", "memory").key("size");
        assert_eq!((size.name(Terms::Options), size.name(Terms::Json)), ("--memory size".into(), "memory.size".into()));
        let kernel = Field::new("--kernel", "payload").keys("", "kernel");
        assert_eq!(
            (kernel.name(Terms::Options), kernel.name(Terms::Json)),
            ("--kernel".into(), "payload.kernel".into())
        );
        assert_eq!(kernel.with_value("/k", Terms::Options), "--kernel /k");
        assert_eq!(kernel.with_value("/k", Terms::Json), "payload.kernel: /k");
        assert_eq!(Field::only("budget").name(Terms::Options), "budget");
    }
}
