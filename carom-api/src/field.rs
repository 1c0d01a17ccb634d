// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fields of the configuration. Each has one path, which the command line and JSON print in their own form.

/// In whose words a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Terms {
    /// Those of the command line: `--memory size`.
    Options,
    /// Those of JSON: `memory.size`.
    Json,
}

/// A field of the configuration: an option or one of its keys, and the same in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    option: &'static str,
    option_key: &'static str,
    json: &'static str,
    json_key: &'static str,
}

impl Field {
    /// The option `option`, such as `--memory`, which is the field `json` of the configuration.
    pub const fn new(option: &'static str, json: &'static str) -> Self {
        Self { option, option_key: "", json, json_key: "" }
    }

    /// What has the same name everywhere: an option that JSON has not, or a field that the command line has not.
    pub const fn only(name: &'static str) -> Self {
        Self::new(name, name)
    }

    /// The key `key` of this option, which JSON calls the same.
    pub const fn key(self, key: &'static str) -> Self {
        self.keys(key, key)
    }

    /// The key `option_key` of this option, which JSON calls `json_key`. Where `option_key` is empty, the option itself says it.
    pub const fn keys(self, option_key: &'static str, json_key: &'static str) -> Self {
        Self { option_key, json_key, ..self }
    }

    /// The option, such as `--memory`.
    pub const fn option(self) -> &'static str {
        self.option
    }

    /// The field of the configuration in JSON, such as `memory`.
    pub const fn json(self) -> &'static str {
        self.json
    }

    /// The key on the command line; empty where the option itself says it.
    pub(crate) const fn option_key(self) -> &'static str {
        self.option_key
    }

    /// The key in JSON.
    pub(crate) const fn json_key(self) -> &'static str {
        self.json_key
    }

    /// The whole path: `--memory size` or `memory.size`.
    pub fn name(self, terms: Terms) -> String {
        let (head, separator, key) = match terms {
            Terms::Options => (self.option, " ", self.option_key),
            Terms::Json => (self.json, ".", self.json_key),
        };
        if key.is_empty() { head.into() } else { [head, separator, key].concat() }
    }

    /// A value that the option has, or the field in JSON: `--kernel /k` or `payload.kernel: /k`.
    pub fn with_value(self, value: &str, terms: Terms) -> String {
        match terms {
            Terms::Options => [self.option, " ", value].concat(),
            Terms::Json => [&self.name(terms), ": ", value].concat(),
        }
    }

    /// The field turned on, to be told in a message: `--memory shared=on`, or `memory.shared to be true`.
    pub fn turned_on(self, terms: Terms) -> String {
        match terms {
            Terms::Options => self.name(terms) + "=on",
            Terms::Json => self.name(terms) + " to be true",
        }
    }
}

/// Declares the fields of some keys of `Self::OPTION`. Each key has the name of a field of the type.
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
