// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bounce windows: what clients are told of them, and what they may change.

use devices::pci::PciAddress;
use devices::virtio::iommu::IommuReport;
use iommu_bounce::{DomainWindow, EndpointId};

use super::{ControlError, counters};
use crate::api::types::{BounceWindow, IommuBounce, IommuBounceChange};
use crate::config::{CHUNK_SIZE, ConfigError, IommuBounceConfig};
use crate::layout::MIB;

/// What there is to tell of the windows of `config`; `report` is there while the VM is booted.
pub(super) fn status(config: &IommuBounceConfig, report: Option<&IommuReport>) -> IommuBounce {
    let windows =
        report.iter().flat_map(|report| report.windows.iter().map(|window| describe(window, report.chunk_size)));
    IommuBounce {
        budget: config.size,
        max: config.max,
        threshold: config.threshold.unwrap_or(0),
        chunk_size: CHUNK_SIZE,
        hugepages: config.hugepages,
        held_bytes: report.map_or(0, |report| report.held_window_bytes),
        windows: windows.collect(),
        counters: report.map(|report| counters::flatten(&report.counters)).unwrap_or_default(),
    }
}

fn describe(window: &DomainWindow, chunk_size: u64) -> BounceWindow {
    let DomainWindow { domain, ref endpoints, read_chunks, write_chunks, read_write_chunks } = *window;
    BounceWindow {
        domain,
        endpoints: endpoints.iter().map(|id| address(*id)).collect(),
        read_chunks,
        write_chunks,
        read_write_chunks,
        bytes: (read_chunks + write_chunks + read_write_chunks).saturating_mul(chunk_size),
    }
}

/// Where the guest sees the endpoint with this ID ([`PciAddress::endpoint_id`]).
fn address(id: EndpointId) -> String {
    let [function, bus, low, high] = id.to_le_bytes();
    let segment = u16::from_le_bytes([low, high]);
    PciAddress { segment, bus, device: function >> 3, function: function & 7 }.to_string()
}

/// Makes a change in `config`, or leaves it as it was.
pub(super) fn change(config: &mut IommuBounceConfig, change: &IommuBounceChange) -> Result<(), ControlError> {
    if let Some(budget) = change.budget {
        let rule = if budget == 0 || !budget.is_multiple_of(CHUNK_SIZE) {
            format!("{budget} bytes are no positive multiple of {}M", CHUNK_SIZE / MIB)
        } else if budget > config.max {
            format!("{budget} bytes are more than max, the {} bytes that the VM was created with", config.max)
        } else {
            config.size = budget;
            String::new()
        };
        if !rule.is_empty() {
            return Err(ConfigError::new("budget", rule).into());
        }
    }
    if let Some(threshold) = change.threshold {
        config.threshold = Some(threshold).filter(|bytes| *bytes != 0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> IommuBounceConfig {
        IommuBounceConfig { size: 8 << 20, max: 64 << 20, threshold: None, hugepages: false }
    }

    #[test]
    fn endpoints_are_named_by_their_address() {
        let pci = PciAddress { segment: 1, bus: 2, device: 31, function: 7 };
        assert_eq!(address(pci.endpoint_id()), pci.to_string());
    }

    #[test]
    fn change_that_breaks_a_rule_changes_nothing() {
        for budget in [0, 1, (2 << 20) + 1, 66 << 20, u64::MAX] {
            let mut changed = config();
            let wanted = IommuBounceChange { budget: Some(budget), threshold: Some(5) };
            let error = change(&mut changed, &wanted).unwrap_err().to_string();
            assert!(error.starts_with("budget: "), "{error}");
            assert_eq!(changed, config());
        }
    }

    #[test]
    fn threshold_of_zero_is_left_to_the_guest() {
        let mut changed = config();
        change(&mut changed, &IommuBounceChange { budget: Some(64 << 20), threshold: Some(4096) }).unwrap();
        assert_eq!((changed.size, changed.threshold), (64 << 20, Some(4096)));
        change(&mut changed, &IommuBounceChange { budget: None, threshold: Some(0) }).unwrap();
        assert_eq!((changed.size, changed.threshold), (64 << 20, None));
    }
}
