// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The figures of one configuration.

use std::collections::BTreeMap;

use carom_integration::workload::BLOCK_SIZES;
use serde::{Deserialize, Serialize};

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
