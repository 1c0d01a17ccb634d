// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All tables, in the order in which they are shown.

use crate::table::Table;
use crate::{counts, density, pinning, throughput, vmm};

pub(crate) static TABLES: [Table; 5] = [throughput::TABLE, pinning::TABLE, density::TABLE, vmm::TABLE, counts::TABLE];
