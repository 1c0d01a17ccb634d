// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian guest that the test controls by its console: the test reads the output and types commands.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::exchange;
use carom_integration::harness::tell;
use carom_tools::checkout;
use carom_tools::distribution::Distribution;
use carom_tools::firmware::Firmware;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::SITE;

/// Interval between checks of the console and of the process.
const POLL: Duration = Duration::from_millis(100);

/// Maximum time until the login. The boot takes minutes in an emulated machine on a busy host.
const BOOT_TIME: Duration = Duration::from_secs(420);

/// Maximum time for a command, and for the end of the machine.
pub(crate) const COMMAND_TIME: Duration = Duration::from_secs(240);

/// Tap interface of the host with DHCP and DNS servers (`scripts/lib/vm-network`). Dropping this value removes the interface
/// and ends the servers.
pub(crate) struct Network {
    process: Child,
}

impl Network {
    /// Starts the network. `net` contains the first three numbers of the network's addresses.
    pub(crate) fn start(tap: &str, net: &str) -> Self {
        let mut process = Command::new(checkout().join("scripts/lib/vm-network"))
            .args([tap, net, "sh", "-c", "echo ready; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "the network did not start");
        Self { process }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The script ends when its input ends.
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

/// Carom process that runs a Debian guest.
pub(crate) struct Debian {
    carom: Child,
    keys: ChildStdin,
    console: Arc<Mutex<String>>,
    /// Length of the console's text up to the end of the text that the last [`Debian::wait_for`] found.
    seen: usize,
    start: Instant,
    dir: TempDir,
}

impl Debian {
    /// Starts Debian's kernel with a copy of the distribution's disk image. `more` contains additional options for both the
    /// disk and the network card.
    pub(crate) fn start(tap: &str, more: &str, options: &[&str]) -> Self {
        let files = Distribution::in_directory(SITE.distribution.as_ref().unwrap());
        let mut boot: Vec<OsString> = vec!["--kernel".into(), files.kernel.into()];
        boot.extend(["--initramfs".into(), files.initrd.into(), "--cmdline".into()]);
        boot.push(format!("console=ttyS0 {} quiet iommu.strict=1", Distribution::ROOT).into());
        boot.extend(["--net".into(), format!("tap={tap}{more}").into()]);
        Self::launch(&files.disk, Some(1 << 30), boot, more, &[&["--cpus", "boot=1"], options].concat())
    }

    /// Starts a kernel with [the patch](../../../../docs/guest-patch.md). This kernel needs no initrd. The disk and the network
    /// card are behind the virtio-iommu, and their DMA bounces.
    pub(crate) fn start_patched(tap: &str, options: &[&str]) -> Self {
        let files = Distribution::in_directory(SITE.distribution.as_ref().unwrap());
        let kernel = SITE.distribution_kernel.clone().unwrap();
        let mut boot: Vec<OsString> = vec!["--kernel".into(), kernel.into(), "--cmdline".into()];
        boot.push(format!("console=ttyS0 {} quiet iommu.strict=1", Distribution::ROOT).into());
        boot.extend(["--net".into(), format!("tap={tap},iommu=on").into()]);
        Self::launch(&files.disk, Some(1 << 30), boot, ",iommu=on", &[&["--cpus", "boot=1"], options].concat())
    }

    /// Starts firmware instead of a kernel, with a copy of a disk image that has a boot loader. `more` contains additional
    /// options of the disk.
    pub(crate) fn start_by_firmware(more: &str, options: &[&str]) -> Self {
        let files = Firmware::in_directory(SITE.firmware.as_ref().unwrap());
        Self::launch(&files.disk, None, vec!["--firmware".into(), files.firmware.into()], more, options)
    }

    /// Starts Carom with a copy of the disk image. If `len` is set, the copy is enlarged to `len` bytes.
    fn launch(image: &Path, len: Option<u64>, boot: Vec<OsString>, more: &str, options: &[&str]) -> Self {
        let start = Instant::now();
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.raw");
        fs::copy(image, &disk).unwrap();
        if let Some(len) = len {
            File::options().write(true).open(&disk).unwrap().set_len(len).unwrap();
        }
        let mut command = Self::command(dir.path(), boot, more, options);
        let (carom, keys, console) = Self::spawn(&mut command);
        tell(&format!("the disk was copied in {:.1} s", start.elapsed().as_secs_f64()));
        Self { carom, keys, console, seen: 0, start: Instant::now(), dir }
    }

    /// Returns the command that starts Carom with the disk image and the API socket in `dir`.
    fn command(dir: &Path, boot: Vec<OsString>, more: &str, options: &[&str]) -> Command {
        let mut command = Command::new(&SITE.carom);
        command
            .args(boot)
            .args(["--memory", "size=768M"])
            .args(["--disk", &format!("path={},image_type=raw{more}", dir.join("disk.raw").display())])
            .args(["--api-socket", &format!("path={}", dir.join("api").display())])
            .args(options)
            .stderr(File::create(dir.join("stderr")).unwrap());
        command
    }

    /// Starts a guest that was powered off again, with the kernel `release` and its initrd, which are installed on the guest's
    /// disk. The disk and the network card are behind the virtio-iommu.
    pub(crate) fn boot_installed(&mut self, release: &str, tap: &str, options: &[&str]) {
        let mut boot = Vec::new();
        for (option, name) in [("--kernel", "vmlinuz"), ("--initramfs", "initrd.img")] {
            boot.extend([option.into(), self.file_of_disk(&format!("/boot/{name}-{release}")).into()]);
        }
        boot.extend(["--cmdline".into(), format!("console=ttyS0 {} quiet iommu.strict=1", Distribution::ROOT).into()]);
        boot.extend(["--net".into(), format!("tap={tap},iommu=on").into()]);
        let options = [&["--cpus", "boot=1"], options].concat();
        let mut command = Self::command(self.dir.path(), boot, ",iommu=on", &options);
        (self.carom, self.keys, self.console) = Self::spawn(&mut command);
        (self.seen, self.start) = (0, Instant::now());
    }

    /// Copies a file from the file system of a guest that was powered off. Returns the path of the copy.
    fn file_of_disk(&self, path: &str) -> PathBuf {
        let copy = self.dir.path().join(path.rsplit('/').next().unwrap());
        let mut dump = Command::new("/sbin/debugfs");
        dump.arg("-R").arg(format!("dump {path} {}", copy.display())).arg(self.dir.path().join("disk.raw"));
        let output = dump.output().unwrap();
        // debugfs exits with status 0 even if the file does not exist.
        let len = fs::metadata(&copy).map_or(0, |file| file.len());
        assert!(output.status.success() && len > 0, "{path}: {}", String::from_utf8_lossy(&output.stderr));
        copy
    }

    /// Starts a process and records its console.
    fn spawn(command: &mut Command) -> (Child, ChildStdin, Arc<Mutex<String>>) {
        let mut carom = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let console = Arc::new(Mutex::new(String::new()));
        let (mut output, shown) = (carom.stdout.take().unwrap(), console.clone());
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count) = output.read(&mut bytes) {
                if count == 0 {
                    return;
                }
                let text = String::from_utf8_lossy(&bytes[..count]).replace('\r', "");
                shown.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
        });
        let keys = carom.stdin.take().unwrap();
        (carom, keys, console)
    }

    /// Saves the VM, kills its process, and restores the VM in another process.
    pub(crate) fn go_on_in_another_process(&mut self) {
        let saved = format!("file://{}", self.dir.path().join("saved").display());
        for (operation, body) in [("vm.pause", None), ("vm.snapshot", Some(json!({"destination_url": saved})))] {
            let path = format!("/api/v1/{operation}");
            let (status, answer) = exchange(&self.api(), "PUT", &path, body.as_ref()).unwrap();
            assert!((200..300).contains(&status), "{operation}: {status} {answer}");
        }
        self.carom.kill().unwrap();
        self.carom.wait().unwrap();
        fs::remove_file(self.api()).unwrap();
        let mut command = Command::new(&SITE.carom);
        command
            .args(["--restore", &format!("source_url={saved},resume=on")])
            .args(["--api-socket", &format!("path={}", self.api().display())])
            .stderr(File::create(self.dir.path().join("stderr")).unwrap());
        (self.carom, self.keys, self.console) = Self::spawn(&mut command);
        self.seen = 0;
        // Wait until the VM is restored, because text that is typed earlier is lost.
        let start = Instant::now();
        let runs = || {
            let info = exchange(&self.api(), "GET", "/api/v1/vm.info", None);
            info.is_ok_and(|(_, info)| info.contains("\"Running\""))
        };
        while !runs() {
            assert!(start.elapsed() < COMMAND_TIME, "the restored VM does not run");
            thread::sleep(POLL);
        }
    }

    pub(crate) fn api(&self) -> PathBuf {
        self.dir.path().join("api")
    }

    /// Returns the counters of the virtio-iommu in `vm.counters`.
    pub(crate) fn iommu_counters(&self) -> Value {
        let (status, answer) = exchange(&self.api(), "GET", "/api/v1/vm.counters", None).unwrap();
        assert_eq!(status, 200, "{answer}");
        let counters: Value = serde_json::from_str(&answer).unwrap();
        counters["_iommu"].clone()
    }

    fn shown(&self) -> String {
        self.console.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until the console shows `text` after the text of the previous wait. Returns the new text up to the end of `text`.
    pub(crate) fn wait_for(&mut self, text: &str, limit: Duration) -> String {
        let start = Instant::now();
        loop {
            let shown = self.shown();
            if let Some(at) = shown[self.seen..].find(text) {
                let end = self.seen + at + text.len();
                let part = shown[self.seen..end].to_owned();
                self.seen = end;
                return part;
            }
            assert!(start.elapsed() < limit, "no {text:?} on the console after {limit:?}");
            assert!(matches!(self.carom.try_wait(), Ok(None)), "carom has ended, and the console had no {text:?}");
            thread::sleep(POLL);
        }
    }

    fn type_line(&mut self, line: &str) {
        self.keys.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    /// Logs in as root.
    pub(crate) fn log_in(&mut self) {
        self.wait_for("debian login: ", BOOT_TIME);
        tell(&format!("login after {:.1} s", self.start.elapsed().as_secs_f64()));
        self.type_line("root");
        self.wait_for("root@debian:~# ", COMMAND_TIME);
        // Disable colours, the prompt and the echo.
        self.type_line("stty -echo; export TERM=dumb PAGER=cat LC_ALL=C PS1=");
        self.run("true");
    }

    /// Runs a command and returns its status and output.
    pub(crate) fn try_run(&mut self, command: &str) -> (i32, String) {
        self.try_run_within(command, COMMAND_TIME)
    }

    /// Runs a command that may take longer than others, and returns its status and output.
    pub(crate) fn try_run_within(&mut self, command: &str, limit: Duration) -> (i32, String) {
        self.type_line(&format!("echo 'BE''GIN'; {{ {command}\n}} 2>&1; echo \"E\"\"ND $?.\""));
        self.wait_for("BEGIN\n", COMMAND_TIME);
        let output = self.wait_for("END ", limit);
        let status = self.wait_for(".\n", COMMAND_TIME);
        let text = output.trim_end_matches("END ").to_owned();
        (status.trim_end_matches(".\n").parse().unwrap(), text)
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn run(&mut self, command: &str) -> String {
        let (status, output) = self.try_run(command);
        assert_eq!(status, 0, "{command}: {output}");
        output
    }

    /// Types a command after which the guest needs another login or ends.
    pub(crate) fn leave(&mut self, command: &str) {
        self.start = Instant::now();
        self.type_line(command);
    }

    /// Powers off the guest. Carom must exit with status 0.
    pub(crate) fn power_off(&mut self) {
        self.leave("poweroff");
        assert!(self.wait().success());
    }

    /// Waits until carom ends by itself.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.carom.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < COMMAND_TIME, "carom does not end");
            thread::sleep(POLL);
        }
    }
}

impl Drop for Debian {
    /// If the test failed, shows the last lines of the guest's console and the VMM's stderr. Then ends Carom.
    fn drop(&mut self) {
        if thread::panicking() {
            let (shown, said) = (self.shown(), fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default());
            let lines: Vec<&str> = shown.lines().collect();
            let end = lines[lines.len().saturating_sub(60)..].join("\n");
            eprintln!("end of the console:\n{end}\nstderr:\n{said}");
        }
        // Killing fails only if carom has ended already.
        let _ = self.carom.kill();
        let _ = self.carom.wait();
    }
}
