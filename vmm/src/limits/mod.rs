// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits of this process that follow from a VM's configuration: files (Landlock) and host CPUs.

pub mod affinity;
pub mod file_bounds;
pub mod file_limits;
