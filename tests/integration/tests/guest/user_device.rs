// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device of another process (vfio-user) behind the virtio-iommu: `edu-server`, which behaves like QEMU's edu device and
//! writes down what it is given.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::{Guest, Outcome};

use crate::support::{SITE, number, run};

/// First and last IOVA of windows.
const APERTURE: std::ops::RangeInclusive<u64> = 0xc000_0000..=0xdfff_ffff;
/// Bytes of a chunk.
const CHUNK: u64 = 2 << 20;
/// Guest-physical address of RAM that the guest's kernel does not use.
const VICTIM: u64 = 0x1000_0000;
/// Bytes that edu-dma transfers at once.
const TRANSFER: &str = "2048";

/// The server, until it is dropped.
struct EduServer {
    process: Child,
    dir: tempfile::TempDir,
}

impl EduServer {
    fn start(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_edu-server"))
            .arg("--socket")
            .arg(dir.path().join("socket"))
            .arg("--log")
            .arg(dir.path().join("log"))
            .args(options)
            .stdin(Stdio::null())
            .spawn()
            .expect("the server starts");
        let server = Self { process, dir };
        let start = Instant::now();
        while !server.socket().exists() {
            assert!(start.elapsed() < Duration::from_secs(20), "the server does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// The value of `--user-device`.
    fn option(&self, more: &str) -> String {
        format!("socket={}{more}", self.socket().display())
    }

    /// What it wrote down.
    fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap();
        text.lines().map(String::from).collect()
    }
}

impl Drop for EduServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The field `name=0x…` of a line of the server's.
fn field(line: &str, name: &str) -> u64 {
    let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix("=0x"));
    u64::from_str_radix(value.unwrap_or_else(|| panic!("no {name} in {line:?}")), 16).unwrap()
}

/// Checks that the server was given descriptors of chunks only, each such that it can do no harm with it. Returns how many.
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

/// What the virtio-iommu's driver in the guest was told of accesses that were stopped.
const FAULTS: &str = r"
dmesg | grep -i 'fault from EP' | head -n 3 | sed 's/^/CAROM-FAULT /'
";

/// Finds the edu device and gives it to the patch's test driver, which tests in its probe.
const EDU_IS_TESTED: &str = r#"
for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor")$(cat "$device/device")" != 0x12340x11e8 ] || EDU=$(basename "$device")
done
[ -n "$EDU" ] || exit 83
echo dma-bounce-test >"/sys/bus/pci/devices/$EDU/driver_override"
echo "$EDU" >/sys/bus/pci/drivers_probe
[ -e "/sys/bus/pci/devices/$EDU/driver" ] || { dmesg | tail -n 20; exit 84; }
dmesg | sed -n 's/^.*dma-bounce-test: all \([0-9]*\) \(narrow \)\?cases passed/CAROM-CASES \1/p'
"#;

/// Finds the edu device and takes it for edu-dma.
const EDU_IS_TAKEN: &str = r#"
for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor")$(cat "$device/device")" != 0x12340x11e8 ] || EDU=$(basename "$device")
done
[ -n "$EDU" ] || exit 83
"#;

const EDU_IS_VFIOS: &str = r#"
echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
echo vfio-pci >"/sys/bus/pci/devices/$EDU/driver_override"
echo "$EDU" >/sys/bus/pci/drivers_probe
"#;

/// A guest in which edu-dma runs `commands`.
fn steered(name: &str, mode: &str, commands: &[&str]) -> Guest {
    let program = fs::read(SITE.edu_dma.as_ref().expect("CAROM_EDU_DMA is set")).unwrap();
    let lines: String =
        commands.iter().map(|command| format!("{}\n", command.replace("VICTIM", &format!("{VICTIM:#x}")))).collect();
    let prepare = if mode == "vfio" { EDU_IS_VFIOS } else { "" };
    let job = format!("{EDU_IS_TAKEN}{prepare}edu-dma {mode} $EDU <<'END' || exit 85\n{lines}END\n{FAULTS}");
    let cmdline = format!("iommu.strict=1 memmap=64K${VICTIM:#x}");
    Guest::new(name).cmdline(&cmdline).program("edu-dma", program).job(&job)
}

fn results<'outcome>(outcome: &'outcome Outcome, command: &'outcome str) -> Vec<&'outcome str> {
    outcome.values("CAROM-EDU").filter_map(|line| line.strip_prefix(command)?.strip_prefix(' ')).collect()
}

#[test]
fn every_byte_of_a_user_device_with_windows_is_right() {
    let server = EduServer::start(&[]);
    let job = format!("{EDU_IS_TESTED}{FAULTS}");

    let guest = Guest::new("user-edu").user_device(&server.option(",iommu=on,id=edu")).bounce("size=32M");
    let outcome = run(&guest.time_limit(Duration::from_secs(150)).job(&job));

    assert!(number(&outcome, "CAROM-CASES") >= 12);
    let log = server.log();
    let given = check_descriptors(&log);
    assert!(given > 0, "it was given no chunk: {log:#?}");
    let [shared, messages, refused] = ["descriptor", "message", "refused"].map(|what| count(&log, what));
    // The device goes all over its windows and outside: what it must not reach was refused, and the driver was told.
    assert!(shared > 10 && messages > 10 && refused > 10, "{shared} {messages} {refused}");
    let counters = outcome.counters.last().expect("counters at the end");
    assert!(counters.faults + counters.faults_dropped >= refused as u64, "{refused} refused: {counters:?}");
    assert!(counters.requests.window_add > 0 && counters.failed.window_add == 0, "{counters:?}");
    assert!(outcome.values("CAROM-FAULT").count() > 0, "console:\n{}", outcome.console);
    assert_eq!(outcome.peak_pinned_bytes, 0, "nothing is pinned for it");
}

#[test]
fn user_device_that_cannot_address_the_windows_is_mapped() {
    let server = EduServer::start(&["--address-bits", "28"]);

    let guest = Guest::new("user-narrow")
        .cmdline("iommu.strict=1 dma_bounce_test.mask_bits=28")
        .user_device(&server.option(",iommu=on"))
        .bounce("size=32M");
    let outcome = run(&guest.job(EDU_IS_TESTED));

    assert_eq!(number(&outcome, "CAROM-CASES"), 6);
    let log = server.log();
    assert!(count(&log, "message") > 0 && count(&log, "refused") == 0, "{log:#?}");
    check_descriptors(&log);
}

#[test]
fn user_device_reaches_what_is_mapped_as_it_is_mapped_and_nothing_else() {
    let server = EduServer::start(&[]);
    let commands = [
        "map 0x100000 rw",
        "fill 0x100000 0x5a",
        "load 0x100000",
        "fill 0x100000 0x11",
        "store 0x100000",
        "count 0x100000 0x5a",
        "map 0x200000 r",
        "fill 0x200000 0x77",
        "store 0x200000",
        "count 0x200000 0x77",
        "load 0x200000",
        "store 0x100000",
        "count 0x100000 0x77",
        "victim VICTIM 0xa5",
        "store victim",
        "victim-count 0xa5",
        "load victim",
        "store 0x100000",
        "count 0x100000 0xa5",
        "fill 0x100000 0x33",
        "unmap 0x100000",
        "load 0x100000",
        "map 0x400000 rw",
        "store 0x400000",
        "count 0x400000 0x33",
    ];

    let guest = steered("user-mapped", "vfio", &commands).user_device(&server.option(",iommu=on"));
    let outcome = run(&guest);

    let all = |command| results(&outcome, command);
    assert_eq!(all("map 0x100000 rw"), ["ok"], "console:\n{}", outcome.console);
    assert_eq!(all("count 0x100000 0x5a"), [TRANSFER]);
    assert_eq!(all("count 0x200000 0x77"), [TRANSFER], "what may only be read was written");
    assert_eq!(all("count 0x100000 0x77"), [TRANSFER]);
    assert_eq!(all("victim-count 0xa5"), [TRANSFER], "RAM that is not mapped was written");
    assert_eq!(all("count 0x100000 0xa5"), ["0"], "RAM that is not mapped was read");
    assert_eq!(all("unmap 0x100000"), ["ok"]);
    assert_eq!(all("count 0x400000 0x33"), ["0"], "what was unmapped was read");
    let log = server.log();
    assert_eq!((check_descriptors(&log), count(&log, "refused")), (0, 4), "{log:#?}");
    let counters = outcome.counters.last().expect("counters at the end");
    assert_eq!((counters.faults, counters.faults_dropped), (4, 0));
    // The first one: the address and the kind of the access.
    let fault = outcome.values("CAROM-FAULT").next().unwrap_or_default();
    assert!(
        fault.contains("0x200000") || fault.contains("0x0000000000200000"),
        "{fault}; console:\n{}",
        outcome.console
    );
}

#[test]
fn user_device_without_iommu_is_given_all_ram() {
    // The control: the attack works where nothing stops it.
    let server = EduServer::start(&[]);
    let commands = ["victim VICTIM 0xa5", "load victim", "victim VICTIM 0x11", "store victim", "victim-count 0xa5"];

    let guest = steered("user-control", "raw", &commands).user_device(&server.option("")).shared_memory();
    let outcome = run(&guest);

    assert_eq!(results(&outcome, "victim-count 0xa5"), [TRANSFER], "console:\n{}", outcome.console);
    let log = server.log();
    assert!(log.iter().any(|line| line.starts_with("map iova=0x0 ") && line.contains("resizable=no")), "{log:#?}");
    assert_eq!(count(&log, "descriptor"), 2, "{log:#?}");
}

#[test]
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

    // The registers read as all ones, so that the transfer seems to go on.
    assert_eq!(results(&outcome, "store 0x100000"), ["never ended"], "console:\n{}", outcome.console);
    for command in ["map 0x200000 rw", "unmap 0x200000", "unmap 0x100000"] {
        assert_eq!(results(&outcome, command), ["ok"], "{command}");
    }
    let told = outcome.stderr.matches("the vfio-user server closed the connection").count();
    assert_eq!(told, 1, "{}", outcome.stderr);
}
