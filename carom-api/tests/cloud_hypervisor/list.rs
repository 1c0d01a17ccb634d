// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Generates the page that compares Carom's API with Cloud Hypervisor's API: `docs/cloud-hypervisor.md`.

use std::fmt::Write;

use carom_api::operations::{self, Operation, Success};
use carom_api::unsupported::{Neutral, UNSUPPORTED, Unsupported};

use crate::options;
use crate::ours::Ours;
use crate::theirs::{Theirs, type_of_element};

/// Returns the whole page.
pub(crate) fn text(theirs: &Theirs, ours: &Ours) -> String {
    let mut text = format!(
        "<!-- SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause -->\n\
         <!-- Made by CAROM_BLESS=1 cargo test -p carom-api comparison_page; do not edit. -->\n\
         # Against Cloud Hypervisor\n\
         This page is for users of Cloud Hypervisor's API. It compares the OpenAPI document of Cloud Hypervisor (version {}, after release {}) with Carom's. It lists the parts that \
         Carom lacks, and those that only Carom has. All other paths, names and types are the same. [API](api.md) describes further differences.\n\n",
        theirs.document, theirs.release
    );
    configuration(&mut text, theirs, ours);
    values(&mut text, theirs, ours);
    operations(&mut text, theirs);
    bodies(&mut text, theirs, ours);
    text.push_str(&options::section());
    besides(&mut text, theirs, ours);
    text
}

fn configuration(text: &mut String, theirs: &Theirs, ours: &Ours) {
    text.push_str(
        "## Fields of a configuration\n\
         Each field accepts null, or its neutral value, which requests no feature. Carom rejects any other value. In the name of a field, `[]` stands for \
         each element of a list. The error for a rejected value ends with the text of the last column. `vm.info` reports the neutral value, if the field has one.\n\n\
         | field | neutral value | alternative |\n| --- | --- | --- |\n",
    );
    let mut in_document = Vec::new();
    theirs.walk("VmConfig", &mut |path, field| {
        if let Some(refused) = refused(path) {
            let schema = type_of_element(&field.kind).unwrap_or(&field.kind);
            row(text, refused, &fields_within(theirs, schema));
            in_document.push(path.to_string());
            return false;
        }
        ours.type_at("VmConfig", path).is_some()
    });
    text.push_str(
        "\nCarom treats the following fields in the same way. Cloud Hypervisor's document lacks these \
         fields, but clients send them, or older releases of Cloud Hypervisor had them:\n\n\
         | field | neutral value | alternative |\n| --- | --- | --- |\n",
    );
    for refused in UNSUPPORTED {
        let within = |path: &String| refused.path == path || refused.path.starts_with(&format!("{path}."));
        if !in_document.iter().any(within) {
            row(text, refused, "");
        }
    }
}

fn refused(path: &str) -> Option<&'static Unsupported> {
    UNSUPPORTED.iter().find(|refused| refused.path == path)
}

/// Returns a path in the form that error messages use.
fn shown(path: &str) -> String {
    path.replace(".*", "[]")
}

fn fields_within(theirs: &Theirs, schema: &str) -> String {
    let names: Vec<_> = theirs.fields(schema).into_iter().flatten().map(|(name, _)| format!("`{name}`")).collect();
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

fn row(text: &mut String, refused: &Unsupported, within: &str) {
    let neutral = match refused.neutral {
        Neutral::Null => String::new(),
        neutral => format!("`{}`", neutral.value()),
    };
    writeln!(text, "| `{}`{within} | {neutral} | {} |", shown(refused.path), refused.instead).unwrap();
}

/// Lists unsupported values of fields that Carom supports.
fn values(text: &mut String, theirs: &Theirs, ours: &Ours) {
    let mut rows = String::new();
    theirs.walk("VmConfig", &mut |path, field| {
        if refused(path).is_some() {
            return false;
        }
        if let (Some(theirs), Some(ours)) = (theirs.values(&field.kind), ours.values_at("VmConfig", path)) {
            let missing = theirs.iter().filter(|value| !ours.contains(&value.as_str()));
            let missing: Vec<_> = missing.map(|value| format!("`{value}`")).collect();
            if !missing.is_empty() {
                writeln!(rows, "| `{}` | {} |", shown(path), missing.join(", ")).unwrap();
            }
        }
        true
    });
    if !rows.is_empty() {
        write!(text, "\n## Values\n| field | unsupported values |\n| --- | --- |\n{rows}").unwrap();
    }
}

fn ours_of(method: &str, name: &str) -> Option<&'static Operation> {
    operations::all().find(|operation| operation.name == name && operation.verb.name() == method)
}

fn operations(text: &mut String, theirs: &Theirs) {
    let missing = theirs.operations.iter().filter(|(name, operation)| ours_of(&operation.method, name).is_none());
    let missing: Vec<_> = missing.map(|(name, _)| format!("`{name}`")).collect();
    writeln!(text, "\n## Operations\nNot supported: {}.", missing.join(", ")).unwrap();
}

/// Lists fields of request bodies and answers, except fields of the configuration.
fn bodies(text: &mut String, theirs: &Theirs, ours: &Ours) {
    text.push_str("\n## Other bodies and answers\n");
    let mut rows = String::new();
    for (name, operation) in &theirs.operations {
        let Some(own) = ours_of(&operation.method, name) else { continue };
        let answer = match own.success {
            Success::Body(schema) | Success::BodyIfBooted(schema) => Some(schema),
            Success::Nothing | Success::Document | Success::Text => None,
        };
        let pairs = [(operation.body.as_deref(), own.request), (operation.answer.as_deref(), answer)];
        let mut missing = Vec::new();
        for (their_schema, schema) in pairs {
            let (Some(their_schema), Some(schema)) = (their_schema, schema) else { continue };
            for name in theirs.fields(their_schema).into_iter().flatten().map(|(name, _)| name) {
                let of_configuration = schema.ends_with("Config")
                    && UNSUPPORTED.iter().any(|refused| refused.path.ends_with(&format!(".*.{name}")));
                if !of_configuration && their_schema != "VmConfig" && ours.type_at(schema, name).is_none() {
                    missing.push(format!("`{name}`"));
                }
            }
        }
        if !missing.is_empty() {
            writeln!(rows, "| `{name}` | {} |", missing.join(", ")).unwrap();
        }
    }
    match rows.as_str() {
        "" => text.push_str(
            "For each operation that Carom supports, Carom supports all fields of the body and of the answer.\n",
        ),
        rows => write!(text, "| operation | unsupported fields |\n| --- | --- |\n{rows}").unwrap(),
    }
}

fn besides(text: &mut String, theirs: &Theirs, ours: &Ours) {
    let mut known = Vec::new();
    theirs.walk("VmConfig", &mut |path, _| {
        known.push(path.to_string());
        true
    });
    let mut own = Vec::new();
    ours.walk("VmConfig", &mut |path| {
        let is_known = known.iter().any(|known| known == path);
        if !is_known {
            own.push(format!("`{}`", shown(path)));
        }
        is_known
    });
    let of_server = operations::all().filter(|operation| !theirs.operations.contains_key(operation.name));
    let more: Vec<_> = of_server.map(|operation| format!("`{} {}`", operation.verb.name(), operation.name)).collect();
    writeln!(
        text,
        "\n## Only in Carom\n- Fields of a configuration: {}.\n- Operations: {}.",
        own.join(", "),
        more.join(", ")
    )
    .unwrap();
}
