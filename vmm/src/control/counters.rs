// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters in the form that `vm.counters` has: names with a number each.

use std::collections::BTreeMap;

use devices::virtio::iommu::IommuStatus;
use iommu_bounce::Report;
use serde::Serialize;
use serde_json::Value;

use super::figures;

/// The counters of a virtio-iommu.
pub(super) fn of_iommu(status: &IommuStatus) -> BTreeMap<String, u64> {
    let mut named = flatten(&status.counters);
    named.insert("window_budget_bytes".into(), status.budget);
    named.insert("window_held_bytes".into(), status.held_window_bytes);
    named
}

/// The counters of a device behind it, which the guest sees at `address`: what it reaches, the requests that named it, and
/// those for its domain (`domain_…`). `None` if it is not behind it.
pub(super) fn of_endpoint(engine: &Report, address: &str) -> Option<BTreeMap<String, u64>> {
    let endpoint = engine.endpoints.iter().find(|endpoint| figures::address(endpoint.endpoint) == address)?;
    let activity = flatten(&endpoint.activity);
    let mut named: BTreeMap<_, _> = activity.into_iter().filter(|(name, _)| !name.starts_with("latency")).collect();
    named.insert("mapped_bytes".into(), endpoint.mapped_bytes);
    named.insert("window_bytes".into(), endpoint.window_bytes);
    named.insert("pinned_bytes".into(), endpoint.pinned_bytes);
    let domain = engine.domains.iter().find(|domain| Some(domain.domain) == endpoint.domain);
    if let Some(domain) = domain {
        for (name, of) in [("requests", &domain.activity.requests), ("failed", &domain.activity.failed)] {
            named.extend(flatten(of).into_iter().map(|(kind, count)| (format!("domain_{name}_{kind}"), count)));
        }
        named.insert("domain_mappings".into(), domain.mappings);
    }
    Some(named)
}

/// All numbers in `counters`; those of a part are named after it too, such as `requests_map`.
pub(super) fn flatten<T: Serialize>(counters: &T) -> BTreeMap<String, u64> {
    let mut flat = BTreeMap::new();
    if let Ok(value) = serde_json::to_value(counters) {
        collect(String::new(), &value, &mut flat);
    }
    flat
}

fn collect(name: String, value: &Value, flat: &mut BTreeMap<String, u64>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}_{field}") };
                collect(name, value, flat);
            }
        }
        value => flat.extend(value.as_u64().map(|number| (name, number))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_named_after_their_place() {
        let flat = flatten(&json!({"requests": {"map": 3, "unmap": 4}, "mappings": 5, "name": "x", "list": [1]}));
        let expected = [("mappings", 5), ("requests_map", 3), ("requests_unmap", 4)];
        assert_eq!(flat.into_iter().collect::<Vec<_>>(), expected.map(|(name, value)| (name.to_string(), value)));
    }
}
