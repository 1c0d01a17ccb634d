// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Readable parts of requests, as a driver would write them.

use crate::spec::request;

/// Encodes a request of this type from its fields.
fn encode(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    fields.iter().for_each(|field| bytes.extend_from_slice(field));
    bytes
}

/// Returns an ATTACH without flags.
pub fn attach(endpoint: u32, domain: u32) -> Vec<u8> {
    let (domain, endpoint) = (domain.to_le_bytes(), endpoint.to_le_bytes());
    encode(request::ATTACH, &[&domain, &endpoint, &[0; 8]])
}

/// Returns an ATTACH to a bypass domain.
pub fn attach_bypass(endpoint: u32, domain: u32) -> Vec<u8> {
    let mut bytes = attach(endpoint, domain);
    bytes[12] = 1;
    bytes
}

/// Returns a DETACH.
pub fn detach(endpoint: u32, domain: u32) -> Vec<u8> {
    let (domain, endpoint) = (domain.to_le_bytes(), endpoint.to_le_bytes());
    encode(request::DETACH, &[&domain, &endpoint, &[0; 8]])
}

/// Returns a MAP of the IOVAs from `start` to `last`, inclusive.
pub fn map(domain: u32, start: u64, last: u64, gpa: u64, flags: u32) -> Vec<u8> {
    encode(
        request::MAP,
        &[&domain.to_le_bytes(), &start.to_le_bytes(), &last.to_le_bytes(), &gpa.to_le_bytes(), &flags.to_le_bytes()],
    )
}

/// Returns a MAP_LIST. `ranges` holds the guest-physical address and the length in bytes of each range.
pub fn map_list(domain: u32, start: u64, flags: u32, ranges: &[(u64, u64)]) -> Vec<u8> {
    let count = u32::try_from(ranges.len()).expect("a test needs fewer ranges");
    let ranges: Vec<u8> =
        ranges.iter().flat_map(|(gpa, len)| [gpa.to_le_bytes(), len.to_le_bytes()].concat()).collect();
    let (domain, flags, count) = (domain.to_le_bytes(), flags.to_le_bytes(), count.to_le_bytes());
    encode(request::MAP_LIST, &[&domain, &start.to_le_bytes(), &flags, &count, &ranges])
}

/// Returns an UNMAP of the IOVAs from `start` to `last`, inclusive.
pub fn unmap(domain: u32, start: u64, last: u64) -> Vec<u8> {
    encode(request::UNMAP, &[&domain.to_le_bytes(), &start.to_le_bytes(), &last.to_le_bytes(), &[0; 4]])
}

/// Returns a PROBE.
pub fn probe(endpoint: u32) -> Vec<u8> {
    encode(request::PROBE, &[&endpoint.to_le_bytes(), &[0; 64]])
}

/// Returns a WINDOW_ADD of version 3.
pub fn window_add(domain: u32, flags: u32, iova: u64) -> Vec<u8> {
    let (domain, flags) = (domain.to_le_bytes(), flags.to_le_bytes());
    encode(request::WINDOW_ADD, &[&domain, &iova.to_le_bytes(), &flags, &[0; 8]])
}

/// Returns a WINDOW_DEL of version 3.
pub fn window_del(domain: u32, iova: u64) -> Vec<u8> {
    encode(request::WINDOW_DEL, &[&domain.to_le_bytes(), &iova.to_le_bytes(), &[0; 12]])
}

/// Returns a WINDOW_ADD of version 2.
pub fn window_add_v2(domain: u32, flags: u32, iova: u64) -> Vec<u8> {
    let (domain, flags) = (domain.to_le_bytes(), flags.to_le_bytes());
    encode(request::WINDOW_ADD, &[&domain, &flags, &iova.to_le_bytes(), &[0; 8]])
}

/// Returns a WINDOW_DEL of version 2.
pub fn window_del_v2(domain: u32, iova: u64) -> Vec<u8> {
    encode(request::WINDOW_DEL, &[&domain.to_le_bytes(), &[0; 4], &iova.to_le_bytes(), &[0; 8]])
}
