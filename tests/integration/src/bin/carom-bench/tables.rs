// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All tables, in the order in which they are shown.

use crate::table::Table;
use crate::{counts, pinning, throughput, vmm};

pub(crate) static TABLES: [Table; 4] = [throughput::TABLE, counts::TABLE, pinning::TABLE, vmm::TABLE];
