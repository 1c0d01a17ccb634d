// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters in the form that `vm.counters` has: names with a number each.

use std::collections::BTreeMap;

use devices::virtio::iommu::IommuReport;
use serde::Serialize;
use serde_json::Value;

/// The counters of a virtio-iommu.
pub(super) fn of_report(report: &IommuReport) -> BTreeMap<String, u64> {
    let mut named = flatten(&report.counters);
    named.insert("window_budget_bytes".into(), report.budget);
    named.insert("window_held_bytes".into(), report.held_window_bytes);
    named
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
