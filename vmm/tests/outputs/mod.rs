// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests outputs that are not regular files, under Landlock. Each output works, or the error names the output's option.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use super::program::{Carom, has_kvm, put, wait_until};
use super::tiny_guest::elf;

/// `mov edx, 0x3f8; mov al, '~'; out dx, al; again: hlt; jmp again`
const PRINT: &[u8] = &[0xba, 0xf8, 3, 0, 0, 0xb0, b'~', 0xee, 0xf4, 0xeb, 0xfd];
/// Time after which a hanging test fails.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns the command of the program with a guest that prints. Landlock restricts the program to the files of its VM. The program's
/// descriptor 7 is a copy of its standard output.
fn program(dir: &Path, options: &[&str]) -> Command {
    fs::write(dir.join("kernel"), elf(PRINT)).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" 7>&1", env!("CARGO_BIN_EXE_carom")]);
    command.args(["--kernel", "kernel", "--memory", "size=64M", "--api-socket", "api.sock", "--landlock", "-v"]);
    command.args(options).current_dir(dir).stdin(Stdio::null());
    command
}

/// Reads until the output contains each of `texts`. Returns the reader, which keeps the output open.
fn until<R: Read + Send + 'static>(mut from: R, texts: &'static [&str]) -> R {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let (mut read, mut piece) = (Vec::new(), [0; 4096]);
        let has = |read: &[u8], text: &str| String::from_utf8_lossy(read).contains(text);
        while !texts.iter().all(|text| has(&read, text)) {
            match from.read(&mut piece) {
                Ok(len) if len > 0 => read.extend_from_slice(&piece[..len]),
                end => panic!("{end:?} after {}", String::from_utf8_lossy(&read)),
            }
        }
        sender.send(from).unwrap();
    });
    receiver.recv_timeout(LIMIT).unwrap()
}

/// Returns options that write to `path`, the texts that the program must write, and true if it writes them before SIGTERM.
fn outputs(path: &str) -> [(Vec<String>, &'static [&'static str], bool); 2] {
    let option = |name: &str, value: &str| [name.to_string(), format!("{value}{path}")];
    let first = [option("--serial", "file="), option("--event-monitor", "path=")].concat();
    let second = [option("--console", "file="), option("--log-file", ""), option("--crash-report", "path=")].concat();
    [
        (first, &["~", "\"booted\""], true),
        ([second, vec!["--serial".into(), "null".into()]].concat(), &["signal 15 ends the VMM"], false),
    ]
}

/// Function that opens the other end of an output.
type Reader<'a> = &'a dyn Fn(&mut Carom, &Path) -> Box<dyn Read + Send>;

/// Runs the program once with each set of options from [`outputs`]. `reader` opens the other end of `path`, if it has one.
fn works(dir: &Path, path: &str, reader: Option<Reader>) {
    for (options, texts, comes_first) in outputs(path) {
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        let output = if reader.is_some() { Stdio::piped() } else { Stdio::null() };
        let mut carom = Carom(program(dir, &options).stdout(output).spawn().unwrap());
        let mut reading = reader.map(|reader| reader(&mut carom, dir));
        wait_until("the program listens", || {
            assert!(carom.0.try_wait().unwrap().is_none(), "{options:?}");
            UnixStream::connect(dir.join("api.sock")).is_ok()
        });
        // Wait for these texts before SIGTERM ends the VM, because one of the texts is the guest's output.
        if comes_first {
            reading = reading.map(|reading| until(reading, texts));
        }
        put(dir, "vm.pause", None);
        put(dir, "vm.reboot", None);
        kill_process(Pid::from_child(&carom.0), Signal::TERM).unwrap();
        if !comes_first {
            reading = reading.map(|reading| until(reading, texts));
        }
        assert!(carom.ended().success(), "{options:?}");
        drop(reading);
    }
}

fn standard_output(carom: &mut Carom, _: &Path) -> Box<dyn Read + Send> {
    Box::new(carom.0.stdout.take().unwrap())
}

#[test]
fn outputs_to_pipes_and_devices_work_under_landlock() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for path in ["/dev/stdout", "/proc/self/fd/1", "/proc/self/fd/7", "/dev/fd/7"] {
        works(dir, path, Some(&standard_output));
    }
    works(dir, "/dev/null", None);

    mknodat(CWD, dir.join("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    // The test also opens the FIFO for writing. So a read waits for bytes, and does not return the end of the file.
    let fifo = File::options().read(true).write(true).open(dir.join("fifo")).unwrap();
    works(dir, "fifo", Some(&|_, _| Box::new(fifo.try_clone().unwrap())));

    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let path = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
    let _other = OpenOptions::new().write(true).custom_flags(libc::O_NOCTTY).open(&path).unwrap();
    works(dir, &path, Some(&|_, _| Box::new(File::from(terminal.try_clone().unwrap()))));
}

/// Each option that names an output, with the prefix of the path in its value.
const OUTPUTS: [(&str, &str); 5] = [
    ("--serial", "file="),
    ("--console", "file="),
    ("--event-monitor", "path="),
    ("--log-file", ""),
    ("--crash-report", "path="),
];

#[test]
fn fifo_without_a_reader_is_refused_by_option() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    mknodat(CWD, dir.join("fifo"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for (option, key) in OUTPUTS {
        if ["--serial", "--console"].contains(&option) && !has_kvm() {
            continue;
        }
        let value = format!("{key}fifo");
        let mut carom = Carom(program(dir, &[option, &value]).stderr(Stdio::piped()).spawn().unwrap());
        let status = carom.ended();
        let mut text = String::new();
        carom.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let expected = format!("carom: {option} fifo: the FIFO has no reader; start the reader first");
        assert_eq!((text.lines().last(), status.code()), (Some(&*expected), Some(2)), "{text}");
    }
}

#[test]
fn output_that_cannot_be_opened_is_refused_by_option() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("directory")).unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    for path in ["/dev/stdout", "directory", "no/such/file"].map(PathBuf::from) {
        for (option, key) in OUTPUTS {
            if ["--serial", "--console"].contains(&option) && !has_kvm() {
                continue;
            }
            let value = format!("{key}{}", path.display());
            let socket = Stdio::from(OwnedFd::from(socket.try_clone().unwrap()));
            let output = program(dir, &[option, &value]).stdout(socket).stderr(Stdio::piped()).output().unwrap();
            let text = String::from_utf8(output.stderr).unwrap();
            let last = text.lines().last().unwrap_or_default();
            assert!(last.starts_with(&format!("carom: {option} {}: ", path.display())), "{option} {value}: {text}");
            assert_eq!(output.status.code(), Some(2), "{option} {value}: {text}");
            assert!(!dir.join("api.sock").exists(), "{option} {value}");
        }
    }
}
