// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the registry.

use std::collections::BTreeSet;

use super::*;

#[test]
fn names_options_and_ids_of_kinds_are_unique() {
    for name in [
        |kind: &Kind| kind.name,
        |kind: &Kind| kind.field.option(),
        |kind: &Kind| kind.field.json(),
        |kind: &Kind| kind.id,
    ] {
        let names: BTreeSet<_> = KINDS.iter().map(|kind| name(kind)).collect();
        assert_eq!(names.len(), KINDS.len(), "{names:?}");
    }
    for kind in KINDS {
        assert!(kind.field.option().starts_with("--") && kind.id.starts_with('_'), "{}", kind.name);
        assert_eq!(kind.name, kind.name.to_lowercase());
        assert!(kind.takes_slot || kind.add.is_none(), "{}: a device that can be added needs a slot", kind.name);
        assert!(
            !kind.passed_through || kind.iommu.is_some(),
            "{}: bounce windows are for passed-through devices",
            kind.name
        );
    }
}

#[test]
fn device_name_is_checked_in_options_and_bodies() {
    for kind in KINDS.iter().filter(|kind| kind.add.is_some()) {
        let (option, json) = match kind.name {
            "vfio-user" => ("socket=/x", r#""socket": "/x""#),
            "fs" => ("tag=t,socket=/x", r#""tag": "t", "socket": "/x""#),
            "vsock" => ("cid=3,socket=/x", r#""cid": 3, "socket": "/x""#),
            "net" => ("tap=x", r#""tap": "x""#),
            "pmem" => ("file=/x", r#""file": "/x""#),
            _ => ("path=/x", r#""path": "/x""#),
        };
        let refused = kind.parse(&format!("{option},id=_x")).unwrap_err();
        let field = kind.field.key("id");
        assert_eq!(refused.field, field, "{refused}");
        let refused = kind.read(format!(r#"{{{json}, "id": ""}}"#).as_bytes()).unwrap_err();
        assert!(refused.starts_with(&field.name(Terms::Json)), "{refused}");
        let part = kind.parse(&format!("{option},id=x")).unwrap();
        assert_eq!((part.id(), part.kind().name), (Some("x"), kind.name));
        assert_eq!(kind.read(serde_json::to_string(&part).unwrap().as_bytes()), Ok(part));
    }
}
