// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Names and values in a request can be as long as the body. Neither the log nor an error message repeats them in full.

use std::sync::{Mutex, PoisonError};

use carom_api::body::{Unknown, parse, parse_config, parse_device};
use carom_api::types::VmResize;
use carom_api::{DeviceConfig, VmConfig};
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::{Map, Value, json};

/// Maximum bytes of a line that counts as short.
const SHORT: usize = 1024;

/// Logged lines.
struct Lines(Mutex<Vec<String>>);

static LOGGED: Lines = Lines(Mutex::new(Vec::new()));

impl Log for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
    }

    fn flush(&self) {}
}

/// Returns a long text whose characters have several bytes, so that a cut may fall inside a character.
fn long() -> String {
    "aä€".repeat(2_000)
}

#[test]
fn only_a_few_unknown_names_are_logged_and_cut() {
    log::set_logger(&LOGGED).unwrap();
    log::set_max_level(LevelFilter::Trace);
    let fields: Map<String, Value> = (0..100).map(|number| (format!("{number:03}{}", long()), json!(1))).collect();
    let body = Value::Object(fields).to_string();
    parse::<VmResize>(body.as_bytes()).unwrap();

    let logged = LOGGED.0.lock().unwrap();
    let [line] = &logged[..] else { panic!("{} lines", logged.len()) };
    assert!(line.len() <= SHORT, "{} bytes", line.len());
    assert!(line.contains("000aä€") && line.contains('…') && line.contains(" and 92 more; "), "{line}");
}

#[test]
fn refusal_quotes_only_the_start_of_a_long_name() {
    let long = long();
    let twice = format!(r#"{{"{long}": 1, "{long}": 1}}"#);
    let config = |body: &str| parse_config::<VmConfig>(body.as_bytes(), Unknown::Refused).unwrap_err();
    let device = json!({"path": "/d", "x": {&long: 1}, "iommu": &long}).to_string();
    for (refusal, start) in [
        (config(&json!({"payload": {"kernel": "/k"}, &long: 1}).to_string()), "aä€a"),
        (config(&json!({"payload": {"kernel": "/k", &long: 1}}).to_string()), "payload.aä€a"),
        (config(&json!({"payload": {"kernel": "/k"}, "memory": {"size": &long}}).to_string()), "memory.size: "),
        (config(&json!({"payload": {"kernel": "/k"}, "console": {"mode": "Off", &long: 1}}).to_string()), "console"),
        (config(&twice), "aä€a"),
        (parse_device::<DeviceConfig>(device.as_bytes(), DeviceConfig::OPTION).unwrap_err(), "iommu: "),
    ] {
        assert!(refusal.starts_with(start), "{start}: {}", &refusal[..refusal.floor_char_boundary(100)]);
        assert!(refusal.len() <= SHORT && refusal.contains('…'), "{start}: {} bytes", refusal.len());
    }
}
