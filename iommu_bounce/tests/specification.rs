// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Checks that the proposal to the virtio specification, the protocol and the guest's header match the engine.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use iommu_bounce::spec::{self, Status, config, feature, readable, request};

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the lines that the patch with the proposal of bounce windows adds, without the leading `+`.
fn proposal() -> Vec<String> {
    added("docs/specification/0001-virtio-iommu-Add-bounce-windows.patch")
}

/// Returns the lines that a patch adds, without the leading `+`.
fn added(patch: &str) -> Vec<String> {
    let patch = read(patch);
    let added = patch.lines().filter(|line| !line.starts_with("+++")).filter_map(|line| line.strip_prefix('+'));
    added.map(|line| line.trim().to_owned()).collect()
}

/// Returns the number of `name` from a line such as `#define NAME 0x40`.
fn defined(lines: &[String], name: &str) -> u64 {
    let define = |line: &String| {
        let mut words = line.split_whitespace();
        (words.next() == Some("#define") && words.next() == Some(name)).then(|| words.next().map(str::to_owned))?
    };
    let text = lines.iter().find_map(define).unwrap_or_else(|| panic!("{name} is not defined"));
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).expect("a number"),
        None => text.parse().expect("a number"),
    }
}

/// Returns the size in bytes of a field's type. `kind` is the name of the type in the specification or in the guest's header. Returns
/// `None` for an unknown name.
fn size(kind: &str) -> Option<usize> {
    match kind.trim_start_matches("__") {
        "u8" => Some(1),
        "le32" | "virtio_iommu_req_head" | "virtio_iommu_req_tail" => Some(4),
        "le64" => Some(8),
        _ => None,
    }
}

/// Returns the fields of a structure with their offsets in bytes, and the size of the structure. The structure ends at `};`.
fn fields(lines: &[String], structure: &str) -> (BTreeMap<String, usize>, usize) {
    let start = lines.iter().position(|line| line.starts_with(&format!("struct {structure} {{")));
    let start = start.unwrap_or_else(|| panic!("{structure} does not exist"));
    layout(lines[start + 1..].iter().take_while(|line| !line.starts_with('}')))
}

fn layout<'a>(lines: impl Iterator<Item = &'a String>) -> (BTreeMap<String, usize>, usize) {
    let (mut offsets, mut offset) = (BTreeMap::new(), 0);
    for line in lines {
        let words: Vec<&str> = line.trim_start_matches("struct ").split_whitespace().collect();
        let [kind, name] = words[..] else { continue };
        let Some(size) = size(kind) else { continue };
        let name = name.trim_end_matches(';');
        let (name, count) = match name.split_once('[') {
            Some((name, count)) => (name, count.trim_end_matches(']').parse().expect("a length")),
            None => (name, 1),
        };
        offsets.insert(name.to_owned(), offset);
        offset += size * count;
    }
    (offsets, offset)
}

fn header() -> Vec<String> {
    let text = read("guest/src/include/uapi/linux/virtio_iommu_window.h");
    text.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn request_types_are_the_same_everywhere() {
    let protocol = read("docs/bounce-windows.md");
    for (name, number) in [("WINDOW_ADD", request::WINDOW_ADD), ("WINDOW_DEL", request::WINDOW_DEL)] {
        let name = format!("VIRTIO_IOMMU_T_{name}");
        assert_eq!(defined(&proposal(), &name), u64::from(number), "{name} in the proposal");
        assert_eq!(defined(&header(), &name), u64::from(number), "{name} in the guest");
        assert!(protocol.contains(&format!("`{name}` = {number:#x}")), "{name} in the protocol");
    }
}

#[test]
fn feature_bits_are_the_same_in_guest_protocol_and_engine() {
    let bit = feature::BOUNCE_WINDOW.trailing_zeros();
    assert_eq!(defined(&header(), "VIRTIO_IOMMU_F_BOUNCE_WINDOW"), u64::from(bit));
    assert!(read("docs/bounce-windows.md").contains(&format!("`VIRTIO_IOMMU_F_BOUNCE_WINDOW` = {bit}")));
    assert!(proposal().iter().any(|line| line.contains("[VIRTIO_IOMMU_F_BOUNCE_WINDOW (9)]")));
    // The proposal has only version 3.
    for (name, bit) in [("V2", feature::BOUNCE_WINDOW_V2), ("V2_HIGH", feature::BOUNCE_WINDOW_V2_HIGH)] {
        let (name, bit) = (format!("VIRTIO_IOMMU_F_BOUNCE_WINDOW_{name}"), bit.trailing_zeros());
        assert_eq!(defined(&header(), &name), u64::from(bit));
        assert!(read("docs/bounce-windows.md").contains(&format!("`{name}` = {bit}")));
    }
}

#[test]
fn map_lists_are_the_same_everywhere() {
    let (bit, kind) = (feature::MAP_LIST.trailing_zeros(), request::MAP_LIST);
    let protocol = read("docs/map-lists.md");
    assert!(protocol.contains(&format!("`VIRTIO_IOMMU_F_MAP_LIST` = {bit}")));
    assert!(protocol.contains(&format!("`VIRTIO_IOMMU_T_MAP_LIST` = {kind:#x}")));
    let proposal = added("docs/specification/0002-virtio-iommu-Add-a-request-that-maps-a-list-of-range.patch");
    assert!(proposal.iter().any(|line| line.contains("[VIRTIO_IOMMU_F_MAP_LIST (10)]")));
    let guests = ["6.12", "7.3"].map(|series| {
        added(&format!("guest/patches/{series}/0027-iommu-virtio-Map-several-ranges-by-one-request.patch"))
    });
    for guest in &guests {
        assert_eq!(defined(guest, "VIRTIO_IOMMU_F_MAP_LIST"), u64::from(bit));
        assert_eq!(defined(guest, "VIRTIO_IOMMU_MAP_LIST_MAX"), spec::MAX_MAP_RANGES as u64);
    }
    for lines in guests.iter().chain([&proposal]) {
        assert_eq!(defined(lines, "VIRTIO_IOMMU_T_MAP_LIST"), u64::from(kind));
        let (range, size) = fields(lines, "virtio_iommu_map_range");
        assert_eq!((range["phys_start"], range["length"], size), (0, 8, spec::MAP_RANGE_SIZE));
        let (list, size) = fields(lines, "virtio_iommu_req_map_list");
        assert_eq!([list["domain"], list["virt_start"], list["flags"], list["count"]], [4, 8, 16, 20]);
        // The proposal also has the tail in the structure.
        let tail = if list.contains_key("tail") { spec::TAIL_SIZE } else { 0 };
        assert_eq!(size, readable::MAP_LIST + tail);
    }
}

#[test]
fn requests_have_the_same_layout_everywhere() {
    let add = ("virtio_iommu_req_window_add", readable::WINDOW_ADD, spec::WINDOW_ADD_REPLY);
    let del = ("virtio_iommu_req_window_del", readable::WINDOW_DEL, spec::TAIL_SIZE);
    for (structure, readable, writable) in [add, del] {
        let (proposed, size) = fields(&proposal(), structure);
        assert_eq!(size, readable + writable, "{structure} in the proposal");
        assert_eq!((proposed.clone(), size), fields(&header(), structure), "{structure} in the guest");
        let first = if structure.ends_with("add") { "shm_offset" } else { "tail" };
        assert_eq!(proposed[first], readable, "the start of the writable part of {structure}");
    }
}

#[test]
fn configuration_has_the_same_layout_everywhere() {
    let proposal = proposal();
    let start = proposal.iter().position(|line| line == "le64 window_iova_start;").expect("the first field");
    let (proposed, size) = layout(proposal[start..].iter().take(6));
    assert_eq!(config::STANDARD_SIZE + size, config::WINDOW_SIZE);
    let (guest, _) = fields(&header(), "virtio_iommu_window_config");
    let protocol = read("docs/bounce-windows.md");
    for (name, offset) in [
        ("window_iova_start", config::WINDOW_IOVA_START),
        ("window_iova_end", config::WINDOW_IOVA_END),
        ("window_chunk_size", config::WINDOW_CHUNK_SIZE),
        ("window_budget", config::WINDOW_BUDGET),
        ("bounce_threshold", config::BOUNCE_THRESHOLD),
        ("bounce_threshold_write", config::BOUNCE_THRESHOLD_WRITE),
    ] {
        assert_eq!(config::STANDARD_SIZE + proposed[name], offset, "{name} in the proposal");
        // In the guest's header, the standard structure is the first field of the structure.
        assert_eq!(config::STANDARD_SIZE + guest[name], offset, "{name} in the guest");
        assert!(
            protocol.lines().any(|line| line.starts_with(&format!("| {offset} |")) && line.contains(name)),
            "{name} in the protocol"
        );
    }
}

#[test]
fn statuses_of_the_proposal_are_those_of_the_protocol() {
    let (proposal, protocol) = (proposal().join("\n"), read("docs/bounce-windows.md"));
    let statuses = [Status::DevErr, Status::Inval, Status::Range, Status::NoEnt, Status::NoMem];
    for status in statuses {
        let name = format!("{status:?}").to_uppercase();
        assert!(proposal.contains(&format!("VIRTIO_IOMMU_S_{name} if")), "{name} in the proposal");
        assert!(protocol.contains(&format!("| `{name}` |")), "{name} in the protocol");
    }
}

#[test]
fn conformance_clauses_have_each_new_section() {
    let proposal = proposal();
    for side in ["device", "driver"] {
        for section in ["", " / WINDOWADD", " / WINDOWDEL"] {
            let name = format!("{{Device Types / IOMMU Device / Device operations / Bounce windows{section}}}");
            let section = proposal
                .iter()
                .any(|line| line.starts_with(&format!("\\{side}normative{{\\")) && line.ends_with(&name));
            assert!(section, "{side}: {name} has no requirements");
            let clause = format!("\\item \\ref{{{side}normative:{}", name.trim_start_matches('{'));
            assert!(proposal.contains(&clause), "{side}: {name} has no clause");
        }
    }
}
