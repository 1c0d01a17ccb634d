// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All tables, in the order in which they are shown.

use crate::table::Table;
use crate::{counts, density, disk, network, pinning, throughput, vmm};

pub(crate) static TABLES: [Table; 7] =
    [throughput::TABLE, pinning::TABLE, density::TABLE, vmm::TABLE, disk::TABLE, network::TABLE, counts::TABLE];
