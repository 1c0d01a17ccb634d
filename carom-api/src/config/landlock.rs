// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host files that the program may access in addition to the files of the configuration.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::field::{Field, keys};
use crate::option_list::from_option;
use crate::text_form::text_form;

/// File or directory tree of the host that the program may access.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LandlockConfig {
    /// Path of the file or directory, which must exist.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Allowed access: `r`, `w` or `rw`. Write access includes creating and removing files.
    #[schema(value_type = String)]
    pub access: FileAccess,
}

/// Allowed access to a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileAccess {
    /// True if files may be read and directories listed.
    pub read: bool,
    /// True if files may be written, created and removed.
    pub write: bool,
}

impl LandlockConfig {
    /// Field that turns Landlock on.
    pub const ENABLE: Field = Field::new("--landlock", "landlock_enable");
    /// Option and JSON field of this configuration.
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
            _ => Err(format!("'{text}' is not one of r, w, rw")),
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
