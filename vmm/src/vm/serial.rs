// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The serial port and its connections.

use std::sync::Arc;

use carom_api::config::{ConsoleMode, SerialConfig};

use crate::address_space::IoMap;
use crate::arch::board::Board;
use crate::console::{ConsoleLinks, Names, Receiver};
use crate::error::VmError;
use crate::kvm::KvmVm;

/// ID and kind of the serial port in the counters.
pub(super) const ID: &str = "_serial";
pub(super) const KIND: &str = "serial";

const NAMES: Names = Names { shown: "serial port", thread: "serial" };

/// Adds the serial port, and connects it as `config` says. Does nothing if the serial port is off.
pub(super) fn add_port(
    config: &SerialConfig,
    kvm: &KvmVm,
    io_map: &IoMap,
    board: &mut Board,
) -> Result<ConsoleLinks, VmError> {
    let target = config.target();
    if target.mode == ConsoleMode::Off {
        return Ok(ConsoleLinks::default());
    }
    let mut links = ConsoleLinks::open(&target, NAMES)?;
    let receiver: Arc<dyn Receiver> = board.add_serial_port(io_map, kvm, links.writer())?;
    links.connect(&target, &receiver)?;
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::metrics;

    #[test]
    fn counters_are_in_the_documents_table_of_metrics() {
        let document = include_str!("../../../docs/api.md");
        for counter in ConsoleLinks::default().counters() {
            let name = metrics::name_of(KIND, counter.name);
            assert!(document.contains(&format!("`{name}{{device}}`")), "{name} is not in docs/api.md");
        }
    }
}
