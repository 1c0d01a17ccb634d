// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Boot payload of the guest.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::Field;
use crate::left_out::or_default;
use crate::limits::CMDLINE_MAX;

/// Boot payload of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PayloadConfig {
    /// Kernel: a bzImage, or an ELF image with a PVH entry point. Either `kernel` or `firmware` is required.
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// Firmware that boots the guest from a disk: an ELF image with a PVH entry point.
    #[schema(value_type = Option<String>)]
    pub firmware: Option<PathBuf>,
    /// Initial RAM file system for `kernel`.
    #[schema(value_type = Option<String>)]
    pub initramfs: Option<PathBuf>,
    /// Command line of `kernel`.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<String>, max_length = 65535)]
    pub cmdline: String,
}

impl PayloadConfig {
    /// [`Self::kernel`].
    pub const KERNEL: Field = Field::new("--kernel", "payload").keys("", "kernel");
    /// [`Self::firmware`].
    pub const FIRMWARE: Field = Field::new("--firmware", "payload").keys("", "firmware");
    /// [`Self::initramfs`].
    pub const INITRAMFS: Field = Field::new("--initramfs", "payload").keys("", "initramfs");
    /// [`Self::cmdline`].
    pub const CMDLINE: Field = Field::new("--cmdline", "payload").keys("", "cmdline");

    /// Returns a payload that consists only of a kernel.
    pub fn of_kernel(path: impl Into<PathBuf>) -> Self {
        Self { kernel: Some(path.into()), ..Self::default() }
    }

    /// Returns a payload that consists only of firmware.
    pub fn of_firmware(path: impl Into<PathBuf>) -> Self {
        Self { firmware: Some(path.into()), ..Self::default() }
    }

    /// Checks all rules that do not require opening files.
    ///
    /// # Errors
    /// Kernel and firmware are both missing, firmware is combined with a kernel, initramfs or command line, or the command line is too
    /// long.
    pub fn check(&self) -> Result<(), ConfigError> {
        ensure_in_terms(self.firmware.is_some() || self.kernel.is_some(), Self::KERNEL, |terms| {
            format!("is required unless {} is given", Self::FIRMWARE.name(terms))
        })?;
        for (field, given) in [
            (Self::KERNEL, self.kernel.is_some()),
            (Self::INITRAMFS, self.initramfs.is_some()),
            (Self::CMDLINE, !self.cmdline.is_empty()),
        ] {
            ensure_in_terms(self.firmware.is_none() || !given, field, |terms| {
                let (firmware, name) = (Self::FIRMWARE.name(terms), field.name(terms));
                format!(
                    "cannot be combined with {firmware}: leave {name} out, because the boot loader on the guest's disk supplies kernel, initramfs and command line"
                )
            })?;
        }
        let len = self.cmdline.len();
        ensure(len < CMDLINE_MAX, Self::CMDLINE, || {
            format!("is {len} bytes long, but must be shorter than {CMDLINE_MAX} bytes")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    #[test]
    fn too_long_command_line_is_refused() {
        let with = |len| PayloadConfig { cmdline: "x".repeat(len), ..PayloadConfig::of_kernel("/k") }.check();
        assert_eq!(with(CMDLINE_MAX - 1), Ok(()));
        assert_eq!(
            with(CMDLINE_MAX).unwrap_err().to_string(),
            "--cmdline: is 65536 bytes long, but must be shorter than 65536 bytes"
        );
    }

    #[test]
    fn payload_is_either_a_kernel_or_firmware_alone() {
        let refused = |config: PayloadConfig| {
            let error = config.check().unwrap_err();
            (error.to_string(), error.explain(Terms::Json))
        };
        let (option, field) = refused(PayloadConfig::default());
        assert_eq!(option, "--kernel: is required unless --firmware is given");
        assert_eq!(field, "payload.kernel: is required unless payload.firmware is given");
        assert_eq!(PayloadConfig::of_firmware("/f").check(), Ok(()));
        let both = PayloadConfig { kernel: Some("/k".into()), ..PayloadConfig::of_firmware("/f") };
        assert!(refused(both).1.starts_with("payload.kernel: cannot be combined with payload.firmware: "));
        let initramfs = PayloadConfig { initramfs: Some("/i".into()), ..PayloadConfig::of_firmware("/f") };
        assert!(refused(initramfs).0.starts_with("--initramfs: cannot be combined with --firmware: "));
        let cmdline = PayloadConfig { cmdline: "c".into(), ..PayloadConfig::of_firmware("/f") };
        assert!(refused(cmdline).0.starts_with("--cmdline: cannot be combined with --firmware: "));
    }

    #[test]
    fn command_line_may_be_null() {
        let payload: PayloadConfig = serde_json::from_str(r#"{"kernel": "/k", "cmdline": null}"#).unwrap();
        assert_eq!(payload.cmdline, "");
    }
}
