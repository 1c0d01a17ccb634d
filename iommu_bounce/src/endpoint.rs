// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Endpoints. Each endpoint has a host address space, and a set of IOVAs that the endpoint can map.

use std::ops::RangeInclusive;

use rangemap::RangeInclusiveSet;

use crate::activity::Activity;
use crate::backend::MapperLimits;
use crate::{DomainId, SpaceId};

/// Endpoint of the virtio-iommu.
pub(crate) struct Endpoint {
    /// IOVAs that the endpoint can map: disjoint ranges, in order.
    usable: Vec<RangeInclusive<u64>>,
    /// Host address space that the endpoint is attached to.
    pub(crate) space: SpaceId,
    pub(crate) domain: Option<DomainId>,
    /// Counts and durations of the driver's requests for this endpoint.
    pub(crate) activity: Activity,
}

/// Returns the IOVAs of `input` that a mapper with these limits can translate, without `msi`.
pub(crate) fn usable(
    limits: &MapperLimits,
    input: &RangeInclusive<u64>,
    msi: &RangeInclusive<u64>,
) -> Vec<RangeInclusive<u64>> {
    let mut set = RangeInclusiveSet::new();
    for range in &limits.iova_ranges {
        let start = *range.start().max(input.start());
        let end = *range.end().min(input.end());
        if start <= end {
            set.insert(start..=end);
        }
    }
    set.remove(msi.clone());
    set.into_iter().collect()
}

impl Endpoint {
    /// Creates an endpoint that is attached to no domain.
    pub(crate) fn new(usable: Vec<RangeInclusive<u64>>, space: SpaceId) -> Self {
        Self { usable, space, domain: None, activity: Activity::default() }
    }

    /// Returns the IOVAs that the endpoint can map: disjoint ranges in order, without the MSI window.
    pub(crate) fn usable(&self) -> &[RangeInclusive<u64>] {
        &self.usable
    }

    /// True if the endpoint can map all of `[start, last]`.
    pub(crate) fn can_map(&self, start: u64, last: u64) -> bool {
        let place = self.usable.partition_point(|range| *range.end() < start);
        let range = self.usable.get(place);
        range.is_some_and(|range| range.contains(&start) && range.contains(&last))
    }
}
