// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest boots.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::CMDLINE_MAX;

/// What the guest boots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PayloadConfig {
    /// bzImage, or ELF image with a PVH entry point.
    #[schema(value_type = String)]
    pub kernel: PathBuf,
    /// Initial RAM file system.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// Kernel command line.
    #[serde(default, deserialize_with = "text_or_null")]
    #[schema(value_type = Option<String>, max_length = 65535)]
    pub cmdline: String,
}

impl PayloadConfig {
    /// [`Self::kernel`].
    pub const KERNEL: Field = Field::new("--kernel", "payload").keys("", "kernel");
    /// [`Self::initramfs`].
    pub const INITRAMFS: Field = Field::new("--initramfs", "payload").keys("", "initramfs");
    /// [`Self::cmdline`].
    pub const CMDLINE: Field = Field::new("--cmdline", "payload").keys("", "cmdline");

    /// Checks what can be checked without opening files.
    ///
    /// # Errors
    /// The command line is too long.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.cmdline.len() >= CMDLINE_MAX {
            let rule = format!("{} bytes long, must be below {CMDLINE_MAX}", self.cmdline.len());
            return Err(ConfigError::new(Self::CMDLINE, rule));
        }
        Ok(())
    }
}

/// Clients of Cloud Hypervisor may send null for no text.
fn text_or_null<'de, D: Deserializer<'de>>(text: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(text)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_that_does_not_fit_is_refused() {
        let with = |len| PayloadConfig { cmdline: "x".repeat(len), ..PayloadConfig::default() }.check();
        assert_eq!(with(CMDLINE_MAX - 1), Ok(()));
        assert_eq!(with(CMDLINE_MAX).unwrap_err().to_string(), "--cmdline: 65536 bytes long, must be below 65536");
    }

    #[test]
    fn command_line_may_be_null() {
        let payload: PayloadConfig = serde_json::from_str(r#"{"kernel": "/k", "cmdline": null}"#).unwrap();
        assert_eq!(payload.cmdline, "");
    }
}
