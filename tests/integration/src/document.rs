// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks the API's answers against its OpenAPI document.

use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// OpenAPI document with closed schemas, which reject properties that they do not name. In the published document the schemas
/// are open, so that later versions of Carom can add properties.
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
    let mut document: Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).expect("it is JSON");
    for schema in values(&mut document["components"]["schemas"]) {
        close(schema, false);
    }
    document
});

/// Checks an answer against the document. The answer's body must be JSON or empty.
///
/// # Errors
/// Fails if the document lacks the operation or the answer's status, or if the body does not match the schema. The error contains
/// the differences.
pub(crate) fn check(method: &str, path: &str, status: u16, body: &str) -> Result<()> {
    let response = &DOCUMENT["paths"][path][method.to_lowercase()]["responses"][status.to_string()];
    ensure!(response.is_object(), "{method} {path}: status {status} is not in the document; the body is {body}");
    let content = &response["content"]["application/json"]["schema"];
    if content.is_null() {
        ensure!(
            body.is_empty(),
            "{method} {path}: the document has no body for status {status}, but the body is {body}"
        );
        return Ok(());
    }
    let body: Value =
        serde_json::from_str(body).with_context(|| format!("{method} {path}: the body is not JSON: {body}"))?;
    let mut schema = content.clone();
    close(&mut schema, true);
    schema["components"] = DOCUMENT["components"].clone();
    let wrong: Vec<_> = jsonschema::validator_for(&schema)
        .context("cannot build a validator from the document's schema")?
        .iter_errors(&body)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    ensure!(wrong.is_empty(), "{method} {path}: status {status}: {}\nin {body}", wrong.join("\n"));
    Ok(())
}

/// Closes a schema and its inner schemas, so that they reject unknown properties. `used` is true if the whole value is checked
/// against this schema. `used` is false if other schemas include this schema by `allOf` or `$ref`. Then the other schemas are
/// closed instead, because they may name further properties of the same value.
fn close(schema: &mut Value, used: bool) {
    let Value::Object(keywords) = schema else { return };
    let has = |keyword| keywords.contains_key(keyword);
    if used && (has("$ref") || has("properties") || has("allOf")) {
        keywords.insert("unevaluatedProperties".into(), json!(false));
    }
    for (keyword, inner) in keywords {
        match keyword.as_str() {
            "properties" | "oneOf" => values(inner).for_each(|schema| close(schema, true)),
            "allOf" => values(inner).for_each(|schema| close(schema, false)),
            "items" | "additionalProperties" => close(inner, true),
            _ => {}
        }
    }
}

/// Returns the elements of an array or the values of an object.
fn values(value: &mut Value) -> Box<dyn Iterator<Item = &mut Value> + '_> {
    match value {
        Value::Array(values) => Box::new(values.iter_mut()),
        Value::Object(values) => Box::new(values.values_mut()),
        _ => Box::new(std::iter::empty()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks an answer to `vm.add-device` that does not match the document, and returns the error.
    fn wrong(status: u16, body: &str) -> String {
        format!("{:#}", check("PUT", "/api/v1/vm.add-device", status, body).unwrap_err())
    }

    #[test]
    fn answers_of_the_document_pass() {
        for (status, body) in
            [(200, r#"{"id":"_vfio1","bdf":"0000:00:04.0"}"#), (204, ""), (404, r#"["there is no VM"]"#)]
        {
            check("PUT", "/api/v1/vm.add-device", status, body).unwrap();
        }
    }

    #[test]
    fn vm_info_configuration_matches_the_document() {
        let full = json!({
            "payload": {"kernel": "/k", "initramfs": "/i", "cmdline": "c"},
            "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "max_phys_bits": 46,
                "topology": {"threads_per_core": 1, "cores_per_die": 1, "dies_per_package": 1, "packages": 1}},
            "devices": [{"path": "/d", "iommu": true}],
            "user_devices": [{"socket": "/s", "iommu": true}],
            "rng": {"src": "/dev/urandom"},
            "iommu_bounce": {},
        });
        for config in [full, json!({"payload": {"kernel": "/k"}})] {
            let config: carom_api::VmConfig = serde_json::from_value(config).unwrap();
            let info = json!({"config": config, "state": "Created", "memory_actual_size": 0, "device_tree": {}});
            let info: carom_api::types::VmInfo = serde_json::from_value(info).unwrap();
            check("GET", "/api/v1/vm.info", 200, &serde_json::to_string(&info).unwrap()).unwrap();
        }
    }

    #[test]
    fn differing_answers_are_reported() {
        assert!(wrong(201, "").contains("status 201 is not in the document"));
        assert!(wrong(204, "{}").contains("no body for status 204"));
        assert!(wrong(200, "").contains("not JSON"));
        assert!(wrong(200, r#"{"id":"_vfio1"}"#).contains(r#""bdf" is a required property"#));
        assert!(wrong(200, r#"{"id":1,"bdf":"0000:00:04.0"}"#).contains("/id: 1 is not of type"));
        assert!(wrong(200, r#"{"id":"_vfio1","bdf":"0000:00:04.0","slot":4}"#).contains("'slot' was unexpected"));
    }

    #[test]
    fn properties_of_nested_and_combined_schemas_are_checked() {
        let report = |edit: fn(&mut Value)| {
            let mut body = json!({
                "budget": 1, "max": 1, "threshold": 1, "threshold_write": 1, "chunk_size": 1, "hugepages": false, "held_bytes": 0, "counters": {},
                "windows": [{"domain": 1, "endpoints": [], "read_chunks": 0, "write_chunks": 0, "read_write_chunks": 0, "bytes": 0}],
                "domains": [], "endpoints": [], "request_latency": {}, "host_latency": {},
            });
            edit(&mut body);
            check("GET", "/api/v1/vm.iommu-bounce", 200, &body.to_string()).map_err(|error| error.to_string())
        };
        report(|_| {}).unwrap();
        assert!(report(|body| body["spare"] = 1.into()).unwrap_err().contains("'spare' was unexpected"));
        let wrong = report(|body| body["windows"][0]["spare"] = 1.into()).unwrap_err();
        assert!(wrong.contains("/windows/0: Unevaluated"), "{wrong}");
        let wrong = report(|body| body["host_latency"]["map"] = json!({"count": 1})).unwrap_err();
        assert!(wrong.contains("/host_latency/map:"), "{wrong}");
    }
}
