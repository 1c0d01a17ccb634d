// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The two listeners for clients: the API's socket and the metrics address.

use std::time::Duration;

use carom_api::operations::{self, Operation};

/// Listener for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ApiListener {
    /// The API's socket, which serves every operation.
    Api,
    /// The metrics address, which serves only metrics.
    Metrics,
}

impl ApiListener {
    /// Returns the option that names the address of the listener.
    pub(super) fn option(self) -> &'static str {
        match self {
            Self::Api => "--api-socket",
            Self::Metrics => "--metrics",
        }
    }

    /// Returns the maximum number of connected clients. The number is limited, because each client uses a file descriptor. If more clients
    /// connect, the server answers with status 429. Each listener has its own limit, so that network clients cannot lock out clients of the
    /// API's socket.
    pub(super) fn places(self) -> usize {
        match self {
            Self::Api => 256,
            Self::Metrics => 16,
        }
    }

    /// Returns the maximum silence of a client between two requests. API clients may keep a connection for as long as the VM lives. Network
    /// clients must not keep a silent connection, because silent clients could lock out all other network clients for ever.
    pub(super) fn idle_time(self) -> Option<Duration> {
        match self {
            Self::Api => None,
            Self::Metrics => Some(Duration::from_secs(30)),
        }
    }

    /// True if this listener serves the operation.
    pub(super) fn has(self, operation: &Operation) -> bool {
        self == Self::Api || operation.name == operations::METRICS
    }

    /// Returns the text to add to the error for an unknown operation.
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Api => "",
            Self::Metrics => ": only /metrics is served here",
        }
    }
}
