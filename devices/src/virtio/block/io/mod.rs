// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Runs operations on an image in the host kernel, with io_uring or with other system calls.
//!
//! This module knows nothing about the guest, its queues or its requests.

pub(super) mod engine;
pub(super) mod plain;
pub(super) mod ring;
mod submission;
