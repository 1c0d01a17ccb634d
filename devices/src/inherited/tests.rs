// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of inherited descriptors that are used instead of files and sockets.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::*;

fn keep_any(fd: impl Into<OwnedFd>) -> PathBuf {
    let fd = fd.into();
    let number = fd.as_raw_fd();
    keep(number, fd).unwrap();
    PathBuf::from(format!("/dev/fd/{number}"))
}

fn refusal<T>(given: Option<io::Result<T>>) -> String {
    given.unwrap().err().unwrap().to_string()
}

#[test]
fn kept_file_is_found_by_either_path_without_rights() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk");
    fs::write(&path, b"text").unwrap();
    let kept = keep_any(File::options().read(true).write(true).open(&path).unwrap());
    fs::remove_file(&path).unwrap();
    let had = file(&kept, Access::ReadWrite).unwrap().unwrap();
    had.write_all_at(b"n", 0).unwrap();
    let other = PathBuf::from("/proc/self/fd").join(kept.file_name().unwrap());
    let mut bytes = [0; 4];
    file(&other, Access::Read).unwrap().unwrap().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"next");
    assert!(is_kept(&kept) && is_kept(&other));
    for none in ["/dev/fd/", "/dev/fd/x", "/dev/fd/9999", "/dev/fd/-1", "/dev/shm/3"] {
        assert!(file(Path::new(none), Access::Read).is_none() && !is_kept(Path::new(none)), "{none}");
    }
}

#[test]
fn file_with_too_few_access_rights_is_refused() {
    let file_of = |options: &mut fs::OpenOptions| {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        fs::write(&path, b"").unwrap();
        keep_any(options.open(path).unwrap())
    };
    let reading = file_of(File::options().read(true));
    for access in [Access::ReadWrite, Access::Append] {
        assert_eq!(refusal(file(&reading, access)), "the descriptor is open for reading only: open it for writing too");
    }
    assert!(file(&reading, Access::Read).unwrap().is_ok());
    let writing = file_of(File::options().write(true));
    assert_eq!(
        refusal(file(&writing, Access::Read)),
        "the descriptor is open for writing only: open it for reading too"
    );
    assert!(file(&writing, Access::Append).unwrap().is_ok());
    let adding = file_of(File::options().read(true).append(true));
    assert_eq!(
        refusal(file(&adding, Access::ReadWrite)),
        "the descriptor is open for appending only: open it without O_APPEND"
    );
}

#[test]
fn wrong_descriptor_kind_is_refused_naming_both_kinds() {
    let (reader, writer) = io::pipe().unwrap();
    let (reader, writer) = (keep_any(reader), keep_any(writer));
    assert_eq!(
        refusal(file(&reader, Access::Read)),
        "the descriptor refers to a pipe, not to a file or a block device"
    );
    assert!(file(&writer, Access::Append).unwrap().is_ok());
    assert!(random_source(&reader).unwrap().is_ok());
    assert_eq!(refusal(random_source(&writer)), "the descriptor is open for writing only: open it for reading too");
    assert_eq!(refusal(listener(&reader)), "the descriptor refers to a pipe, not to a listening unix socket");
    assert_eq!(refusal(connection(&reader)), "the descriptor refers to a pipe, not to a connected unix socket");
    let number: i32 = reader.file_name().unwrap().to_str().unwrap().parse().unwrap();
    assert_eq!(interface(number).unwrap_err().to_string(), "the descriptor refers to a pipe, not to a tap interface");
    let unknown = interface(1 << 20).unwrap_err().to_string();
    assert_eq!(unknown, "the program was not started with this descriptor: start carom with the descriptor open");
    let nothing = keep(5, File::open("/dev/null").unwrap().into()).unwrap_err().to_string();
    assert!(nothing.starts_with("is neither /dev/kvm"), "{nothing}");
}

#[test]
fn listener_has_one_user_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let kept = keep_any(UnixListener::bind(&path).unwrap());
    for _ in 0..2 {
        let had = listener(&kept).unwrap().unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        had.listener.accept().unwrap().0.write_all(b"x").unwrap();
        client.read_exact(&mut [0]).unwrap();
        assert_eq!(
            refusal(listener(&kept)),
            "another option of this VM already uses this descriptor: give each option its own descriptor"
        );
    }
}

#[test]
fn connection_is_given_out_once_and_closed_by_its_user() {
    let (one, mut other) = UnixStream::pair().unwrap();
    let kept = keep_any(one);
    let had = connection(&kept).unwrap().unwrap();
    assert!(refusal(connection(&kept)).starts_with("the connection of this descriptor was already used"));
    drop(had);
    assert_eq!(other.read(&mut [0]).unwrap(), 0, "no other descriptor keeps the connection open");
}

#[test]
fn device_is_given_out_once() {
    let function = PathBuf::from("/sys/devices/pci0000:00/0000:00:1f.7");
    let file = Some(File::open("/dev/null").unwrap());
    let device = Kept { number: 1 << 20, file, kind: Kind::VfioDevice(function.clone()), in_use: Weak::new() };
    lock(&KEPT).push(device);
    assert!(vfio_device(Path::new("/sys/devices/pci0000:00/0000:00:1e.7")).is_none());
    assert!(vfio_device(&function).is_some());
    assert!(vfio_device(&function).is_none());
}
