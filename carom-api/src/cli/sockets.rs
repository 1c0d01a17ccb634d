// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Values of options that name a file, an open descriptor or a network address.

use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// Option whose value is a [`FileOrFd`].
pub trait OptionName {
    /// Name of the option.
    const OPTION: Field;
    /// True if a value without a key is a path, as in Cloud Hypervisor.
    const BARE_PATH: bool = false;
}

/// Option `--api-socket`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApiSocketOption;

impl OptionName for ApiSocketOption {
    const OPTION: Field = Field::only("--api-socket");
    const BARE_PATH: bool = true;
}

/// Option `--event-monitor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventMonitorOption;

impl OptionName for EventMonitorOption {
    const OPTION: Field = Field::only("--event-monitor");
}

/// Option `--crash-report`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrashReportOption;

impl OptionName for CrashReportOption {
    const OPTION: Field = Field::only("--crash-report");
    const BARE_PATH: bool = true;
}

/// File path, or an open descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileOrFd<O> {
    /// Path of the file.
    Path(PathBuf),
    /// Descriptor that the parent process left open.
    Fd(i32, PhantomData<O>),
}

impl<O> FileOrFd<O> {
    /// Returns the path, if this is a file.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Fd(..) => None,
        }
    }

    /// Returns the descriptor number, if this is a descriptor.
    pub fn fd(&self) -> Option<i32> {
        match self {
            Self::Path(_) => None,
            Self::Fd(number, _) => Some(*number),
        }
    }
}

impl<O: OptionName> std::str::FromStr for FileOrFd<O> {
    type Err = ConfigError;

    /// Parses `path=FILE` or `fd=NUMBER`. If [`OptionName::BARE_PATH`] is true, a path alone is allowed too.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let wrong =
            || ConfigError::new(O::OPTION, format!("'{text}' must have exactly one of path=FILE and fd=NUMBER"));
        if !text.contains('=') {
            return if O::BARE_PATH && !text.is_empty() { Ok(Self::Path(text.into())) } else { Err(wrong()) };
        }
        let list = OptionList::parse(O::OPTION, text, &["path", "fd"])?;
        match (list.get("path"), list.get("fd")) {
            (Some(path), None) => Ok(Self::Path(path.into())),
            (None, Some(number)) => {
                let rule =
                    || ConfigError::new(O::OPTION.key("fd"), format!("'{number}' is not a descriptor number above 2"));
                number.parse().ok().filter(|fd| *fd > 2).map(|fd| Self::Fd(fd, PhantomData)).ok_or_else(rule)
            }
            _ => Err(wrong()),
        }
    }
}

/// Value of `--metrics`: a TCP address. With port 0, the kernel chooses a free port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsAddress(pub SocketAddr);

impl OptionName for MetricsAddress {
    const OPTION: Field = Field::only("--metrics");
}

impl std::str::FromStr for MetricsAddress {
    type Err = ConfigError;

    /// Parses `tcp=ADDRESS:PORT`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let address = text.strip_prefix("tcp=").ok_or_else(|| {
            ConfigError::new(Self::OPTION, format!("'{text}' is not tcp=ADDRESS:PORT, such as tcp=127.0.0.1:9100"))
        })?;
        let rule = || format!("'{address}' is not an IP address with a port, such as 127.0.0.1:9100 or [::1]:9100");
        address.parse().map(Self).map_err(|_| ConfigError::new(Self::OPTION.key("tcp"), rule()))
    }
}
