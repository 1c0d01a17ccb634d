// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What was measured, guest by guest.

use std::collections::BTreeMap;

use carom_integration::measure::journal::{self, Journal};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What is measured in one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured<F> {
    #[serde(flatten)]
    pub(crate) figures: F,
    /// Of what runs in the guest.
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) retries: u32,
}

/// One guest that ended, well or not.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Sample<F> {
    pub(crate) name: String,
    pub(crate) round: u32,
    pub(crate) two_jobs: bool,
    /// The figures, or why there are none.
    pub(crate) measured: Result<Measured<F>, String>,
}

/// All samples, and the file that each is noted in at once.
pub(crate) type Samples<F> = Journal<Sample<F>>;

/// Which guest it is.
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
