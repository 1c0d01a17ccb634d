// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Option keys of Cloud Hypervisor that Carom does not support. Carom accepts such a key with its neutral value, as in the API.

use crate::error::{ConfigError, one_line};
use crate::field::Field;
use crate::size::parse_size;
use crate::unsupported::{Neutral, UNSUPPORTED};

/// Unsupported key, with its neutral value.
#[derive(Clone, Copy)]
pub(super) struct UnsupportedKey {
    name: &'static str,
    neutral: Neutral,
    instead: &'static str,
}

const DESCRIPTORS: &str = "pass descriptors with the API request vm.restore (SCM_RIGHTS)";

/// Unsupported keys of `--restore`, which is not part of the configuration.
const OF_RESTORE: &[UnsupportedKey] = &[
    UnsupportedKey { name: "net_fds", neutral: Neutral::NoElements, instead: DESCRIPTORS },
    UnsupportedKey {
        name: "vfio_fds",
        neutral: Neutral::NoElements,
        instead: "a VM with host devices cannot be saved or restored",
    },
    UnsupportedKey { name: "iommufd_fd", neutral: Neutral::Null, instead: "Carom opens IOMMUFD itself" },
];

/// Finds the unsupported key `key` of `option`. Cloud Hypervisor writes some keys with a leading underscore.
pub(super) fn find(option: Field, key: &str) -> Option<UnsupportedKey> {
    if option.option() == "--restore" {
        return OF_RESTORE.iter().copied().find(|of_restore| of_restore.name == key);
    }
    let key = key.strip_prefix("_disable").map_or(key, |_| &key[1..]);
    UNSUPPORTED.iter().find_map(|field| {
        let name = field.path.strip_prefix(option.json())?.strip_prefix('.')?;
        let name = name.strip_prefix("*.").unwrap_or(name);
        (name == key).then_some(UnsupportedKey { name, neutral: field.neutral, instead: field.instead })
    })
}

impl UnsupportedKey {
    /// Returns the name of the key in the configuration.
    pub(super) fn name(self) -> &'static str {
        self.name
    }

    /// Checks that `value` is neutral.
    ///
    /// # Errors
    /// The value requests an unsupported feature.
    pub(super) fn check(self, option: Field, value: &str) -> Result<(), ConfigError> {
        let lower = value.to_lowercase();
        let (is_neutral, only) = match self.neutral {
            _ if value.is_empty() => return Ok(()),
            Neutral::Bool(false) => (matches!(lower.as_str(), "off" | "false"), "the only supported value is off"),
            Neutral::Bool(true) => (matches!(lower.as_str(), "on" | "true"), "the only supported value is on"),
            Neutral::Number(number) => (parse_size(value) == Ok(number), "leave the key out"),
            Neutral::Text(text) => (lower == text.to_lowercase(), "leave the key out"),
            Neutral::NoElements | Neutral::NoFields => (value == "[]", "leave the key out"),
            Neutral::Null | Neutral::ModeOff => (false, "leave the key out"),
        };
        if is_neutral {
            return Ok(());
        }
        let rule = format!("'{}' is not supported: {only}; {}", one_line(value), self.instead);
        Err(ConfigError::new(option.key(self.name), rule))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(option: (&'static str, &'static str), key: &str, value: &str) -> Option<Result<(), String>> {
        let option = Field::new(option.0, option.1);
        find(option, key).map(|key| key.check(option, value).map_err(|error| error.to_string()))
    }

    #[test]
    fn neutral_value_is_accepted() {
        for (option, key, values) in [
            (("--cpus", "cpus"), "kvm_hyperv", &["off", "False", ""][..]),
            (("--cpus", "cpus"), "features", &["", "[]"]),
            (("--cpus", "cpus"), "core_scheduling", &["off", "OFF"]),
            (("--platform", "platform"), "vfio_p2p_dma", &["on", "true"]),
            (("--memory", "memory"), "hotplugged_size", &["0", "0K"]),
            (("--memory", "memory"), "hotplug_method", &["acpi", "Acpi"]),
            (("--memory-zone", "memory.zones"), "hotplug_size", &["0"]),
            (("--device", "devices"), "x_exclude_mmap_bars", &["[]"]),
            (("--device", "devices"), "fd", &[""]),
            (("--disk", "disks"), "_disable_aio", &["off", "false"]),
            (("--restore", "--restore"), "net_fds", &["[]"]),
        ] {
            for value in values {
                assert_eq!(check(option, key, value), Some(Ok(())), "{key}={value}");
            }
        }
    }

    #[test]
    fn refusal_of_another_value_names_the_alternative() {
        let refused = |option, key, value| check(option, key, value).unwrap().unwrap_err();
        assert_eq!(
            refused(("--cpus", "cpus"), "kvm_hyperv", "on"),
            "--cpus kvm_hyperv: 'on' is not supported: the only supported value is off; the guest gets KVM's paravirtual features, not Hyper-V's"
        );
        assert!(
            refused(("--memory", "memory"), "hotplugged_size", "1G")
                .contains("'1G' is not supported: leave the key out")
        );
        assert!(refused(("--device", "devices"), "fd", "7").ends_with("give the path of the device"));
        assert!(refused(("--restore", "--restore"), "net_fds", "[a@[3]]").contains("SCM_RIGHTS"));
    }

    #[test]
    fn key_of_another_option_is_unknown() {
        assert_eq!(check(("--net", "net"), "kvm_hyperv", "off"), None);
        assert_eq!(check(("--memory", "memory"), "hotplug_sizes", "0"), None);
    }
}
