// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of qcow2 disks. The tests compare disks with a model, simulate crashes, and use backing files. `qemu-img`, if installed, checks
//! the resulting images.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use imago::FormatCreateBuilder;
use imago::qcow2::Qcow2;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::harness::*;
use crate::pci::PciDevice;
use crate::virtio::block::fuzzing;
use crate::virtio::block::spec::{request, status};
use crate::virtio::block::{Image, ImageError, ImageFormat, ImageOptions};

const SECTORS: u64 = 512;
const BYTES: usize = 512 * 512;

const WRITTEN: ImageOptions = ImageOptions {
    read_only: false,
    direct: false,
    format: ImageFormat::Qcow2,
    backing_files: true,
    lock_all: false,
    allocated: false,
};
const READ: ImageOptions = ImageOptions { read_only: true, ..WRITTEN };
const ALONE: ImageOptions = ImageOptions { backing_files: false, ..WRITTEN };

type Storage = imago::file::File;

/// Creates an image of `bytes` bytes with clusters of `cluster` bytes. `behind` contains the name and the format of the backing file.
fn create(path: &Path, bytes: u64, cluster: usize, behind: Option<(&str, &str)>) {
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    let mut builder: imago::qcow2::Qcow2CreateBuilder<Storage> =
        Qcow2::create_builder(Storage::try_from(file).unwrap()).size(bytes).cluster_size(cluster);
    if let Some((name, format)) = behind {
        builder = builder.backing(name.into(), format.into());
    }
    builder.create().unwrap();
}

/// Checks the image with `qemu-img`, if installed.
fn assert_sound(path: &Path) {
    let Ok(output) = Command::new("qemu-img").args(["check", "-f", "qcow2", "--force-share"]).arg(path).output() else {
        return;
    };
    // Exit code 3 means leaked clusters, which a crash leaves behind.
    let sound = matches!(output.status.code(), Some(0 | 3));
    assert!(sound, "{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
}

/// Checks with `qemu-img`, if installed, that the content of the image is `bytes`.
fn assert_shows(path: &Path, bytes: &[u8]) {
    let raw = path.with_extension("expected");
    fs::write(&raw, bytes).unwrap();
    let compare = Command::new("qemu-img")
        .args(["compare", "--force-share", "-f", "qcow2", "-F", "raw"])
        .arg(path)
        .arg(&raw)
        .output();
    if let Ok(output) = compare {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

fn disk(path: &Path, options: ImageOptions) -> Harness {
    let kind = Kind { read_only: options.read_only, ..RING };
    let mut disk = Harness::of_image(kind, Image::open(path, options).unwrap(), file(&[]));
    disk.start();
    disk
}

/// Writes `bytes` to the disk, then closes the disk.
fn write(path: &Path, sector: u64, bytes: &[u8]) {
    let mut disk = disk(path, WRITTEN);
    disk.fill(DATA, bytes);
    let len = u32::try_from(bytes.len()).unwrap();
    assert_eq!(disk.call(request::OUT, sector, &[(DATA, len)]), status::OK);
}

/// Returns the whole content of the disk.
fn content(disk: &mut Harness, sectors: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    for sector in (0..sectors).step_by(64) {
        let len = u32::try_from((sectors - sector).min(64) * 512).unwrap();
        assert_eq!(disk.call(request::IN, sector, &[(DATA, len)]), status::OK);
        bytes.extend(disk.bytes(DATA, len as usize));
    }
    bytes
}

#[derive(Clone, Debug)]
enum Step {
    Read(u64, u64),
    Write(u64, u64, u8),
    Zero(u64, u32, bool),
    Discard(u64, u32),
    Flush,
    /// Simulates a killed process.
    Crash,
    /// Closes the disk and opens it again.
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    let place = || (0..SECTORS, 1..64u64).prop_map(|(sector, sectors)| (sector, sectors.min(SECTORS - sector)));
    let short = |sectors: u64| u32::try_from(sectors).unwrap();
    prop_oneof![
        4 => place().prop_map(|(sector, sectors)| Step::Read(sector, sectors)),
        8 => (place(), any::<u8>()).prop_map(|((sector, sectors), seed)| Step::Write(sector, sectors, seed)),
        2 => (place(), any::<bool>()).prop_map(move |((sector, sectors), unmap)| Step::Zero(sector, short(sectors), unmap)),
        2 => place().prop_map(move |(sector, sectors)| Step::Discard(sector, short(sectors))),
        2 => Just(Step::Flush),
        1 => Just(Step::Crash),
        1 => Just(Step::Reopen),
    ]
}

/// Runs `steps` on the image at `path`. At the start, `model` is the content of the image.
fn run(path: &Path, mut model: Vec<u8>, behind: bool, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut disk = disk(path, WRITTEN);
    // Possible content of each sector after a crash: the last flushed bytes, or any bytes written since that flush.
    let flushed = |model: &[u8]| model.chunks(512).map(|sector| vec![sector.to_vec()]).collect::<Vec<_>>();
    let mut may_be = flushed(&model);
    for step in steps {
        let range = |sector: u64, sectors: u64| {
            let at = |sector| usize::try_from(sector * 512).unwrap();
            at(sector)..at(sector + sectors)
        };
        let mut changed = None;
        match *step {
            Step::Read(sector, sectors) => {
                let len = u32::try_from(sectors * 512).unwrap();
                prop_assert_eq!(disk.call(request::IN, sector, &[(DATA, len)]), status::OK);
                prop_assert!(disk.bytes(DATA, len as usize) == model[range(sector, sectors)], "{:?}", step);
            }
            Step::Write(sector, sectors, seed) => {
                let bytes = pattern(usize::try_from(sectors * 512).unwrap(), seed);
                disk.fill(DATA, &bytes);
                let len = u32::try_from(bytes.len()).unwrap();
                prop_assert_eq!(disk.call(request::OUT, sector, &[(DATA, len)]), status::OK);
                model[range(sector, sectors)].copy_from_slice(&bytes);
                changed = Some((sector, sectors));
            }
            Step::Zero(sector, sectors, unmap) => {
                let ranges = [(sector, sectors, u32::from(unmap))];
                prop_assert_eq!(disk.call_ranges(request::WRITE_ZEROES, &ranges), status::OK);
                model[range(sector, sectors.into())].fill(0);
                changed = Some((sector, sectors.into()));
            }
            Step::Discard(sector, sectors) => {
                prop_assert_eq!(disk.call_ranges(request::DISCARD, &[(sector, sectors, 0)]), status::OK);
                // A discarded sector reads as zeroes, even if there is a backing file.
                model[range(sector, sectors.into())].fill(0);
                changed = Some((sector, sectors.into()));
            }
            Step::Flush => {
                prop_assert_eq!(disk.call(request::FLUSH, 0, &[]), status::OK);
                may_be = flushed(&model);
            }
            Step::Crash => {
                // The copy contains only the bytes of the file, and no data that this process caches in memory.
                let copy = path.with_extension("crashed");
                fs::copy(path, &copy).unwrap();
                // If the image has a backing file, `qemu-img` cannot check the copy, because QEMU does not open a locked backing file.
                if !behind {
                    assert_sound(&copy);
                }
                let mut crashed = self::disk(&copy, WRITTEN);
                let now = content(&mut crashed, SECTORS);
                for (sector, now) in now.chunks(512).enumerate() {
                    prop_assert!(may_be[sector].iter().any(|bytes| bytes == now), "sector {}", sector);
                }
                fs::remove_file(&copy).unwrap();
            }
            Step::Reopen => {
                drop(disk);
                assert_sound(path);
                disk = self::disk(path, WRITTEN);
                may_be = flushed(&model);
            }
        }
        let (sector, sectors) = changed.unwrap_or_default();
        for sector in sector..sector + sectors {
            may_be[usize::try_from(sector).unwrap()].push(model[range(sector, 1)].to_vec());
        }
    }
    prop_assert!(content(&mut disk, SECTORS) == model);
    drop(disk);
    assert_sound(path);
    assert_shows(path, &model);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn disk_keeps_written_data_and_flushed_data_survives_a_crash(
        steps in prop::collection::vec(step(), 1..40),
        cluster in prop::sample::select(vec![512, 4096, 65536]),
        behind in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        let mut model = vec![0; BYTES];
        if behind {
            // The backing file is shorter than the disk. Beyond the backing file's end, the disk reads zeroes.
            let bytes = pattern(BYTES * 3 / 4, 5);
            fs::write(dir.path().join("behind.img"), &bytes).unwrap();
            model[..bytes.len()].copy_from_slice(&bytes);
        }
        create(&path, BYTES as u64, cluster, behind.then_some(("behind.img", "raw")));
        run(&path, model, behind, &steps)?;
    }

    /// Whatever the image's tables contain, Carom either rejects the image or serves it without a panic.
    #[test]
    fn corrupt_qcow2_image_does_no_harm(
        changes in prop::collection::vec((0..16_384usize, any::<u8>()), 1..12),
        operations in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.qcow2");
        create(&path, 1 << 20, 512, None);
        write(&path, 100, &pattern(4096, 1));
        let mut bytes = fs::read(&path).unwrap();
        for (place, value) in changes {
            let len = bytes.len();
            bytes[place % len] = value;
        }
        let mut input = vec![u8::try_from(operations.len()).unwrap()];
        input.extend(operations);
        input.extend(bytes);
        fuzzing::image(&input);
    }
}

#[test]
fn backing_files_are_visible_locked_and_read_only() {
    let dir = tempfile::tempdir().unwrap();
    let [raw, middle, front] = ["raw.img", "middle.qcow2", "front.qcow2"].map(|name| dir.path().join(name));
    fs::write(&raw, pattern(BYTES, 1)).unwrap();
    create(&middle, BYTES as u64, 4096, Some(("raw.img", "raw")));
    write(&middle, 1, &pattern(512, 2));
    create(&front, BYTES as u64, 4096, Some((middle.to_str().unwrap(), "qcow2")));
    write(&front, 2, &pattern(512, 3));
    let before = [fs::read(&raw).unwrap(), fs::read(&middle).unwrap()];
    let mut expected = before[0].clone();
    expected[512..1024].copy_from_slice(&pattern(512, 2));
    expected[1024..1536].copy_from_slice(&pattern(512, 3));

    let mut first = disk(&front, WRITTEN);
    assert!(content(&mut first, SECTORS) == expected);
    assert_eq!(first.call_ranges(request::DISCARD, &[(0, 64, 0)]), status::OK);
    for (path, options) in [
        (&raw, ImageOptions { format: ImageFormat::Raw, ..WRITTEN }),
        (&middle, WRITTEN),
        (&front, WRITTEN),
        (&front, READ),
    ] {
        let refused = Image::open(path, options).unwrap_err();
        assert!(matches!(refused, ImageError::Used { .. }), "{}: {refused}", path.display());
    }
    // Several images can share a backing file.
    Image::open(&middle, READ).unwrap();
    expected[..64 * 512].fill(0);
    assert!(content(&mut first, SECTORS) == expected);
    drop(first);
    assert!([fs::read(&raw).unwrap(), fs::read(&middle).unwrap()] == before, "backing files are only read");
    assert_sound(&front);
    assert_shows(&front, &expected);
}

#[test]
fn backing_file_must_be_allowed_and_have_a_format() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("raw.img"), [0; 1024]).unwrap();
    create(&path("front"), 1 << 20, 4096, Some(("raw.img", "raw")));
    let refused = |name: &str, options| Image::open(&path(name), options).unwrap_err().to_string();
    assert!(refused("front", ALONE).starts_with("has the backing file 'raw.img', but backing files are not allowed"));
    // This image does not state the backing file's format. Carom must not guess the format, because a guest may have made a raw file look
    // like another format.
    let mut bytes = fs::read(path("front")).unwrap();
    let format = bytes.windows(8).position(|bytes| bytes == [0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 3]).unwrap();
    bytes[format..format + 4].copy_from_slice(&[0, 0, 0x12, 0x34]);
    fs::write(path("silent"), &bytes).unwrap();
    assert!(refused("silent", WRITTEN).contains("raw.img: the image does not state the format of this file"));
    create(&path("vmdk"), 1 << 20, 4096, Some(("raw.img", "vmdk")));
    assert!(refused("vmdk", WRITTEN).contains("the format 'vmdk' of this file is not supported"));
    create(&path("none"), 1 << 20, 4096, Some(("nothing.img", "raw")));
    assert!(refused("none", WRITTEN).contains("nothing.img: No such file"));
    // An image that names itself as its backing file cannot be opened for writing, because the image is already locked. Read-only locks can
    // be shared, so Carom also checks that no image occurs twice in the chain.
    create(&path("circle"), 1 << 20, 4096, Some(("circle", "qcow2")));
    assert!(refused("circle", WRITTEN).contains("circle: is already used by this VM"));
    assert!(refused("circle", READ).contains("the image is its own backing file"));
    assert!(refused("raw.img", WRITTEN).contains("does not start with a qcow2 header"));
}

#[test]
fn grown_qcow2_reads_zeroes_not_backing_data() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    fs::write(dir.path().join("behind.img"), pattern(BYTES, 1)).unwrap();
    create(&path, BYTES as u64, 65536, Some(("behind.img", "raw")));
    let mut first = disk(&path, WRITTEN);
    let half = BYTES as u64 / 2;
    first.device.resize(half).unwrap();
    assert_eq!(u64::from_le_bytes(first.config(0)), SECTORS / 2);
    first.device.resize(BYTES as u64 + 512).unwrap();
    let mut expected = pattern(BYTES, 1);
    expected.truncate(BYTES / 2);
    expected.resize(BYTES + 512, 0);
    assert!(content(&mut first, SECTORS + 1) == expected);
    assert_eq!(first.call(request::OUT, SECTORS, &[(DATA, 512)]), status::OK);
    drop(first);
    assert_sound(&path);
    let image = Image::open(&path, READ).unwrap();
    assert_eq!(image.bytes(), BYTES as u64 + 512);
    assert!(image.resize(512).unwrap_err().to_string().contains("the image is read-only"));
}

#[test]
fn saved_disk_restores_from_its_image_in_another_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    create(&path, BYTES as u64, 4096, None);
    let mut old = disk(&path, WRITTEN);
    old.fill(DATA, &pattern(4096, 9));
    assert_eq!(old.call(request::OUT, 8, &[(DATA, 4096)]), status::OK);
    old.function.pause();
    let state = old.function.save().unwrap();
    // The copy simulates that the process is killed now.
    let copy = dir.path().join("copy.qcow2");
    fs::copy(&path, &copy).unwrap();
    let mut new = Harness::of_image(RING, Image::open(&copy, WRITTEN).unwrap(), file(&[]));
    new.map_all();
    new.continue_from(&old);
    new.function.restore(&state).unwrap();
    new.function.resume();
    let read = new.add(0, request::IN, 8, &[(DATA + 0x8000, 4096)]);
    new.ring(0);
    new.served(0);
    assert_eq!((new.byte(read), new.bytes(DATA + 0x8000, 4096)), (status::OK, pattern(4096, 9)));
}

#[test]
fn failed_host_write_fails_only_its_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    create(&path, BYTES as u64, 4096, None);
    write(&path, 8, &pattern(4096, 9));
    // This file cannot grow, so an allocation of a cluster fails.
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(c"image", flags).unwrap());
    file.write_all_at(&fs::read(&path).unwrap(), 0).unwrap();
    fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    let image = Image::of_file(file.try_clone().unwrap(), false, Path::new("image"), WRITTEN).unwrap();
    let mut disk = Harness::of_image(RING, image, self::file(&[]));
    disk.start();
    disk.fill(DATA, &pattern(4096, 7));
    assert_eq!(disk.call(request::OUT, 256, &[(DATA, 4096)]), status::IOERR);
    assert_eq!(disk.call(request::OUT, 8, &[(DATA, 512)]), status::OK);
    assert_eq!(disk.call(request::FLUSH, 0, &[]), status::OK);
    assert_eq!(disk.call(request::IN, 8, &[(DATA, 4096)]), status::OK);
    let mut expected = pattern(4096, 9);
    expected[..512].copy_from_slice(&pattern(512, 7));
    assert!(disk.bytes(DATA, 4096) == expected);
    assert_eq!(disk.call(request::IN, 256, &[(DATA, 4096)]), status::OK);
    assert_eq!(disk.bytes(DATA, 4096), [0; 4096]);
    assert_eq!(disk.device.counters().host_errors, 1);
    drop(disk);
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    fs::write(&path, &bytes).unwrap();
    assert_sound(&path);
}

/// Carom must reject such an image for writing. Otherwise `imago` would search for space for the missing block until the stack overflows.
#[test]
fn image_without_first_refcount_block_is_only_readable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    create(&path, BYTES as u64, 65536, None);
    let mut bytes = fs::read(&path).unwrap();
    let table = usize::try_from(u64::from_be_bytes(*bytes[48..].first_chunk().unwrap())).unwrap();
    bytes[table..table + 8].fill(0);
    fs::write(&path, bytes).unwrap();
    let refused = Image::open(&path, WRITTEN).map(drop).unwrap_err().to_string();
    assert!(refused.contains("the image has no refcount block for its first clusters"), "{refused}");
    assert_eq!(content(&mut disk(&path, READ), SECTORS), vec![0; BYTES]);
}

/// The file name of an image states the image's defect, or starts with `valid_`.
#[test]
fn corpus_images_do_no_harm_and_valid_ones_work() {
    let corpus = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/qcow2"));
    let (mut valid, mut malformed) = (0, 0);
    for entry in fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        let serves = fuzzing::opens(&fs::read(&path).unwrap());
        if path.file_name().unwrap().to_str().unwrap().starts_with("valid_") {
            assert!(serves, "{} is rejected", path.display());
            valid += 1;
        } else {
            malformed += 1;
        }
    }
    assert!(valid >= 5 && malformed >= 20, "{valid} and {malformed} images");
}
