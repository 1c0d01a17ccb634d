// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving a VM and restoring it: where to, and from where.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// How a URL of a directory begins.
const SCHEME: &str = "file://";

/// A directory of this host, as a URL: `file:///path`. The path is taken as it stands, as Cloud Hypervisor does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DirectoryUrl(PathBuf);

impl DirectoryUrl {
    /// The directory, an absolute path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl FromStr for DirectoryUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let path = url.strip_prefix(SCHEME).filter(|path| path.starts_with('/') && !path.contains('\0'));
        path.map(|path| Self(path.into())).ok_or_else(|| format!("'{url}' is no file:///PATH"))
    }
}

impl TryFrom<String> for DirectoryUrl {
    type Error = String;

    fn try_from(url: String) -> Result<Self, String> {
        url.parse()
    }
}

impl From<DirectoryUrl> for String {
    fn from(url: DirectoryUrl) -> Self {
        format!("{SCHEME}{}", url.0.display())
    }
}

/// Where a VM is to be saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSnapshotConfig {
    /// A directory that has no snapshot, or does not exist while its parent does: `file:///path`.
    #[schema(value_type = String)]
    pub destination_url: DirectoryUrl,
}

/// What a VM is to be restored from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoreConfig {
    /// The directory of a snapshot: `file:///path`.
    #[schema(value_type = String)]
    pub source_url: DirectoryUrl,
    /// All of the RAM is read now. Otherwise private RAM is read when it is touched, and the snapshot must stay as it is for the
    /// life of the VM.
    #[serde(default)]
    pub prefault: bool,
    /// The VM runs once it is restored. Otherwise it is paused, as it was when it was saved.
    #[serde(default)]
    pub resume: bool,
}

impl RestoreConfig {
    /// The option.
    pub const OPTION: Field = Field::only("--restore");
}

impl FromStr for RestoreConfig {
    type Err = ConfigError;

    /// Parses `source_url=file:///PATH[,prefault=on|off][,resume=on|off]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["source_url", "prefault", "resume"])?;
        let url = list.required("source_url")?.parse();
        let source_url = url.map_err(|rule: String| ConfigError::new(Self::OPTION.key("source_url"), rule))?;
        Ok(Self { source_url, prefault: list.toggle("prefault", false)?, resume: list.toggle("resume", false)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn option_and_body_say_the_same() {
        let option: RestoreConfig = "source_url=file:///a/b,prefault=on,resume=on".parse().unwrap();
        let body = r#"{"source_url":"file:///a/b","prefault":true,"resume":true}"#;
        assert_eq!(serde_json::from_str::<RestoreConfig>(body).unwrap(), option);
        assert_eq!(serde_json::to_string(&option).unwrap(), body);
        assert_eq!(option.source_url.path(), Path::new("/a/b"));
        let least: RestoreConfig = serde_json::from_str(r#"{"source_url":"file:///a"}"#).unwrap();
        assert!(!least.prefault && !least.resume);
    }

    #[test]
    fn what_is_no_url_of_a_directory_is_refused() {
        for url in ["", "/a", "a", "file://a", "file:///a\0b", "unix:/a", "https://a/"] {
            assert!(url.parse::<DirectoryUrl>().is_err(), "{url}");
        }
        let error = "source_url=/a".parse::<RestoreConfig>().unwrap_err().to_string();
        assert_eq!(error, "--restore source_url: '/a' is no file:///PATH");
        assert!("prefault=on".parse::<RestoreConfig>().is_err());
        assert!("source_url=file:///a,prefault=yes".parse::<RestoreConfig>().is_err());
    }
}
