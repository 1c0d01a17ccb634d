// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What programs that measure have in common: the modes of VMM and guest that they compare, their guests' figures in a file that
//! outlives the machine, what comes of repeated figures, tables, and what they say of machine and versions.

pub mod fio;
pub mod journal;
pub mod machine;
pub mod markdown;
pub mod mode;
pub mod statistics;
