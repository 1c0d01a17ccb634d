// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Defaults for VMs of API clients. Cloud Hypervisor's API has no field for bounce windows, and no field that puts every passed-through
//! device behind the virtio-iommu. So the user who starts Carom sets these defaults for clients of Cloud Hypervisor's API.

use crate::error::ConfigError;
use crate::field::Field;
use crate::kinds::{IommuBounceConfig, KindConfig, PartConfig};
use crate::option_list::on_or_off;
use crate::vm_config::VmConfig;

/// Program-wide defaults for VMs that API clients create.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmDefaults {
    /// Bounce windows of a VM whose client configures no bounce windows.
    pub iommu_bounce: Option<IommuBounceConfig>,
    /// True if every passed-through device is put behind the virtio-iommu, even if the client does not request this.
    pub all_behind_iommu: bool,
}

impl VmDefaults {
    /// Option `--all-behind-iommu`.
    pub const ALL_BEHIND_IOMMU: Field = Field::only("--all-behind-iommu");
    /// Environment variable with the value of `--iommu-bounce`. The variable is used if `--api-socket` is given without `--iommu-bounce`.
    pub const BOUNCE_VARIABLE: &'static str = "CAROM_IOMMU_BOUNCE";
    /// Environment variable for `--all-behind-iommu`. `on` has the same effect as the option, and `off` has no effect.
    pub const ALL_BEHIND_VARIABLE: &'static str = "CAROM_ALL_BEHIND_IOMMU";

    /// Fills in missing defaults from the environment, and checks all defaults. The command line takes precedence.
    ///
    /// # Errors
    /// A variable has a value that its option would reject, or a default breaks a rule.
    pub(crate) fn complete(&mut self, variable: impl Fn(&str) -> Option<String>) -> Result<(), ConfigError> {
        if let (None, Some(text)) = (&self.iommu_bounce, variable(Self::BOUNCE_VARIABLE)) {
            self.iommu_bounce = Some(text.parse()?);
        }
        if let Some(text) = variable(Self::ALL_BEHIND_VARIABLE) {
            self.all_behind_iommu |= on_or_off(Self::ALL_BEHIND_IOMMU, &text)?;
        }
        if let Some(bounce) = &mut self.iommu_bounce {
            bounce.complete();
            bounce.check(&VmConfig::default().memory)?;
        } else if self.all_behind_iommu {
            let rule = "needs --iommu-bounce, so that a VM without devices has a virtio-iommu for devices that are added later";
            return Err(ConfigError::new(Self::ALL_BEHIND_IOMMU, rule));
        }
        Ok(())
    }

    /// Applies the defaults to a VM. If a VM has passed-through devices, but no device behind the virtio-iommu, no device would use bounce
    /// windows. Such a VM gets no windows.
    pub fn apply(&self, config: &mut VmConfig) {
        if self.all_behind_iommu {
            let passed_through = config.parts_mut().filter(|part| part.kind().passed_through);
            passed_through.for_each(KindConfig::put_behind_iommu);
        }
        if config.iommu_bounce.is_none() && config.has_use_for_windows() {
            config.iommu_bounce.clone_from(&self.iommu_bounce);
        }
    }

    /// Applies the defaults to a device that is added to a VM.
    pub fn apply_to(&self, part: &mut PartConfig) {
        if self.all_behind_iommu && part.kind().passed_through {
            part.put_behind_iommu();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none(_: &str) -> Option<String> {
        None
    }

    fn config(text: &str) -> VmConfig {
        serde_json::from_str(text).unwrap()
    }

    fn bounce_and_all() -> VmDefaults {
        let mut defaults = VmDefaults { iommu_bounce: "size=32M".parse().ok(), all_behind_iommu: true };
        defaults.complete(none).unwrap();
        defaults
    }

    #[test]
    fn plain_config_gets_windows_and_devices_behind_iommu() {
        let mut config =
            config(r#"{"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}], "user_devices": [{"socket": "/s"}]}"#);
        bounce_and_all().apply(&mut config);
        assert!(config.devices[0].iommu && config.user_devices[0].iommu);
        assert_eq!(config.iommu_bounce.as_ref().unwrap().size, 32 << 20);
        let config = config.check().unwrap();
        let mut part = PartConfig::Vfio(config.devices[0].clone());
        part.put_behind_iommu();
        bounce_and_all().apply_to(&mut part);
        assert!(part.is_behind_iommu());
    }

    #[test]
    fn client_that_configures_windows_keeps_its_own() {
        let mut config = config(r#"{"payload": {"kernel": "/k"}, "iommu_bounce": {"size": 4194304}}"#);
        bounce_and_all().apply(&mut config);
        assert_eq!(config.iommu_bounce.unwrap().size, 4 << 20);
    }

    #[test]
    fn default_windows_skip_vms_with_devices_not_behind_iommu() {
        let mut defaults = VmDefaults { iommu_bounce: "".parse().ok(), all_behind_iommu: false };
        defaults.complete(none).unwrap();
        for devices in [r#""devices": [{"path": "/d"}]"#, r#""user_devices": [{"socket": "/s"}], "rng": {}"#] {
            let mut config = config(&format!(r#"{{"payload": {{"kernel": "/k"}}, {devices}}}"#));
            let before = config.clone();
            defaults.apply(&mut config);
            assert_eq!(config, before);
        }
        // A VM with only emulated devices also gets windows, because a passed-through device may be added later.
        let mut config = config(r#"{"payload": {"kernel": "/k"}, "rng": {}}"#);
        defaults.apply(&mut config);
        assert!(config.iommu_bounce.is_some());
        config.check().unwrap();
    }

    #[test]
    fn environment_sets_defaults_and_invalid_values_are_refused() {
        let environment = |bounce: &'static str, all: &'static str| {
            let mut defaults = VmDefaults::default();
            let variable =
                move |name: &str| Some(if name == VmDefaults::BOUNCE_VARIABLE { bounce } else { all }.to_string());
            defaults.complete(variable).map(|()| defaults)
        };
        assert_eq!(environment("size=32M", "on").unwrap(), bounce_and_all());
        assert!(!environment("", "off").unwrap().all_behind_iommu);
        for (bounce, all, field) in [
            ("size=3M", "on", IommuBounceConfig::SIZE),
            ("sze=4M", "on", IommuBounceConfig::OPTION),
            ("", "perhaps", VmDefaults::ALL_BEHIND_IOMMU),
        ] {
            assert_eq!(environment(bounce, all).unwrap_err().field, field);
        }
        let mut alone = VmDefaults { all_behind_iommu: true, ..VmDefaults::default() };
        assert_eq!(alone.complete(none).unwrap_err().field, VmDefaults::ALL_BEHIND_IOMMU);
    }
}
