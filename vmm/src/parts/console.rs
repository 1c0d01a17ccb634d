// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-console.

use std::path::Path;
use std::sync::Arc;

use carom_api::{ConsoleConfig, PartConfig};
use devices::counters::Counter;
use devices::virtio::VirtioPciDevice;
use devices::virtio::console::{self, ConsoleCounters, ConsoleParams, VirtioConsole};

use super::emulated::{Wiring, failed};
use super::{Builder, Built, Part, Site, not_built_here, reset};
use crate::console::{ConsoleLinks, Names, Receiver};
use crate::error::VmError;

pub(super) const BUILDER: Builder = Builder {
    kind: &ConsoleConfig::KIND,
    roles: &[console::ROLE],
    counters: || [ConsoleCounters::default().all(), ConsoleLinks::default().counters().to_vec()].concat(),
    build,
};

const NAMES: Names = Names { shown: "console", thread: "console-line" };

struct Console {
    function: Arc<VirtioPciDevice>,
    device: Arc<VirtioConsole>,
    links: ConsoleLinks,
}

impl Part for Console {
    fn counters(&self) -> Vec<Counter> {
        self.device.counters().all().into_iter().chain(self.links.counters()).collect()
    }

    fn pty(&self) -> Option<&Path> {
        self.links.pty_path()
    }
}

impl Drop for Console {
    /// Resets the device, which ends the device's thread. Rust drops `links` afterwards, which waits for the readers of the output. During
    /// this wait, the thread must not write more output.
    fn drop(&mut self) {
        reset(&*self.function);
    }
}

/// Opens the console's connections, and creates the device.
fn build(config: &PartConfig, mut site: Site<'_>) -> Result<Built, VmError> {
    let PartConfig::Console(config) = config else { return Err(not_built_here(config)) };
    let target = config.target();
    let mut links = ConsoleLinks::open(&target, NAMES)?;
    let output = links.writer();
    site.emulate(config, |Wiring { id, memory, msi, doorbells, observer }| {
        let created = console::create(ConsoleParams { id, output, memory, msi, doorbells, observer });
        let (function, device) = created.map_err(failed("create the virtio-console device"))?;
        let receiver: Arc<dyn Receiver> = device.clone();
        links.connect(&target, &receiver)?;
        Ok((function.clone(), Console { function, device, links }))
    })
}
