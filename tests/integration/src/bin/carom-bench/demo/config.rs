// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Figures of one configuration.

use std::collections::BTreeMap;

use carom_integration::workload::BLOCK_SIZES;
use serde::{Deserialize, Serialize};

/// Results of one configuration.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Config<S> {
    pub(crate) name: String,
    /// Summary of the guests' figures.
    #[serde(flatten)]
    pub(crate) figures: S,
    /// Number of guests of this configuration that hung and were started again.
    pub(crate) retries: u32,
}

/// Finds the configuration with this name.
pub(crate) fn find<'configs, S>(configs: &'configs [Config<S>], name: &str) -> Option<&'configs Config<S>> {
    configs.iter().find(|config| config.name == name)
}

/// Returns the figure of each block size. Leaves out block sizes without a
/// figure.
pub(crate) fn by_size<T>(figure: impl Fn(&str) -> Option<T>) -> BTreeMap<String, T> {
    BLOCK_SIZES.iter().filter_map(|size| Some(((*size).to_owned(), figure(size)?))).collect()
}
