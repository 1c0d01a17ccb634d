// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reports of bounce windows, in the form of the API's answers.

use carom_api::IommuBounceConfig;
use carom_api::limits::CHUNK_SIZE;
use carom_api::types::{BounceWindow, IommuBounce, IommuBounceReport};
use devices::pci::PciAddress;
use devices::virtio::iommu::IommuStatus;
use iommu_bounce::{DomainWindow, Report};

use super::counters;
use super::figures;

/// Returns the settings and the state of the windows that `config` configures. `status` is present while the VM is booted.
pub(super) fn status(config: &IommuBounceConfig, status: Option<&IommuStatus>) -> IommuBounce {
    let windows =
        status.iter().flat_map(|status| status.windows.iter().map(|window| describe(window, status.chunk_size)));
    IommuBounce {
        budget: config.size,
        max: config.max,
        threshold: config.threshold.unwrap_or(0),
        threshold_write: config.threshold_write.unwrap_or(0),
        max_mapped: config.max_mapped,
        chunk_size: CHUNK_SIZE,
        hugepages: config.hugepages,
        held_bytes: status.map_or(0, |status| status.held_window_bytes),
        windows: windows.collect(),
        counters: status.map(|status| counters::of_engine(&status.counters)).unwrap_or_default(),
    }
}

/// Adds the engine's latencies, and its values for each domain and endpoint, to `bounce`.
pub(super) fn report(bounce: IommuBounce, engine: Option<&Report>) -> IommuBounceReport {
    let requests = engine.map(|engine| figures::latencies(figures::of_requests(&engine.latency)));
    let host = engine.map(|engine| figures::latencies(figures::of_host(&engine.host)));
    IommuBounceReport {
        bounce,
        request_latency: requests.unwrap_or_default(),
        host_latency: host.unwrap_or_default(),
        domains: engine.iter().flat_map(|engine| engine.domains.iter().map(figures::domain)).collect(),
        endpoints: engine.iter().flat_map(|engine| engine.endpoints.iter().map(figures::endpoint)).collect(),
    }
}

fn describe(window: &DomainWindow, chunk_size: u64) -> BounceWindow {
    let DomainWindow { domain, ref endpoints, read_chunks, write_chunks, read_write_chunks } = *window;
    BounceWindow {
        domain,
        endpoints: endpoints.iter().map(|id| PciAddress::of_endpoint(*id).to_string()).collect(),
        read_chunks,
        write_chunks,
        read_write_chunks,
        bytes: (read_chunks + write_chunks + read_write_chunks).saturating_mul(chunk_size),
    }
}
