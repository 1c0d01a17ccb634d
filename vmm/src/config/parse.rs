// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! From the command line's arguments to the configuration.

use std::path::PathBuf;
use std::str::FromStr;

use super::{
    ConfigError, ConsoleConfig, ConsoleMode, CpusConfig, DEFAULT_BOUNCE_SIZE, DeviceConfig, IommuBounceConfig,
    IommuPoll, MemoryConfig, OptionList, PlatformConfig, UserDeviceConfig, parse_size,
};

/// Parses an argument; `field` is the option's name for errors.
fn list<'a>(field: &str, text: &str, keys: &[&'a str]) -> Result<OptionList<'a>, ConfigError> {
    OptionList::parse(text, keys).map_err(|error| ConfigError::new(field, error.to_string()))
}

/// `default` where there is no value.
fn toggle(field: &str, value: Option<&str>, default: bool) -> Result<bool, ConfigError> {
    match value {
        None => Ok(default),
        Some("off") => Ok(false),
        Some("on") => Ok(true),
        Some(other) => Err(ConfigError::new(field, format!("'{other}' is neither 'on' nor 'off'"))),
    }
}

fn size(field: &str, value: &str) -> Result<u64, ConfigError> {
    parse_size(value).map_err(|rule| ConfigError::new(field, rule))
}

fn required<'v>(field: &str, list: &'v OptionList<'_>, key: &str) -> Result<&'v str, ConfigError> {
    match list.get(key) {
        Some(value) if !value.is_empty() => Ok(value),
        _ => Err(ConfigError::new(field, format!("'{key}=' is needed"))),
    }
}

impl FromStr for CpusConfig {
    type Err = ConfigError;

    /// Parses `boot=N[,max=N]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = list("--cpus", text, &["boot", "max"])?;
        let number = |field: &str, text: &str| {
            text.parse().map_err(|_| ConfigError::new(field, format!("'{text}' is no number of CPUs")))
        };
        let boot_vcpus = number("--cpus boot", required("--cpus", &list, "boot")?)?;
        let max_vcpus = list.get("max").map_or(Ok(boot_vcpus), |max| number("--cpus max", max))?;
        Ok(Self { boot_vcpus, max_vcpus })
    }
}

impl FromStr for MemoryConfig {
    type Err = ConfigError;

    /// Parses `size=SIZE[,shared=on|off][,hugepages=on|off][,thp=on|off]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = list("--memory", text, &["size", "shared", "hugepages", "thp"])?;
        Ok(Self {
            size: size("--memory size", required("--memory", &list, "size")?)?,
            shared: toggle("--memory shared", list.get("shared"), false)?,
            hugepages: toggle("--memory hugepages", list.get("hugepages"), false)?,
            thp: toggle("--memory thp", list.get("thp"), true)?,
        })
    }
}

impl FromStr for DeviceConfig {
    type Err = ConfigError;

    /// Parses `path=PATH[,iommu=on|off][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = list("--device", text, &["path", "iommu", "id"])?;
        let path = PathBuf::from(required("--device", &list, "path")?);
        let iommu = toggle("--device iommu", list.get("iommu"), false)?;
        let id = list.get("id").map(str::to_string);
        let device = Self { path, iommu, id };
        device.check_id()?;
        Ok(device)
    }
}

impl FromStr for UserDeviceConfig {
    type Err = ConfigError;

    /// Parses `socket=PATH[,iommu=on|off][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = list("--user-device", text, &["socket", "iommu", "id"])?;
        let socket = PathBuf::from(required("--user-device", &list, "socket")?);
        let iommu = toggle("--user-device iommu", list.get("iommu"), false)?;
        let id = list.get("id").map(str::to_string);
        let device = Self { socket, iommu, id };
        device.check_id()?;
        Ok(device)
    }
}

impl FromStr for PlatformConfig {
    type Err = ConfigError;

    /// Parses `[iommufd=on|off][,iommu_poll=auto|on|off]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = list("--platform", text, &["iommufd", "iommu_poll"])?;
        let iommufd = toggle("--platform iommufd", list.get("iommufd"), false)?;
        let iommu_poll = match list.get("iommu_poll") {
            None | Some("auto") => IommuPoll::Auto,
            Some("on") => IommuPoll::On,
            Some("off") => IommuPoll::Off,
            Some(other) => {
                let rule = format!("'{other}' is none of auto, on, off");
                return Err(ConfigError::new("--platform iommu_poll", rule));
            }
        };
        Ok(Self { iommufd, iommu_poll })
    }
}

impl FromStr for ConsoleConfig {
    type Err = ConfigError;

    /// Parses `off`, `null`, `tty` or `file=PATH`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let plain = |mode| Ok(Self { mode, file: None });
        match text {
            "off" => plain(ConsoleMode::Off),
            "null" => plain(ConsoleMode::Null),
            "tty" => plain(ConsoleMode::Tty),
            _ => match text.strip_prefix("file=") {
                Some(path) if !path.is_empty() => Ok(Self { mode: ConsoleMode::File, file: Some(path.into()) }),
                _ => Err(ConfigError::new("--serial", format!("'{text}' is none of off, null, tty, file=PATH"))),
            },
        }
    }
}

impl FromStr for IommuBounceConfig {
    type Err = ConfigError;

    /// Parses `[size=SIZE][,max=SIZE][,threshold=auto|SIZE][,hugepages=on|off]`; the text may be empty.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = ["size", "max", "threshold", "hugepages"];
        let list = if text.is_empty() {
            OptionList::parse("size=64M", &keys).expect("a constant that parses")
        } else {
            list("--iommu-bounce", text, &keys)?
        };
        let bytes = list.get("size").map_or(Ok(DEFAULT_BOUNCE_SIZE), |value| size("--iommu-bounce size", value))?;
        let max = list.get("max").map_or(Ok(bytes), |value| size("--iommu-bounce max", value))?;
        let field = "--iommu-bounce threshold";
        let threshold = match list.get("threshold") {
            None | Some("auto") => None,
            Some(value) => match u32::try_from(size(field, value)?) {
                Ok(bytes) if bytes > 0 => Some(bytes),
                _ => return Err(ConfigError::new(field, format!("'{value}' is neither 'auto' nor 1 to 4294967295"))),
            },
        };
        let hugepages = toggle("--iommu-bounce hugepages", list.get("hugepages"), false)?;
        Ok(Self { size: bytes, max, threshold, hugepages })
    }
}
