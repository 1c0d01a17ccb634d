// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! OpenAPI document, generated from the table of operations and the types.

mod neutral_fields;

use std::collections::BTreeMap;

use utoipa::OpenApi;
use utoipa::openapi::content::Content;
use utoipa::openapi::path::{HttpMethod, OperationBuilder, PathItem, PathsBuilder};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{
    AdditionalProperties, ArrayBuilder, KnownFormat, ObjectBuilder, Schema, SchemaFormat, Type,
};
use utoipa::openapi::{Components, Ref, RefOr, Required, ResponseBuilder};

use crate::operations::{self, Action, METRICS_TYPE, Operation, Success, Verb};
use crate::{types, vm_config};

/// OpenAPI document that the server returns, read from `docs`. A test checks that this stored document is up to date.
pub const SERVED: &str = include_str!("../../docs/openapi.json");

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Carom",
        description = "Control of a virtual machine over a unix socket. Operations that Cloud Hypervisor also has use the same paths, fields and status codes.",
    ),
    components(schemas(
        types::VmmPing,
        types::VmInfo,
        types::VmState,
        types::DeviceNode,
        types::PciDeviceInfo,
        types::VmResize,
        types::VmResizeDisk,
        types::VmRemoveDevice,
        crate::snapshot::VmSnapshotConfig,
        crate::snapshot::RestoreConfig,
        types::IommuBounce,
        types::IommuBounceReport,
        types::BounceWindow,
        types::Latency,
        types::LatencyBucket,
        types::DomainFigures,
        types::EndpointFigures,
        types::IommuBounceChange,
        vm_config::VmConfig,
    ))
)]
struct Types;

/// Generates the document.
pub fn generate() -> utoipa::openapi::OpenApi {
    let mut document = Types::openapi();
    let mut paths = PathsBuilder::new();
    for operation in operations::all() {
        let method = match operation.verb {
            Verb::Get => HttpMethod::Get,
            Verb::Put => HttpMethod::Put,
        };
        // If two operations have the same path, `PathsBuilder` merges their methods.
        paths = paths.path(operation.path(), PathItem::new(method, describe(operation)));
    }
    document.paths = paths.build();
    let components = document.components.get_or_insert_with(Components::new);
    components.schemas.insert("VmCounters".into(), counters().into());
    components.schemas.insert("Refusal".into(), refusal().into());
    neutral_fields::complete(&mut components.schemas, "VmConfig");
    document
}

/// Returns the document as text.
pub fn text() -> Result<String, serde_json::Error> {
    Ok(generate().to_pretty_json()? + "\n")
}

fn describe(operation: &Operation) -> OperationBuilder {
    let mut described = OperationBuilder::new().operation_id(Some(operation.id)).summary(Some(operation.summary));
    if let Some(schema) = operation.request {
        let body = RequestBodyBuilder::new()
            .content("application/json", Content::new(Some(Ref::from_schema_name(schema))))
            .required(Some(Required::True));
        described = described.request_body(Some(body.build()));
    }
    for (status, response) in success(operation.success) {
        described = described.response(status, response);
    }
    let mut refusals: Vec<(u16, String)> =
        operation.refusals.iter().map(|(code, why)| (*code, (*why).into())).collect();
    if operation.request.is_some() {
        refusals.push((400, "The body breaks a rule. The message names the rule.".into()));
    } else if operation.verb == Verb::Put && refusals.iter().all(|(code, _)| *code != 400) {
        refusals.push((400, "The request has a body, but the operation takes none.".into()));
    }
    if !matches!(operation.action, Action::Ping | Action::Document) {
        refusals.push((429, "Too many calls are pending, or too many clients are connected.".into()));
        refusals.push((500, "An operation of the host failed.".into()));
    }
    let mut by_code = BTreeMap::<u16, Vec<String>>::new();
    refusals.into_iter().for_each(|(code, why)| by_code.entry(code).or_default().push(why));
    for (code, why) in by_code {
        let why = why.join(" ");
        let content = Content::new(Some(Ref::from_schema_name("Refusal")));
        let response = ResponseBuilder::new().description(why).content("application/json", content);
        described = described.response(code.to_string(), response.build());
    }
    described
}

fn success(success: Success) -> Vec<(&'static str, utoipa::openapi::Response)> {
    let done = ResponseBuilder::new().description("Done.");
    let with_schema = |name| Content::new(Some(Ref::from_schema_name(name)));
    match success {
        Success::Nothing => vec![("204", done.build())],
        Success::Body(schema) => vec![("200", done.content("application/json", with_schema(schema)).build())],
        Success::BodyIfBooted(schema) => {
            let booted = ResponseBuilder::new().description("Done. The change applies to the booted VM.");
            vec![
                ("200", booted.content("application/json", with_schema(schema)).build()),
                ("204", done.description("Done. The change applies from the next boot.").build()),
            ]
        }
        Success::Document => {
            let object = ObjectBuilder::new().schema_type(Type::Object);
            vec![("200", done.content("application/json", Content::new(Some(object))).build())]
        }
        Success::Text => {
            let text = ObjectBuilder::new().schema_type(Type::String);
            let media_type = METRICS_TYPE.split(';').next().unwrap_or_default();
            vec![("200", done.content(media_type, Content::new(Some(text))).build())]
        }
    }
}

/// Schema of [`types::VmCounters`].
fn counters() -> Schema {
    let number = ObjectBuilder::new()
        .schema_type(Type::Integer)
        .format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64)))
        .minimum(Some(0));
    let of_device =
        ObjectBuilder::new().additional_properties(Some(AdditionalProperties::RefOr(RefOr::T(number.into()))));
    ObjectBuilder::new()
        .description(Some("Counters by device ID and counter name."))
        .additional_properties(Some(AdditionalProperties::RefOr(RefOr::T(of_device.into()))))
        .into()
}

/// Schema of an error message.
fn refusal() -> Schema {
    ArrayBuilder::new()
        .items(ObjectBuilder::new().schema_type(Type::String))
        .description(Some("Error message: a list with one line of text."))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `CAROM_BLESS=1 cargo test -p carom-api stored_document` rewrites the stored document.
    #[test]
    fn stored_document_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        let text = text().unwrap();
        if std::env::var_os("CAROM_BLESS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let stored = std::fs::read_to_string(path).unwrap();
        assert!(
            stored == text,
            "docs/openapi.json is stale: run CAROM_BLESS=1 cargo test -p carom-api stored_document"
        );
    }

    #[test]
    fn every_referenced_schema_exists() {
        let document = serde_json::to_value(generate()).unwrap();
        let text = document.to_string();
        let names = text.split("#/components/schemas/").skip(1).map(|rest| rest.split('"').next().unwrap());
        for name in names {
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
