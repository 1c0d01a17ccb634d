// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The figures of one configuration, and the machine that they are of.

use std::collections::BTreeMap;

use carom_integration::workload::BLOCK_SIZES;
use serde::{Deserialize, Serialize};

/// Where it ran.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    /// The physical machine.
    pub(crate) host: String,
    /// `tcg` or `kvm`: how the rig's machine was run; `direct`: no rig.
    pub(crate) rig: String,
    /// Kernel that KVM and VFIO are of.
    pub(crate) kernel: String,
    /// RAM of each guest.
    pub(crate) guest_ram_bytes: u64,
}

/// One configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Config<S> {
    pub(crate) name: String,
    /// What its guests' figures come to.
    #[serde(flatten)]
    pub(crate) figures: S,
    /// How often a guest of this configuration hung and was started again.
    pub(crate) retries: u32,
}

/// The configuration of this name.
pub(crate) fn find<'configs, S>(configs: &'configs [Config<S>], name: &str) -> Option<&'configs Config<S>> {
    configs.iter().find(|config| config.name == name)
}

/// A figure at each block size at which there is one.
pub(crate) fn by_size<T>(figure: impl Fn(&str) -> Option<T>) -> BTreeMap<String, T> {
    BLOCK_SIZES.iter().filter_map(|size| Some(((*size).to_owned(), figure(size)?))).collect()
}

/// The middle one; of an even number, the mean of the two in the middle.
pub(crate) fn median(figures: impl Iterator<Item = f64>) -> Option<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    let (low, high) = (figures.get(figures.len().checked_sub(1)? / 2)?, figures.get(figures.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_or_between_the_two_there() {
        assert_eq!(median([3.0, 1.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 9.0].into_iter()), Some(3.0));
        assert_eq!(median([].into_iter()), None);
    }
}
