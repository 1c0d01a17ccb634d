// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which files of the host the program may reach beside those of the configuration.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::field::{Field, keys};
use crate::option_list::from_option;
use crate::text_form::text_form;

/// A file or directory of the host that the program may reach, with all that is below it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LandlockConfig {
    /// The file or directory, which must be there.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// What may be done with it: `r`, `w` or `rw`. To write is to make and remove files too.
    #[schema(value_type = String)]
    pub access: FileAccess,
}

/// What may be done with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileAccess {
    /// Reading it, and listing a directory.
    pub read: bool,
    /// Writing it, and making and removing what is in a directory.
    pub write: bool,
}

impl LandlockConfig {
    /// Whether it is there at all.
    pub const ENABLE: Field = Field::new("--landlock", "landlock_enable");
    /// The option.
    pub const OPTION: Field = Field::new("--landlock-rules", "landlock_rules");
    keys! { PATH = "path", ACCESS = "access" }
}

from_option!(LandlockConfig);

impl FromStr for FileAccess {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "r" => Ok(Self { read: true, write: false }),
            "w" => Ok(Self { read: false, write: true }),
            "rw" | "wr" => Ok(Self { read: true, write: true }),
            _ => Err(format!("'{text}' is none of r, w, rw")),
        }
    }
}

text_form!(FileAccess);

impl fmt::Display for FileAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.read, self.write) {
            (true, false) => "r",
            (false, true) => "w",
            _ => "rw",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rule_is_the_same_on_the_command_line_and_in_json() {
        for (access, read, write) in [("r", true, false), ("w", false, true), ("rw", true, true)] {
            let rule: LandlockConfig = format!("path=/p,access={access}").parse().unwrap();
            assert_eq!((rule.access, rule.path.to_str()), (FileAccess { read, write }, Some("/p")));
            let json = serde_json::json!({"path": "/p", "access": access});
            assert_eq!(serde_json::to_value(&rule).unwrap(), json);
            assert_eq!(serde_json::from_value::<LandlockConfig>(json).unwrap(), rule);
        }
        assert!(serde_json::from_str::<LandlockConfig>(r#"{"path": "/p", "access": ""}"#).is_err());
    }
}
