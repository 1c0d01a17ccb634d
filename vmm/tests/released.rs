// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests that a real `carom` process releases the host's files, sockets and interfaces. The process must release them whenever it ends,
//! even if it is killed. It must also release a VM's files before it answers `vm.shutdown`, and a disk's files when it removes the disk.
//!
//! The guest (`busy_disk_guest/guest.c`) keeps writing to its disk. `CAROM_KILLS` is the number of times that the process is killed, 2
//! by default. Without access to `/dev/kvm` or without a compiler, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod c_guest;
mod http;
#[expect(dead_code, reason = "these tests wait for as long as it takes")]
mod program;
mod tiny_guest;

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::{Pid, Signal, getuid, kill_process};
use serde_json::{Value, json};
use vmm::tap::{Tap, TapOptions};

use program::has_kvm;

/// Time after which a hanging test fails.
const HUNG: Duration = Duration::from_secs(300);
const IMAGE_BYTES: u64 = 1 << 20;

/// Lock that lets only one test run at a time. A process that another test starts has this test's descriptors until it calls execve(2), and
/// could keep a file in use.
static ALONE: Mutex<()> = Mutex::new(());

/// Directory with the guest and the disk image.
struct Site {
    dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Site {
    fn new() -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::tempdir().unwrap();
        c_guest::build("busy_disk_guest", &[], dir.path())?;
        File::create(dir.path().join("image")).unwrap().set_len(IMAGE_BYTES).unwrap();
        Some(Self { dir, _alone: alone })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the process with these options.
    fn start(&self, options: &[&str]) -> Carom {
        let [kernel, serial, api] = ["kernel", "serial", "api"].map(|name| self.at(name));
        // A killed process leaves its socket, so remove an old socket.
        let _ = fs::remove_file(&serial);
        let child = Command::new(env!("CARGO_BIN_EXE_carom"))
            .arg("--kernel")
            .arg(kernel)
            .args(["--memory", "size=64M,shared=on", "--serial"])
            .arg(format!("socket={}", serial.display()))
            .arg("--api-socket")
            .arg(&api)
            .args(options)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Carom { process: program::Carom(child), serial, api }
    }

    /// Starts the process with the image as its disk, and waits until the guest writes to the disk.
    fn start_with_disk(&self, more: &str) -> (Carom, UnixStream) {
        let mut carom = self.start(&["--disk", &format!("path={}{more}", self.at("image").display())]);
        let serial = carom.wait_for_writes();
        (carom, serial)
    }
}

/// Program with the sockets that it serves.
struct Carom {
    process: program::Carom,
    serial: PathBuf,
    api: PathBuf,
}

impl Carom {
    /// Panics with the process's standard error if the process has ended.
    fn check(&mut self) {
        if let Some(status) = self.process.0.try_wait().unwrap() {
            let mut said = String::new();
            self.process.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("{status}: {said}");
        }
    }

    /// Connects to the socket, once the process serves it.
    fn connect(&mut self, socket: &Path) -> UnixStream {
        let start = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(socket) {
                stream.set_read_timeout(Some(HUNG)).unwrap();
                return stream;
            }
            self.check();
            assert!(start.elapsed() < HUNG, "{} is not served", socket.display());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the guest has written to its disk. Returns its serial port.
    fn wait_for_writes(&mut self) -> UnixStream {
        let mut serial = self.connect(&self.serial.clone());
        let mut said = [0];
        serial.read_exact(&mut said).unwrap();
        assert_eq!(said, *b"w");
        serial
    }

    fn ask(&mut self, method: &str, name: &str, body: Option<&Value>) -> (u16, Value) {
        let mut stream = self.connect(&self.api.clone());
        http::send(&mut stream, method, name, body);
        let (status, body) = http::receive(&mut BufReader::new(stream));
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    /// Sends `signal`, and waits until the process has ended.
    fn end(mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.process.0), signal).unwrap();
        self.process.0.wait().unwrap();
    }
}

/// True if no process has locked any part of the file.
fn is_free(path: &Path) -> bool {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Returns the number of times that the process is killed.
fn kills() -> u32 {
    env::var("CAROM_KILLS").map_or(2, |count| count.parse().unwrap())
}

/// Returns the options of each tested disk: none for the page cache, and `direct=on` if the file system supports direct I/O.
fn ways(image: &Path) -> Vec<&'static str> {
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(image);
    if direct.is_ok() { vec!["", ",direct=on"] } else { vec![""] }
}

#[test]
fn image_is_usable_at_once_after_its_user_was_killed() {
    let Some(site) = Site::new() else { return };
    for more in ways(&site.at("image")) {
        let mut under_way = 0;
        for _ in 0..kills() {
            // The start fails if the image is still locked.
            let (carom, _serial) = site.start_with_disk(more);
            carom.end(Signal::KILL);
            under_way += u32::from(!is_free(&site.at("image")));
        }
        eprintln!("'{more}': {} kills, {under_way} with writes under way after the end", kills());
    }
}

#[test]
fn image_is_free_when_the_process_ended_cleanly() {
    let Some(site) = Site::new() else { return };
    for more in ways(&site.at("image")) {
        for _ in 0..kills() {
            let (carom, _serial) = site.start_with_disk(more);
            carom.end(Signal::TERM);
            assert!(is_free(&site.at("image")));
        }
    }
}

#[test]
fn image_is_free_when_shutdown_is_answered() {
    let Some(site) = Site::new() else { return };
    let (mut carom, mut serial) = site.start_with_disk("");
    for _ in 0..kills() {
        assert!(!is_free(&site.at("image")));
        assert_eq!(carom.ask("PUT", "vm.shutdown", None).0, 204);
        assert!(is_free(&site.at("image")));
        drop(serial);
        assert_eq!(carom.ask("PUT", "vm.boot", None).0, 204);
        serial = carom.wait_for_writes();
    }
    assert_eq!(carom.ask("PUT", "vm.delete", None).0, 204);
    assert!(is_free(&site.at("image")));
}

#[test]
fn image_can_be_added_again_once_its_disk_has_left_the_bus() {
    let Some(site) = Site::new() else { return };
    let (mut carom, mut serial) = site.start_with_disk("");
    for number in 0..kills() {
        let (_, info) = carom.ask("GET", "vm.info", None);
        let id = info["config"]["disks"][0]["id"].as_str().unwrap().to_string();
        assert_eq!(carom.ask("PUT", "vm.remove-device", Some(&json!({ "id": id }))).0, 204);
        // Makes the guest eject the disk.
        serial.write_all(b"e").unwrap();
        let start = Instant::now();
        while carom.ask("GET", "vm.info", None).1["device_tree"].get(&id).is_some() {
            assert!(start.elapsed() < HUNG, "the guest does not eject {id}");
        }
        let disk = json!({ "path": site.at("image"), "id": format!("disk{number}") });
        let (status, answer) = carom.ask("PUT", "vm.add-disk", Some(&disk));
        assert_eq!(status, 200, "{answer}");
        let mut said = [0];
        serial.read_exact(&mut said).unwrap();
        assert_eq!(said, *b"w");
    }
}

#[test]
fn descriptor_kept_by_the_parent_holds_no_lock() {
    let Some(site) = Site::new() else { return };
    let kept = OpenOptions::new().read(true).write(true).open(site.at("image")).unwrap();
    for (signal, more) in [(Signal::KILL, None), (Signal::TERM, None), (Signal::KILL, Some("--landlock"))] {
        let passed = rustix::io::dup(&kept).unwrap();
        let number = passed.as_raw_fd();
        let [inherit, disk] = [format!("fd={number}"), format!("path=/dev/fd/{number}")];
        let options: Vec<&str> = ["--inherit", &inherit, "--disk", &disk].into_iter().chain(more).collect();
        let mut carom = site.start(&options);
        drop(passed);
        let serial = carom.wait_for_writes();
        assert!(!is_free(&site.at("image")));
        drop(serial);
        if signal == Signal::TERM {
            assert_eq!(carom.ask("PUT", "vm.shutdown", None).0, 204);
            assert!(is_free(&site.at("image")));
        }
        carom.end(signal);
        // The next process can lock the image. It has to wait for the lock only if this process was killed, because writes of a killed
        // process may still be in progress.
        drop(site.start_with_disk(""));
    }
}

#[test]
fn file_system_of_images_is_unmounted_at_once() {
    let Some(site) = Site::new() else { return };
    let mount = site.at("mount");
    fs::create_dir(&mount).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        Command::new(program).args(arguments).arg(&mount).stderr(Stdio::null()).status().is_ok_and(|end| end.success())
    };
    for round in 0..kills() {
        if !getuid().is_root() || !run("mount", &["-t", "tmpfs", "-o", "size=8M", "tmpfs"]) {
            return eprintln!("not tested: cannot mount a file system");
        }
        for (name, len) in [("image", IMAGE_BYTES), ("pmem", 2 << 20)] {
            File::create(mount.join(name)).unwrap().set_len(len).unwrap();
        }
        let disk = format!("path={}", mount.join("image").display());
        let pmem = format!("file={}", mount.join("pmem").display());
        // A killed process has only persistent memory, because requests of a disk may outlive the process.
        let killed = round % 2 == 1;
        let options = ["--pmem", &pmem, "--disk", &disk];
        let mut carom = site.start(&options[..if killed { 2 } else { 4 }]);
        if killed {
            drop(carom.connect(&carom.serial.clone()));
            assert_eq!(carom.ask("GET", "vm.info", None).1["state"], "Running");
            carom.end(Signal::KILL);
        } else {
            drop(carom.wait_for_writes());
            assert_eq!(carom.ask("PUT", "vm.shutdown", None).0, 204);
            assert!(run("umount", &[]), "the file system is busy after vm.shutdown");
            continue;
        }
        assert!(run("umount", &[]), "the file system is busy after the end");
    }
}

#[test]
fn sockets_of_an_ended_process_are_not_served() {
    let Some(site) = Site::new() else { return };
    for signal in [Signal::KILL, Signal::TERM] {
        let _ = fs::remove_file(site.at("vsock"));
        let vsock = format!("cid=3,socket={}", site.at("vsock").display());
        let console = format!("socket={}", site.at("console").display());
        let mut carom = site.start(&["--vsock", &vsock, "--console", &console]);
        let names = ["api", "serial", "console", "vsock"];
        let _clients = names.map(|name| carom.connect(&site.at(name)));
        carom.end(signal);
        for name in names {
            assert!(UnixStream::connect(site.at(name)).is_err(), "{name}");
            assert!(signal == Signal::KILL || !site.at(name).exists(), "{name}");
        }
    }
}

#[test]
fn server_of_a_device_sees_the_end_of_a_killed_process() {
    let Some(site) = Site::new() else { return };
    for option in ["--disk vhost_user=on,vhost_socket=", "--user-device socket="] {
        let (option, value) = option.split_once(' ').unwrap();
        let socket = site.at("server");
        let listener = UnixListener::bind(&socket).unwrap();
        // The process waits for the server's first message.
        let carom = site.start(&[option, &format!("{value}{}", socket.display())]);
        let (mut connection, _) = listener.accept().unwrap();
        carom.end(Signal::KILL);
        connection.set_nonblocking(true).unwrap();
        connection.read_to_end(&mut Vec::new()).unwrap();
        fs::remove_file(socket).unwrap();
    }
}

#[test]
fn interface_is_free_once_its_user_has_ended() {
    let Some(site) = Site::new() else { return };
    let name = format!("released{}", std::process::id() % 10_000_000);
    let options = TapOptions { name: Some(&name), pairs: 1, address: None, mac: None, guest_mac: None, mtu: None };
    let ip = |arguments: &[&str]| {
        let ip = Command::new("ip").args(["tuntap"]).args(arguments).args(["dev", &name, "mode", "tap"]).status();
        ip.is_ok_and(|end| end.success())
    };
    if !ip(&["add"]) {
        return eprintln!("not tested: cannot create an interface");
    }
    for signal in [Signal::KILL, Signal::TERM, Signal::KILL] {
        let mut carom = site.start(&["--net", &format!("tap={name}")]);
        drop(carom.connect(&carom.serial.clone()));
        assert_eq!(carom.ask("GET", "vm.info", None).1["state"], "Running");
        assert!(Tap::open(&options).is_err(), "the interface can have only one user");
        carom.end(signal);
        let free = Tap::open(&options).map(drop);
        if free.is_err() {
            ip(&["del"]);
        }
        free.unwrap();
    }
    assert!(ip(&["del"]));
}
