// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Common parts of measuring programs: compared modes of VMM and guest, journals of measurements, statistics, tables, and
//! descriptions of machine and versions.

pub mod fio;
pub mod journal;
pub mod machine;
pub mod markdown;
pub mod mode;
pub mod statistics;
