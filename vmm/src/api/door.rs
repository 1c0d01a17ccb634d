// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The two ways by which clients come in.

use std::time::Duration;

use carom_api::operations::{self, Operation};

/// Where clients come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Door {
    /// The API's socket, on which everything is served.
    Api,
    /// The address for metrics, on which nothing else is.
    Metrics,
}

impl Door {
    /// Most clients that are connected at once; who comes then is told to try again. Each takes a descriptor. The doors
    /// share no places, so that strangers at one cannot keep the owner from the other.
    pub(super) fn places(self) -> usize {
        match self {
            Self::Api => 256,
            Self::Metrics => 16,
        }
    }

    /// Maximum silence of a client between two requests. Clients of the API may keep a connection for as long as the VM lives. Those
    /// of the network may not: silent ones would take all places for ever.
    pub(super) fn idle_time(self) -> Option<Duration> {
        match self {
            Self::Api => None,
            Self::Metrics => Some(Duration::from_secs(30)),
        }
    }

    /// Whether the operation is served here.
    pub(super) fn has(self, operation: &Operation) -> bool {
        self == Self::Api || operation.name == operations::METRICS
    }

    /// What to add when there is no such operation.
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Api => "",
            Self::Metrics => ": only /metrics is served here",
        }
    }
}
