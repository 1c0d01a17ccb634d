// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The REST API: HTTP on a Unix socket, with Cloud Hypervisor's paths, fields and status codes.
//!
//! [`carom_api`] defines the operations and their answers. [`server`] speaks HTTP, and `respond` turns requests into calls
//! and the results into responses. [`crate::control`] executes the calls.

mod client_stream;
mod descriptors;
mod listener;
pub mod metrics;
mod page;
mod reading;
mod respond;
pub mod server;
mod shared;

pub use server::ApiServer;
pub use shared::SharedApi;
