// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Samples of the demo, one per guest.

use std::collections::BTreeMap;

use carom_integration::measure::journal::{self, Journal};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Figures of one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured<F> {
    #[serde(flatten)]
    pub(crate) figures: F,
    /// Versions of the programs in the guest.
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) retries: u32,
}

/// Sample of a guest that succeeded or failed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Sample<F> {
    pub(crate) name: String,
    pub(crate) round: u32,
    pub(crate) two_jobs: bool,
    /// Figures, or the reason why the guest failed.
    pub(crate) measured: Result<Measured<F>, String>,
}

/// All samples, and the file that keeps them.
pub(crate) type Samples<F> = Journal<Sample<F>>;

/// Key that identifies a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) name: String,
    pub(crate) round: u32,
    pub(crate) two_jobs: bool,
}

impl<F: Clone + Serialize + DeserializeOwned> journal::Sample for Sample<F> {
    type Key = Key;

    fn key(&self) -> Key {
        Key { name: self.name.clone(), round: self.round, two_jobs: self.two_jobs }
    }

    fn failed(Key { name, round, two_jobs }: Key, reason: String) -> Self {
        Self { name, round, two_jobs, measured: Err(reason) }
    }
}
