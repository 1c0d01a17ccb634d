// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Disks on qcow2 images. QEMU's own program creates and checks the images.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use carom_integration::Guest;
use carom_integration::harness::guest_test;
use carom_integration::workload;

use crate::disk::{NUMBERS_AT, SIZE, image, numbers, work};
use crate::support::qemu_img::{self, Check};
use crate::support::{MIB, number, run};

#[guest_test(needs(QemuImg))]
fn qcow2_image_is_verified_and_leaves_its_raw_backing_file() {
    let dir = tempfile::tempdir().unwrap();
    let behind = image(dir.path(), "behind.img");
    let lines = (5..1005).map(|line| format!("{line}\n")).collect::<String>();
    File::options().write(true).open(&behind).unwrap().write_all_at(lines.as_bytes(), 48 * MIB).unwrap();
    let before = fs::read(&behind).unwrap();
    let front = qemu_img::create(dir.path(), "front.qcow2", SIZE, Some("behind.img"));
    let job = format!(
        "dd if=/dev/vda bs=1M skip=48 count=1 2>/dev/null | head -n 1000 >/tmp/behind
seq 5 1004 | cmp -s - /tmp/behind && echo CAROM-BEHIND 1 || echo CAROM-BEHIND 0
{}
blkdiscard -o {} -l {MIB} /dev/vda && echo CAROM-DISCARDED 1
",
        work(),
        40 * MIB
    );
    let disk = format!("path={},image_type=qcow2,backing_files=on,num_queues=2,serial=carom-17", front.display());

    let outcome = run(&Guest::new("disk-qcow2").cpus(2).disk(&disk).job(&job));

    assert_eq!(number(&outcome, "CAROM-SECTORS"), SIZE / 512);
    assert_eq!((number(&outcome, "CAROM-BEHIND"), number(&outcome, "CAROM-DISCARDED")), (1, 1));
    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert!(fs::read(&behind).unwrap() == before, "the backing file was changed");
    assert_eq!(qemu_img::check(&front), Check::Sound, "the image has errors after a normal end");
    let seen = qemu_img::content(&front);
    let at = |mib: u64, bytes: &[u8]| seen[usize::try_from(mib * MIB).unwrap()..].starts_with(bytes);
    assert!(at(NUMBERS_AT, &numbers()), "what the guest wrote is not in the image");
    assert!(at(48, lines.as_bytes()), "the contents of the backing file are missing");
    assert!(at(40, &vec![0; usize::try_from(MIB).unwrap()]), "discarded blocks are not zero");
}
