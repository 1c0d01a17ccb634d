// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The REST API: HTTP on a unix socket, with Cloud Hypervisor's paths, fields and status codes.
//!
//! What can be asked for, and what is answered, stands in [`carom_api`]. [`server`] speaks HTTP, [`socket`] makes the socket,
//! `respond` turns requests into calls and what comes of them into responses. What a call does is [`crate::control`]'s.

mod client_stream;
mod descriptors;
mod door;
pub mod metrics;
mod page;
mod reading;
mod respond;
pub mod server;
mod shared;

pub use server::ApiServer;
pub use shared::SharedApi;
