// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All tables, in the order of the report.

use crate::table::Table;
use crate::{
    allocator, counts, density, disk, engine, io_instructions, lent, login, map_counts, map_time, network, pinning,
    pools, sandbox, scaling, start_instructions, sync, throughput, vmm,
};

pub(crate) static TABLES: [Table; 19] = [
    throughput::TABLE,
    scaling::TABLE,
    map_time::TABLE,
    sync::TABLE,
    map_counts::TABLE,
    io_instructions::TABLE,
    start_instructions::TABLE,
    engine::TABLE,
    allocator::TABLE,
    pinning::TABLE,
    pools::TABLE,
    density::TABLE,
    vmm::TABLE,
    login::TABLE,
    disk::TABLE,
    network::TABLE,
    sandbox::TABLE,
    lent::TABLE,
    counts::TABLE,
];
