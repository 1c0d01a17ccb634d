// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The REST API: HTTP on a unix socket, with Cloud Hypervisor's paths, fields and status codes.
//!
//! [`types`] are what goes over the wire, [`operations`] is the table of paths that both the server and the OpenAPI
//! document follow, [`server`] speaks HTTP, [`socket`] makes the socket,
//! `respond` turns requests into calls and what comes of them into responses. What a call does is [`crate::control`]'s.

pub mod body;
mod client_stream;
mod descriptors;
pub mod document;
mod json;
pub mod metrics;
pub mod operations;
mod reading;
mod respond;
pub mod server;
pub mod socket;
pub mod types;

pub use server::{ApiServer, Shared};
pub use socket::ApiSocket;
