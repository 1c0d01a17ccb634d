// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of snapshots on disk, and of directories that are not valid snapshots.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use carom_api::VmConfig;
use carom_api::config::MemoryConfig;
use serde_json::{Value, json};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

use super::*;
use crate::arch::saved::ProcessorsState;
use crate::memory;
use crate::memory::tests::said_by_smaps;
use crate::vm_state::{ChunkRange, RamRange, StateSink, VERSION, VmState, VmStateError, ram};

const RAM: u64 = 64 << 20;
const CHUNK: u64 = 2 << 20;

fn config() -> VmConfig {
    serde_json::from_value(json!({"payload": {"kernel": "/k"}, "memory": {"size": RAM}})).unwrap()
}

fn config_of(shared: bool) -> VmConfig {
    let mut config = config();
    config.memory.shared = shared;
    config
}

/// Writes a snapshot of a VM without devices. All RAM is zero except a byte in the second page and the last byte. The window has one chunk.
pub(crate) fn write(directory: &Path) -> VmState {
    fill(NewSnapshot::create(directory).unwrap()).unwrap()
}

/// Fills and finishes a snapshot that was begun.
fn fill(mut new: NewSnapshot) -> Result<VmState, VmStateError> {
    let config = config().check().unwrap();
    let ram = memory::create(&config.memory).unwrap();
    ram.write_obj(0x5au8, GuestAddress(4097)).unwrap();
    ram.write_obj(0xa5u8, GuestAddress(RAM - 1)).unwrap();
    let ram = ram::write(&ram, &[(0, RAM)], &mut new).unwrap();
    let mut chunk = vec![7; usize::try_from(CHUNK).unwrap()];
    let offset = new.append(&VolatileSlice::from(&mut chunk[..])).unwrap();
    let windows = vec![ChunkRange { index: 3, len: CHUNK, offset }];
    let processors = ProcessorsState::example(1);
    let state = VmState {
        version: VERSION,
        processors,
        platform: vec![],
        functions: vec![],
        ram,
        added_ram: vec![],
        windows,
        window_aperture: None,
        generation_id: None,
    };
    new.finish(&config, &state)?;
    Ok(state)
}

/// Appends a page of memory.
fn append(new: &mut NewSnapshot) -> Result<u64, VmStateError> {
    new.append(&VolatileSlice::from(&mut [1; 4096][..]))
}

fn written() -> (TempDir, PathBuf) {
    let parent = TempDir::new().unwrap();
    let directory = parent.path().join("snapshot");
    write(&directory);
    (parent, directory)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort_unstable();
    names
}

fn refusal(directory: &Path) -> String {
    Snapshot::open(directory, |_| Ok(())).unwrap_err().to_string()
}

#[test]
fn snapshot_reads_back_and_only_its_owner_can_open_it() {
    let (_parent, directory) = written();
    assert_eq!(names(&directory), ["config.json", "memory-ranges", "state.json"]);
    for name in names(&directory) {
        let mode = fs::metadata(directory.join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    let snapshot = Snapshot::open(&directory, |_| Ok(())).unwrap();
    assert_eq!(snapshot.config.memory.size, RAM);
    assert_eq!((snapshot.state.ram[0].len, snapshot.state.windows[0].index), (RAM, 3));
    assert_eq!(snapshot.memory.size().unwrap(), RAM + CHUNK);
}

#[test]
fn ram_is_what_it_was_and_writes_do_not_reach_the_snapshot() {
    for (shared, prefault) in [(false, false), (false, true), (true, false)] {
        let (_parent, directory) = written();
        let before = fs::read(directory.join("memory-ranges")).unwrap();
        let text = serde_json::to_vec(&config_of(shared)).unwrap();
        fs::write(directory.join("config.json"), text).unwrap();
        let snapshot = Snapshot::open(&directory, |_| Ok(())).unwrap();
        let ram = ram::restore(&snapshot, RAM, prefault).unwrap();
        assert_eq!(ram.read_obj::<u8>(GuestAddress(4097)).unwrap(), 0x5a, "shared {shared}, prefault {prefault}");
        assert_eq!(ram.read_obj::<u8>(GuestAddress(RAM - 1)).unwrap(), 0xa5);
        assert_eq!(ram.read_obj::<u64>(GuestAddress(0)).unwrap(), 0);
        // Code that shares RAM with another process needs the RAM's file.
        assert_eq!(ram.iter().next().unwrap().file_offset().is_some(), shared);
        let flags = said_by_smaps(ram.iter().next().unwrap(), "VmFlags:");
        assert!(flags.split(' ').any(|flag| flag == "dd"), "RAM is in core dumps: {flags}");
        ram.write_obj(1u8, GuestAddress(4097)).unwrap();
        drop(ram);
        assert!(before == fs::read(directory.join("memory-ranges")).unwrap());
    }
}

#[test]
fn snapshot_that_is_not_finished_leaves_nothing() {
    let parent = TempDir::new().unwrap();
    let (made, empty) = (parent.path().join("made"), parent.path().join("empty"));
    fs::create_dir(&empty).unwrap();
    for directory in [&made, &empty] {
        let mut new = NewSnapshot::create(directory).unwrap();
        append(&mut new).unwrap();
        assert!(Snapshot::open(directory, |_| Ok(())).is_err());
        drop(new);
    }
    assert!(!made.exists());
    assert!(names(&empty).is_empty());
    write(&empty);
    assert!(Snapshot::open(&empty, |_| Ok(())).is_ok());
}

thread_local! {
    /// Flushed directories, with the names that they contained at that time.
    static SYNCED: RefCell<Vec<(PathBuf, Vec<String>)>> = const { RefCell::new(Vec::new()) };
}

/// Records the directory. Fails if the directory's name is `failing`.
fn note_sync(directory: &Path) -> io::Result<()> {
    SYNCED.with_borrow_mut(|synced| synced.push((directory.to_path_buf(), names(directory))));
    if directory.ends_with("failing") { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
}

#[test]
fn finished_snapshot_has_its_directory_entries_synced() {
    let parent = TempDir::new().unwrap();
    let (made, there) = (parent.path().join("made"), parent.path().join("there"));
    fs::create_dir(&there).unwrap();
    let all = ["config.json", "memory-ranges", "state.json"].map(String::from).to_vec();
    let of_parent = (parent.path().to_path_buf(), vec!["made".to_string(), "there".into()]);
    for (directory, wanted) in [
        (&made, vec![of_parent, (made.clone(), all.clone())]),
        // The snapshot does not flush the parent of an existing directory, because the directory's creator must flush the name.
        (&there, vec![(there.clone(), all)]),
    ] {
        fill(NewSnapshot::create_with(directory, note_sync).unwrap()).unwrap();
        assert_eq!(SYNCED.take(), wanted);
    }
}

#[test]
fn snapshot_whose_names_cannot_be_flushed_is_removed() {
    let parent = TempDir::new().unwrap();
    let failing = parent.path().join("failing");
    let error = fill(NewSnapshot::create_with(&failing, note_sync).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: Input/output error (os error 5)", failing.display()));
    assert!(error.is_user_error() && !failing.exists());

    fs::create_dir(&failing).unwrap();
    let inner = failing.join("inner");
    let error = NewSnapshot::create_with(&inner, note_sync).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: Input/output error (os error 5)", failing.display()));
    assert!(names(&failing).is_empty());

    fill(NewSnapshot::create_with(&failing, note_sync).unwrap()).unwrap_err();
    assert!(names(&failing).is_empty(), "an existing directory stays, and is empty");
}

#[test]
fn second_snapshot_in_a_directory_leaves_the_first_intact() {
    let directory = TempDir::new().unwrap();
    let (mut first, mut second) =
        (NewSnapshot::create(directory.path()).unwrap(), NewSnapshot::create(directory.path()).unwrap());
    append(&mut first).unwrap();
    assert!(append(&mut second).is_err());
    drop(second);
    assert_eq!(names(directory.path()), ["memory-ranges"]);
}

#[test]
fn snapshot_keeps_client_files_in_its_directory() {
    let directory = TempDir::new().unwrap();
    fs::write(directory.path().join("libvirt-save.xml"), "<domain/>").unwrap();
    append(&mut NewSnapshot::create(directory.path()).unwrap()).unwrap();
    assert_eq!(names(directory.path()), ["libvirt-save.xml"]);
    write(directory.path());
    assert_eq!(names(directory.path()), ["config.json", "libvirt-save.xml", "memory-ranges", "state.json"]);
    assert!(Snapshot::open(directory.path(), |_| Ok(())).is_ok());
}

#[test]
fn snapshot_does_not_replace_files_of_another() {
    for name in ["config.json", "memory-ranges", "state.json", "state.json.unfinished"] {
        let directory = TempDir::new().unwrap();
        // A dangling link also counts as an existing file.
        std::os::unix::fs::symlink("nowhere", directory.path().join(name)).unwrap();
        let refused = NewSnapshot::create(directory.path()).unwrap_err();
        assert!(refused.to_string().contains(&format!("/{name}: already exists")), "{refused}");
        assert_eq!(names(directory.path()), [name]);
    }
}

#[test]
fn snapshot_does_not_replace_anything() {
    let (parent, directory) = written();
    let before = fs::read(directory.join("state.json")).unwrap();
    let refused = NewSnapshot::create(&directory).unwrap_err();
    let rule = "/config.json: already exists: save to an empty or new directory";
    assert!(refused.to_string().ends_with(rule), "{refused}");
    assert!(refused.is_user_error());
    assert_eq!(fs::read(directory.join("state.json")).unwrap(), before);
    assert!(NewSnapshot::create(&parent.path().join("none/there")).unwrap_err().to_string().contains("No such file"));
    let file = parent.path().join("file");
    File::create(&file).unwrap();
    assert!(NewSnapshot::create(&file).is_err());
    assert!(file.exists());
}

#[test]
fn state_that_breaks_a_rule_is_refused_with_its_place() {
    let (_parent, directory) = written();
    let path = directory.join("state.json");
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let cases: [(&str, Value, &str); 13] = [
        ("/version", 2.into(), "the state of 'snapshot' has version 2, but this program reads only version 1"),
        ("/version", (-1).into(), "version: invalid value"),
        ("/ram", json!([]), "ram: the saved RAM ranges do not match the configuration's 67108864 bytes of RAM"),
        ("/ram/0/len", (RAM / 2).into(), "ram: the saved RAM ranges do not match the configuration's"),
        ("/ram/0/gpa", 4096.into(), "ram: the saved RAM ranges do not match the configuration's"),
        (
            "/ram/0/offset",
            4096.into(),
            "memory-ranges: the saved range at offset 0x4000000 overlaps the range before it",
        ),
        ("/windows/0/offset", 0.into(), "memory-ranges: the saved range at offset 0x0 overlaps"),
        ("/windows/0/offset", (u64::MAX - 4095).into(), "ends beyond the file's 0x4200000 bytes"),
        ("/windows/0/len", (CHUNK + 4096).into(), "ends beyond the file"),
        ("/windows/0/len", 0.into(), "its length and offset must be multiples of 0x1000"),
        ("/windows/0/offset", (RAM + 1).into(), "its length and offset must be multiples of 0x1000"),
        ("/processors/vcpus", json!([]), "vcpus: the saved VM has 0 vCPUs, but the configuration boots 1 vCPUs"),
        ("/platform", json!([{"kind": "serial", "version": 1, "payload": {}, "more": 1}]), "platform[0]"),
    ];
    for (place, value, wanted) in cases {
        let mut spoiled = good.clone();
        *spoiled.pointer_mut(place).unwrap() = value;
        fs::write(&path, spoiled.to_string()).unwrap();
        let error = refusal(&directory);
        assert!(error.starts_with(path.to_str().unwrap()) && error.contains(wanted), "{place}: {error}");
        assert_eq!(error.lines().count(), 1);
    }
    let mut twice = good.clone();
    twice["windows"] = json!([good["windows"][0], {"index": 3, "len": 4096, "offset": RAM - 4096}]);
    twice["ram"][0]["offset"] = 0.into();
    fs::write(&path, twice.to_string()).unwrap();
    assert!(refusal(&directory).contains("overlaps"));
    fs::write(&path, good.to_string()).unwrap();
    assert!(Snapshot::open(&directory, |_| Ok(())).is_ok());
}

#[test]
fn ram_added_since_boot_is_checked_against_the_configuration() {
    const STEP: u64 = 128 << 20;
    let (_parent, directory) = written();
    let path = directory.join("state.json");
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let piece = |gpa: u64, len: u64| json!({"gpa": gpa, "len": len, "offset": 0});
    for (added, wanted) in [
        (
            json!([piece(4 << 30, 4096)]),
            "added_ram: the saved range of 0x1000 bytes at 0x100000000 must have a positive length, and its length and address must be multiples of 0x8000000",
        ),
        (
            json!([piece((4 << 30) + 4096, STEP)]),
            "must have a positive length, and its length and address must be multiples of",
        ),
        (json!([piece(4 << 30, 0)]), "must have a positive length, and its length and address must be multiples of"),
        (
            json!([piece(4 << 30, STEP)]),
            "added_ram: the saved ranges of added RAM together must have fewer bytes than the configuration's RAM of 67108864 bytes",
        ),
        (
            json!([piece(4 << 30, !(STEP - 1))]),
            "added_ram: the saved ranges of added RAM together must have fewer bytes than",
        ),
    ] {
        let mut spoiled = good.clone();
        spoiled["added_ram"] = added;
        fs::write(&path, spoiled.to_string()).unwrap();
        let error = refusal(&directory);
        assert!(error.contains(wanted), "{error}");
    }
    let mut state: VmState = serde_json::from_value(good).unwrap();
    let piece = |gpa, offset| RamRange { gpa, len: STEP, offset };
    let check = |state: &VmState| {
        state.check(&(1..=1), &MemoryConfig::with_size(RAM + 2 * STEP), 1 << 40).map_err(|error| error.to_string())
    };
    state.added_ram = vec![piece(4 << 30, 1 << 32), piece((4 << 30) + 2 * STEP, 1 << 33)];
    assert_eq!(check(&state), Ok(()));
    state.added_ram[1].gpa = 4 << 30;
    assert_eq!(
        check(&state),
        Err("added_ram: the saved range of added RAM at 0x100000000 overlaps earlier RAM: restore from an unmodified snapshot".into())
    );
    state.added_ram = vec![piece(0, 1 << 32), piece(4 << 30, 1 << 33)];
    assert_eq!(
        check(&state),
        Err("added_ram: the saved range of added RAM at 0x0 overlaps earlier RAM: restore from an unmodified snapshot"
            .into())
    );
    state.added_ram = vec![piece(4 << 30, 0), piece((4 << 30) + STEP, 1 << 33)];
    assert!(check(&state).unwrap_err().contains("overlaps"));
}

#[test]
fn truncated_missing_or_special_files_are_refused_by_name() {
    for name in ["config.json", "memory-ranges", "state.json"] {
        let (_parent, directory) = written();
        let path = directory.join(name);
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        let error = refusal(&directory);
        assert!(error.contains(if name == "memory-ranges" { "ends beyond the file" } else { name }), "{error}");
        fs::remove_file(&path).unwrap();
        assert!(refusal(&directory).contains(&format!("{name}: No such file")));
        // An ordinary open of a FIFO would wait for a writer.
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        assert!(refusal(&directory).ends_with("is not a regular file: restore from an unmodified snapshot"));
    }
}

#[test]
fn configuration_is_checked_again() {
    let (_parent, directory) = written();
    let path = directory.join("config.json");
    for (text, wanted) in [
        (json!({"payload": {"kernel": "/k"}, "memory": {"size": 1}}), "memory.size: "),
        (json!({"payload": {"kernel": "/k"}, "cpus": {"boot_vcpus": 2}, "memory": {"size": RAM}}), "has 1 vCPUs"),
        (
            json!({"payload": {"kernel": "/k"}, "memory": {"size": 2 * RAM}}),
            "ram: the saved RAM ranges do not match the configuration's",
        ),
        (json!({"payload": {"kernel": "/k"}, "more": 1}), "more: unknown field"),
        (json!([]), "config.json"),
    ] {
        fs::write(&path, text.to_string()).unwrap();
        let error = refusal(&directory);
        assert!(error.contains(wanted), "{error}");
    }
}
