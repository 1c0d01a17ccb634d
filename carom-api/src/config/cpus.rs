// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's CPUs.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::MAX_VCPUS;
use crate::option_list::OptionList;

/// The guest's CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpusConfig {
    /// vCPUs at boot, 1 to 254.
    #[schema(minimum = 1, maximum = 254)]
    pub boot_vcpus: u32,
    /// As many as `boot_vcpus`, which 0 stands for: vCPUs cannot be added to a running VM.
    #[serde(default)]
    #[schema(maximum = 254)]
    pub max_vcpus: u32,
}

impl CpusConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--cpus", "cpus");
    /// [`Self::boot_vcpus`].
    pub const BOOT: Field = Self::OPTION.keys("boot", "boot_vcpus");
    /// [`Self::max_vcpus`].
    pub const MAX: Field = Self::OPTION.keys("max", "max_vcpus");

    /// Fills in what follows from the rest.
    pub(crate) fn complete(&mut self) {
        if self.max_vcpus == 0 {
            self.max_vcpus = self.boot_vcpus;
        }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// There are too many or none, or they differ.
    pub fn check(&self) -> Result<(), ConfigError> {
        let Self { boot_vcpus, max_vcpus } = *self;
        if !(1..=MAX_VCPUS).contains(&boot_vcpus) {
            return Err(ConfigError::new(Self::BOOT, format!("{boot_vcpus} is not in 1 to {MAX_VCPUS}")));
        }
        if max_vcpus != boot_vcpus {
            let rule = format!("{max_vcpus} is not {boot_vcpus}: vCPUs cannot be added while the VM runs");
            return Err(ConfigError::new(Self::MAX, rule));
        }
        Ok(())
    }
}

impl Default for CpusConfig {
    fn default() -> Self {
        Self { boot_vcpus: 1, max_vcpus: 1 }
    }
}

impl FromStr for CpusConfig {
    type Err = ConfigError;

    /// Parses `boot=N[,max=N]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["boot", "max"])?;
        let number = |field, text: &str| {
            text.parse().map_err(|_| ConfigError::new(field, format!("'{text}' is no number of CPUs")))
        };
        let boot_vcpus = number(Self::BOOT, list.required("boot")?)?;
        let max_vcpus = list.get("max").map_or(Ok(boot_vcpus), |max| number(Self::MAX, max))?;
        Ok(Self { boot_vcpus, max_vcpus })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_read_and_mistakes_name_option_and_rule() {
        assert_eq!("boot=2".parse(), Ok(CpusConfig { boot_vcpus: 2, max_vcpus: 2 }));
        let refused = |text: &str| text.parse::<CpusConfig>().unwrap_err().to_string();
        assert_eq!(refused("boot=two"), "--cpus boot: 'two' is no number of CPUs");
        assert_eq!(refused("most=2"), "--cpus: unknown key 'most', known are: boot, max");
    }

    #[test]
    fn number_out_of_range_is_refused() {
        for count in [0, 255, u32::MAX] {
            let cpus = CpusConfig { boot_vcpus: count, max_vcpus: count };
            assert_eq!(cpus.check().unwrap_err().field, CpusConfig::BOOT);
        }
        let cpus = CpusConfig { boot_vcpus: 2, max_vcpus: 4 };
        assert_eq!(cpus.check().unwrap_err().field, CpusConfig::MAX);
        assert_eq!(CpusConfig { boot_vcpus: 254, max_vcpus: 254 }.check(), Ok(()));
    }
}
