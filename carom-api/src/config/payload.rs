// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest boots.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::Field;
use crate::left_out::or_default;
use crate::limits::CMDLINE_MAX;

/// What the guest boots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PayloadConfig {
    /// bzImage, or ELF image with a PVH entry point. This or `firmware` is needed.
    #[schema(value_type = Option<String>)]
    pub kernel: Option<PathBuf>,
    /// Firmware, by which the guest boots from a disk: ELF image with a PVH entry point.
    #[schema(value_type = Option<String>)]
    pub firmware: Option<PathBuf>,
    /// Initial RAM file system of `kernel`.
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

    /// A kernel and nothing else.
    pub fn of_kernel(path: impl Into<PathBuf>) -> Self {
        Self { kernel: Some(path.into()), ..Self::default() }
    }

    /// Firmware and nothing else.
    pub fn of_firmware(path: impl Into<PathBuf>) -> Self {
        Self { firmware: Some(path.into()), ..Self::default() }
    }

    /// Checks what can be checked without opening files.
    ///
    /// # Errors
    /// There is nothing to boot, or firmware and what it has no use for; the command line is too long.
    pub fn check(&self) -> Result<(), ConfigError> {
        ensure_in_terms(self.firmware.is_some() || self.kernel.is_some(), Self::KERNEL, |terms| {
            format!("is missing, and {} too: one of them is what boots", Self::FIRMWARE.name(terms))
        })?;
        for (field, given) in [
            (Self::KERNEL, self.kernel.is_some()),
            (Self::INITRAMFS, self.initramfs.is_some()),
            (Self::CMDLINE, !self.cmdline.is_empty()),
        ] {
            ensure_in_terms(self.firmware.is_none() || !given, field, |terms| {
                let firmware = Self::FIRMWARE.name(terms);
                format!("does not go with {firmware}: the boot loader on the guest's disk has its own")
            })?;
        }
        let len = self.cmdline.len();
        ensure(len < CMDLINE_MAX, Self::CMDLINE, || format!("{len} bytes long, must be below {CMDLINE_MAX}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    #[test]
    fn command_line_that_does_not_fit_is_refused() {
        let with = |len| PayloadConfig { cmdline: "x".repeat(len), ..PayloadConfig::of_kernel("/k") }.check();
        assert_eq!(with(CMDLINE_MAX - 1), Ok(()));
        assert_eq!(with(CMDLINE_MAX).unwrap_err().to_string(), "--cmdline: 65536 bytes long, must be below 65536");
    }

    #[test]
    fn payload_needs_kernel_or_firmware_and_firmware_stands_alone() {
        let refused = |config: PayloadConfig| {
            let error = config.check().unwrap_err();
            (error.to_string(), error.explain(Terms::Json))
        };
        let (option, field) = refused(PayloadConfig::default());
        assert_eq!(option, "--kernel: is missing, and --firmware too: one of them is what boots");
        assert_eq!(field, "payload.kernel: is missing, and payload.firmware too: one of them is what boots");
        assert_eq!(PayloadConfig::of_firmware("/f").check(), Ok(()));
        let both = PayloadConfig { kernel: Some("/k".into()), ..PayloadConfig::of_firmware("/f") };
        assert!(refused(both).1.starts_with("payload.kernel: does not go with payload.firmware: "));
        let initramfs = PayloadConfig { initramfs: Some("/i".into()), ..PayloadConfig::of_firmware("/f") };
        assert!(refused(initramfs).0.starts_with("--initramfs: does not go with --firmware: "));
        let cmdline = PayloadConfig { cmdline: "c".into(), ..PayloadConfig::of_firmware("/f") };
        assert!(refused(cmdline).0.starts_with("--cmdline: does not go with --firmware: "));
    }

    #[test]
    fn command_line_may_be_null() {
        let payload: PayloadConfig = serde_json::from_str(r#"{"kernel": "/k", "cmdline": null}"#).unwrap();
        assert_eq!(payload.cmdline, "");
    }
}
