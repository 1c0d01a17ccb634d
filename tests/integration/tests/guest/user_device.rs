// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Device in another process (vfio-user) behind the virtio-iommu. The process is `edu-server`, which behaves like QEMU's edu
//! device. It logs the client's requests, including the memory that the client maps.

use carom_integration::harness::guest_test;
use std::time::Duration;

use carom_integration::Guest;

use crate::support::edu::{self, FIND_EDU, TAKE_EDU, TEST_EDU, TRANSFER, assert_result};
use crate::support::edu_server::EduServer;
use crate::support::{number, run};

/// Range of window IOVAs.
const APERTURE: std::ops::RangeInclusive<u64> = 0xc000_0000..=0xdfff_ffff;
/// Size of a chunk, in bytes.
const CHUNK: u64 = 2 << 20;

/// Returns the field `name=0x…` of a line of the server's log.
fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix("=0x"));
    u64::from_str_radix(value.unwrap_or_else(|| panic!("no {name} in {line:?}")), 16).unwrap()
}

/// Checks that the server got only descriptors of chunks, that the server cannot resize a chunk, and that no descriptor permits
/// more accesses than its mapping. Returns the number of descriptors.
fn check_descriptors(log: &[String]) -> usize {
    let mut given = 0;
    for line in log.iter().filter(|line| line.starts_with("map ")) {
        let (iova, size) = (field(line, "iova"), field(line, "size"));
        if line.contains("descriptor=none") {
            assert!(!APERTURE.contains(&iova) || line.contains("access=w "), "{line}");
            continue;
        }
        given += 1;
        assert!(APERTURE.contains(&iova) && size == CHUNK && field(line, "bytes") == CHUNK, "{line}");
        assert!(line.contains("resizable=no") && line.contains("forced=no"), "{line}");
        assert_eq!(line.contains("access=rw "), line.contains("descriptor=rw"), "{line}");
        assert!(line.contains("access=rw ") || line.contains("access=r "), "{line}");
    }
    given
}

fn count(log: &[String], what: &str) -> usize {
    log.iter().filter(|line| line.starts_with("dma ") && line.ends_with(what)).count()
}

/// Shell line that prints the first three messages of the guest's virtio-iommu driver about stopped accesses.
const FAULTS: &str = r"
dmesg | grep -i 'fault from EP' | head -n 3 | sed 's/^/CAROM-FAULT /'
";

/// Returns a part of a job that runs the patch's test driver on the device, and prints the number of passed cases.
fn test_edu() -> String {
    format!(
        r"{FIND_EDU}{TEST_EDU}
dmesg | sed -n 's/^.*dma-bounce-test: all \([0-9]*\) \(narrow \)\?cases passed/CAROM-CASES \1/p'
"
    )
}

/// Returns a guest that runs edu-dma with `commands`.
fn steered(name: &str, mode: &str, commands: &[&str]) -> Guest {
    let prepare = if mode == "vfio" { TAKE_EDU } else { "" };
    edu::guest(name, &format!("{FIND_EDU}{prepare}{}{FAULTS}", edu::steer(mode, commands)))
}

#[guest_test]
fn every_byte_of_a_user_device_with_windows_is_right() {
    let server = EduServer::start(&[]);
    let job = format!("{}{FAULTS}", test_edu());

    let guest = Guest::new("user-edu").user_device(&server.option(",iommu=on,id=edu")).bounce("size=32M");
    let outcome = run(&guest.time_limit(Duration::from_secs(150)).job(&job));

    assert!(number(&outcome, "CAROM-CASES") >= 12);
    let log = server.log();
    let given = check_descriptors(&log);
    assert!(given > 0, "the server got no chunk: {log:#?}");
    let [shared, messages, refused] = ["descriptor", "message", "refused"].map(|what| count(&log, what));
    // The server accessed its windows through file descriptors, and accessed other memory by messages to the VMM. The VMM
    // refused forbidden accesses, and reported them to the guest's driver.
    assert!(shared > 10 && messages > 10 && refused > 10, "{shared} {messages} {refused}");
    let counters = outcome.counters.last().expect("the VMM reports its counters at the end");
    assert!(
        counters.faults + counters.faults_dropped >= refused as u64,
        "{refused} accesses were refused, but not all were reported: {counters:?}"
    );
    assert!(counters.requests.window_add > 0 && counters.failed.window_add == 0, "{counters:?}");
    assert!(outcome.values("CAROM-FAULT").count() > 0, "console:\n{}", outcome.console);
    assert_eq!(outcome.peak_pinned_bytes, 0, "memory was pinned for the device");
}

#[guest_test(slow = "patch:: covers a host device with few address bits")]
fn user_device_that_cannot_address_the_windows_is_mapped() {
    let server = EduServer::start(&["--address-bits", "28"]);

    let guest = Guest::new("user-narrow")
        .cmdline("iommu.strict=1 dma_bounce_test.mask_bits=28")
        .user_device(&server.option(",iommu=on"))
        .bounce("size=32M");
    let outcome = run(&guest.job(&test_edu()));

    assert_eq!(number(&outcome, "CAROM-CASES"), 6);
    let log = server.log();
    assert!(count(&log, "message") > 0 && count(&log, "refused") == 0, "{log:#?}");
    check_descriptors(&log);
}

#[guest_test]
fn user_device_accesses_only_mapped_memory_as_permitted() {
    let server = EduServer::start(&[]);
    let commands = [&edu::REACH_MAPPED[..], &edu::REACH_UNMAPPED].concat();

    let guest = steered("user-mapped", "vfio", &commands).user_device(&server.option(",iommu=on"));
    let outcome = run(&guest);

    edu::assert_reaches_mapped(&outcome);
    let log = server.log();
    assert_eq!((check_descriptors(&log), count(&log, "refused")), (0, 4), "{log:#?}");
    let counters = outcome.counters.last().expect("the VMM reports its counters at the end");
    assert_eq!((counters.faults, counters.faults_dropped), (4, 0));
    // The first report contains the address and the kind of the access.
    let fault = outcome.values("CAROM-FAULT").next().unwrap_or_default();
    assert!(
        fault.contains("0x200000") || fault.contains("0x0000000000200000"),
        "{fault}; console:\n{}",
        outcome.console
    );
}

#[guest_test]
fn user_device_without_iommu_gets_all_ram() {
    let server = EduServer::start(&[]);

    let guest = steered("user-control", "raw", &edu::ATTACK_ON_VICTIM).user_device(&server.option("")).shared_memory();
    let outcome = run(&guest);

    assert_result(&outcome, "victim-count 0xa5", &[TRANSFER]);
    let log = server.log();
    assert!(log.iter().any(|line| line.starts_with("map iova=0x0 ") && line.contains("resizable=no")), "{log:#?}");
    assert_eq!(count(&log, "descriptor"), 2, "{log:#?}");
}

#[guest_test(slow = "unit tests and vmm/tests/hostile_server.rs cover the end of a server")]
fn guest_outlives_a_server_that_dies() {
    let server = EduServer::start(&["--die-at", "2"]);
    let commands = [
        "map 0x100000 rw",
        "fill 0x100000 0x5a",
        "load 0x100000",
        "store 0x100000",
        "map 0x200000 rw",
        "unmap 0x200000",
        "unmap 0x100000",
    ];

    let guest = steered("user-dies", "vfio", &commands).user_device(&server.option(",iommu=on"));
    let outcome = run(&guest);

    // Reads of the lost device's registers return ones in all bits, so it seems that the transfer never ends.
    assert_result(&outcome, "store 0x100000", &["never ended"]);
    for command in ["map 0x200000 rw", "unmap 0x200000", "unmap 0x100000"] {
        assert_result(&outcome, command, &["ok"]);
    }
    let reported = outcome.stderr.matches("the vfio-user server closed the connection").count();
    assert_eq!(reported, 1, "{}", outcome.stderr);
}
