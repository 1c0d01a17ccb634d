// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bounce windows: what clients are told of them, and what they may change.

use devices::virtio::iommu::IommuStatus;
use iommu_bounce::{DomainWindow, Report};

use super::figures::{self, address};
use super::{ControlError, counters};
use crate::api::types::{BounceWindow, IommuBounce, IommuBounceChange, IommuBounceReport};
use crate::arch::layout::MIB;
use crate::config::{CHUNK_SIZE, ConfigError, IommuBounceConfig};

/// What there is to tell of the windows of `config`; `status` is there while the VM is booted.
pub(super) fn status(config: &IommuBounceConfig, status: Option<&IommuStatus>) -> IommuBounce {
    let windows =
        status.iter().flat_map(|status| status.windows.iter().map(|window| describe(window, status.chunk_size)));
    IommuBounce {
        budget: config.size,
        max: config.max,
        threshold: config.threshold.unwrap_or(0),
        chunk_size: CHUNK_SIZE,
        hugepages: config.hugepages,
        held_bytes: status.map_or(0, |status| status.held_window_bytes),
        windows: windows.collect(),
        counters: status.map(|status| counters::of_engine(&status.counters)).unwrap_or_default(),
    }
}

/// The same with the engine's figures.
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
        endpoints: endpoints.iter().map(|id| address(*id)).collect(),
        read_chunks,
        write_chunks,
        read_write_chunks,
        bytes: (read_chunks + write_chunks + read_write_chunks).saturating_mul(chunk_size),
    }
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
