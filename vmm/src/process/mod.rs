// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! This process: its log, events, output files, signals, threads and inherited descriptors. Code that depends on a VM does not belong
//! here.

pub mod crash_file;
pub mod event_monitor;
pub mod inherited;
pub mod log_flood;
pub mod log_stream;
pub mod output_file;
pub mod queued_writer;
pub mod signal_actions;
pub mod thread_roles;
pub mod time_slice;
