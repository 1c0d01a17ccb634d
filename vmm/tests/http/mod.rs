// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Minimal client of the API, which sends bytes and reads one answer.

use std::io::{BufRead, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// Time after which a hanging test fails.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

pub(crate) fn send(stream: &mut UnixStream, method: &str, name: &str, body: Option<&Value>) {
    let body = body.map_or(String::new(), Value::to_string);
    let head = format!("{method} /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
}

/// Reads one response.
pub(crate) fn receive(reader: &mut impl BufRead) -> (u16, Vec<u8>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status: {line:?}")).parse().unwrap();
    let mut len = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).unwrap();
        if header.trim().is_empty() {
            break;
        }
        if let Some(value) = header.to_ascii_lowercase().strip_prefix("content-length:") {
            len = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; len];
    reader.read_exact(&mut body).unwrap();
    (status, body)
}
