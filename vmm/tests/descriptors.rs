// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process whose parent has opened all files and sockets of the VM.
//!
//! The guest consists of a few instructions. Without access to `/dev/kvm`, tests that boot the guest do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that start the program themselves")]
mod program;
mod tiny_guest;

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use devices::virtio::net::Carrier;
use rustix::process::getuid;
use vmm::tap::{Tap, TapOptions};

use echo_guest::ECHO;
use http::LIMIT;
use program::{Carom, put};
use tiny_guest::elf;

/// `O_CLOEXEC` in `/proc/PID/fdinfo` (x86-64).
const CLOEXEC: u32 = 0o2_000_000;

/// Lock that a test holds while it passes descriptors to a process. Otherwise a process that another test starts meanwhile would inherit
/// the descriptors.
static PASSING: Mutex<()> = Mutex::new(());

/// Descriptors that a process inherits, and the options of this process.
#[derive(Default)]
struct Given {
    /// Descriptors to inherit, without close-on-exec.
    descriptors: Vec<OwnedFd>,
    options: Vec<String>,
}

impl Given {
    /// Adds a descriptor to inherit. Returns its number.
    fn pass(&mut self, fd: &impl AsFd) -> i32 {
        self.descriptors.push(rustix::io::dup(fd).unwrap());
        self.descriptors.last().unwrap().as_raw_fd()
    }

    /// Adds a descriptor for `--inherit`. Returns its path.
    fn inherit(&mut self, fd: &impl AsFd) -> String {
        let number = self.pass(fd);
        self.option("--inherit", format!("fd={number}"));
        format!("/dev/fd/{number}")
    }

    fn option(&mut self, name: &str, value: String) {
        self.options.extend([name.to_string(), value]);
    }
}

/// Returns the program's command. If the test runs as root, the program runs as a user without privileges.
fn command() -> Command {
    let carom = env!("CARGO_BIN_EXE_carom");
    if !getuid().is_root() {
        return Command::new(carom);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=64000", "--regid=64000", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all", carom]);
    command
}

/// Returns the descriptors that a process would pass to a program that it executes.
fn passed_on(process: u32) -> BTreeSet<i32> {
    let entries = fs::read_dir(format!("/proc/{process}/fdinfo")).unwrap().map(Result::unwrap);
    let stays = |path: &Path| {
        // The descriptor may be closed meanwhile.
        let info = fs::read_to_string(path).unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap_or("02000000");
        u32::from_str_radix(flags.trim(), 8).unwrap() & CLOEXEC == 0
    };
    let stay = entries.filter(|entry| stays(&entry.path()));
    stay.map(|entry| entry.file_name().to_str().unwrap().parse().unwrap()).collect()
}

/// Sends bytes until the guest echoes a byte. Input that arrives before the guest runs is lost.
fn wait_for_echo(serial: &Path) {
    let mut stream = UnixStream::connect(serial).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let start = Instant::now();
    let mut said = [0];
    loop {
        stream.write_all(b"x").unwrap();
        match stream.read_exact(&mut said) {
            Ok(()) => break,
            Err(error) => assert!(start.elapsed() < LIMIT, "{error}"),
        }
    }
    assert_eq!(said, *b"x");
}

#[test]
fn vm_of_inherited_descriptors_boots_and_does_not_leak_them() {
    let kvm = match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(kvm) => kvm,
        Err(error) => return eprintln!("not tested: /dev/kvm: {error}"),
    };
    let _passing = PASSING.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (name, bytes) in [("kernel", elf(ECHO)), ("pmem", vec![0; 2 << 20]), ("disk", vec![0; 1 << 20])] {
        fs::write(at(name), bytes).unwrap();
        fs::set_permissions(at(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let open = |name: &str| OpenOptions::new().read(true).write(true).open(at(name)).unwrap();
    let bind = |name: &str| UnixListener::bind(at(name)).unwrap();

    let mut given = Given::default();
    given.inherit(&kvm);
    for (option, of, rest) in [
        ("--kernel", File::open(at("kernel")).unwrap(), ""),
        ("--rng", File::open("/dev/urandom").unwrap(), ""),
        ("--disk", open("disk"), ",image_type=raw"),
        ("--pmem", open("pmem"), ""),
        ("--log-file", File::create(at("log")).unwrap(), ""),
    ] {
        let key = match option {
            "--rng" => "src=",
            "--disk" => "path=",
            "--pmem" => "file=",
            _ => "",
        };
        let path = given.inherit(&of);
        given.option(option, format!("{key}{path}{rest}"));
    }
    let serial = given.inherit(&bind("serial"));
    given.option("--serial", format!("socket={serial}"));
    let vsock = given.inherit(&bind("vsock"));
    given.option("--vsock", format!("cid=3,socket={vsock}"));
    let api = given.pass(&bind("api.sock"));
    given.option("--api-socket", format!("fd={api}"));
    let tap = TapOptions { name: None, pairs: 1, address: None, mac: None, guest_mac: None, mtu: None };
    match Tap::open(&tap) {
        Ok(tap) => {
            let number = given.pass(tap.file(0));
            given.option("--net", format!("fd={number}"));
        }
        Err(error) => eprintln!("not tested: a network device: {error}"),
    }
    given.options.push("--landlock".into());
    let child = command().args(["--memory", "size=64M"]).args(&given.options).stdin(Stdio::null()).spawn().unwrap();
    let mut carom = Carom(child);
    let numbers: BTreeSet<i32> = given.descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    drop(given);

    wait_for_echo(&at("serial"));
    assert!(UnixStream::connect(at("vsock")).is_ok());
    let stay = passed_on(carom.0.id());
    assert_eq!(stay.intersection(&numbers).count(), 0, "of {numbers:?}, the process would leak {stay:?}");
    // The descriptors stay open for the next boot.
    put(dir.path(), "vm.shutdown", None);
    put(dir.path(), "vm.boot", None);
    wait_for_echo(&at("serial"));
    put(dir.path(), "vmm.shutdown", None);
    carom.ended();
    for socket in ["api.sock", "serial", "vsock"] {
        assert!(at(socket).exists(), "{socket} must be removed by its creator");
    }
}

#[test]
fn wrong_descriptor_for_an_option_is_refused_naming_both() {
    let _passing = PASSING.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("kernel"), elf(ECHO)).unwrap();
    let kernel = dir.path().join("kernel").display().to_string();
    let file = File::open(&kernel).unwrap();
    let listener = UnixListener::bind(dir.path().join("s")).unwrap();
    let (stream, _other) = UnixStream::pair().unwrap();
    let no_listener = "refers to a file or a block device, not to a listening unix socket";
    let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    for (fd, options, wanted, boots) in [
        (file.as_fd(), "--inherit fd=N --vsock cid=3,socket=/dev/fd/N", no_listener, true),
        (file.as_fd(), "--inherit fd=N --serial socket=/dev/fd/N", no_listener, true),
        (listener.as_fd(), "--inherit fd=N --disk path=/dev/fd/N", "not to a file or a block device", true),
        (listener.as_fd(), "--inherit fd=N --user-device socket=/dev/fd/N", "not to a connected unix socket", true),
        (stream.as_fd(), "--inherit fd=N --serial socket=/dev/fd/N", "not to a listening unix socket", true),
        (file.as_fd(), "--inherit fd=N --serial file=/dev/fd/N", "the descriptor is open for reading only", true),
        (listener.as_fd(), "--inherit fd=N --rng src=/dev/fd/N", "not to a file or a block device", true),
        (
            file.as_fd(),
            "--net fd=N",
            "carom: --net fd=N: the descriptor refers to a file or a block device, not to a tap",
            false,
        ),
        (file.as_fd(), "--net fd=N fd=N", "carom: --net fd=N: --net names the same descriptor", false),
        (file.as_fd(), "--inherit fd=N --net fd=N", "carom: --net fd=N: --inherit names the same descriptor", false),
        (file.as_fd(), "--net fd=987", "carom: --net fd=987: the program was not started with this descriptor", false),
        (
            file.as_fd(),
            "--api-socket fd=N --inherit fd=N",
            "carom: --inherit fd=N: --api-socket names the same descriptor",
            false,
        ),
    ] {
        if boots && !kvm {
            continue;
        }
        let mut given = Given::default();
        let number = given.pass(&fd).to_string();
        let named = |text: &str| text.replace("fd=N", &format!("fd={number}")).replace("/N", &format!("/{number}"));
        let shared = ["--kernel", &kernel, "--memory", "size=64M,shared=on", "--serial", "null"];
        // `--serial` must not occur twice, because this would be another error.
        let shared = if options.contains("--serial") { &shared[..4] } else { &shared[..] };
        let mut command = Command::new(env!("CARGO_BIN_EXE_carom"));
        let output = command.args(shared).args(named(options).split(' ')).stdin(Stdio::null()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{options}: {text}");
        assert!(text.contains(&named(wanted)), "{options}: {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}
