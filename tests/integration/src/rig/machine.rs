// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Starts the emulated machine and watches it until its end.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use carom_tools::progress::Progress;
use carom_tools::rig::Boot;
use carom_tools::signals::Signals;
use carom_tools::{Tools, checkout, kvm, peers, work_dir};
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use tempfile::TempDir;

use super::job::{self, INSTRUCTIONS, Surroundings};
use super::options::{self, Accelerator, Kernel, Options};
use super::places;
use super::qemu::{self, Files};
use super::terminal::{self, Terminal};
use crate::initramfs::{self, Extra};

/// Interval between checks of the machine.
const POLL: Duration = Duration::from_millis(200);

/// Maximum number of starts if the machine dies before the command begins. In about one of several hundred starts, QEMU's CPU
/// emulation crashes during boot, because it looks up addresses in a freed table of devices.
const STARTS: usize = 3;

/// Maximum time for the machine's boot.
const COMING_UP: Duration = Duration::from_secs(120);

/// Time without a sign of life after which the machine counts as dead. The emulated CPUs sometimes wait for each other forever.
/// If a CPU still handles interrupts, the kernel's watchdogs cause a panic after a minute, which ends the machine earlier.
const DEAD_AFTER: Duration = Duration::from_secs(100);

/// Signal number in [`End::Interrupted`] if the user ends the machine by keys.
const SIGINT: u8 = 2;

/// Size of the USB drive and of the AHCI drive.
const STICK_BYTES: u64 = 64 << 20;

/// Size of the swap device.
const SWAP_BYTES: u64 = 1 << 30;

/// Number of console lines that are shown if the machine failed.
const TAIL: usize = 30;

/// End of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The command ended with this status.
    Exited(u8),
    /// The time limit was reached.
    TimeLimit,
    /// The machine did not start or died.
    Died,
    /// This signal was received.
    Interrupted(u8),
}

impl End {
    /// Returns the exit status for this end.
    #[must_use]
    pub fn status(self) -> u8 {
        match self {
            Self::Exited(status) => status,
            Self::TimeLimit => 124,
            Self::Died => 125,
            Self::Interrupted(signal) => 128 + signal,
        }
    }
}

/// Runs the command of `options` in a new emulated machine. The command's output appears on stdout and stderr immediately.
///
/// # Errors
/// Fails if the machine cannot be prepared. The end of the run is not an error.
pub fn run(options: &Options, signals: &Signals, progress: &Progress) -> Result<End> {
    for left in (0..STARTS).rev() {
        match Machine::start(options, signals, progress) {
            Ok(mut machine) => {
                let end = machine.watch(options, signals, progress);
                if end != End::Died || machine.refused || machine.came_up() || left == 0 {
                    return Ok(end);
                }
                progress.say("the command had not begun: the emulated machine starts again");
            }
            Err(error) => return signals.caught().map(End::Interrupted).ok_or(error),
        }
    }
    Ok(End::Died)
}

/// Running machine. It ends when this value is dropped.
struct Machine {
    qemu: Child,
    /// Terminal of the command, if it has one.
    terminal: Option<Terminal>,
    /// Threads that forward the command's output.
    forwards: Vec<JoinHandle<()>>,
    /// Time of the command's last output.
    written: Arc<Mutex<Instant>>,
    /// Accelerator: `tcg` or `kvm`.
    accelerator: &'static str,
    keep_console: Option<PathBuf>,
    /// True if the emulator exited by itself, without a signal. Then another start would end in the same way.
    refused: bool,
    dir: TempDir,
}

impl Machine {
    fn start(options: &Options, signals: &Signals, progress: &Progress) -> Result<Self> {
        let checkout = checkout();
        let directory = match &options.directory {
            Some(directory) => directory.clone(),
            None => env::current_dir().context("cannot get the current directory")?,
        };
        let dir = work_dir::create(&env::temp_dir(), "carom-rig")?;
        let places = places(options, &checkout, &directory);
        let binds = places::list(&places::binds(&places))?;
        let tools = Tools::new(signals, progress)?;
        let boot = match options.kernel {
            Kernel::Debian => tools.rig_debian(),
            Kernel::Iommufd => tools.rig_iommufd(),
        };
        let boot = boot.context("cannot prepare the emulated machine's kernel and initramfs")?;
        let out = options.out.as_ref().map(|out| made(out)).transpose()?;
        let accelerator = accelerator(options.accel, dir.path())?;
        let emulator = match accelerator {
            "kvm" => vec!["qemu-system-x86_64".into()],
            _ => tools.rig_emulator(options.count_instructions)?,
        };
        let version = version(&emulator)?;
        let igb = qemu::has_igb(&emulator)?;

        let environment: Vec<_> = env::vars_os().collect();
        let around = Surroundings {
            checkout: &checkout,
            directory: &directory,
            environment: &environment,
            accelerator,
            emulator: &version,
            igb,
            out: out.as_deref(),
            window: options.terminal.then(terminal::window).flatten(),
        };
        let mut extras = vec![Extra { path: "job".into(), bytes: job::script(options, &around)? }];
        if let Some(out) = &out {
            extras.push(Extra { path: "out-dir".into(), bytes: [out.as_os_str().as_bytes(), b"\n"].concat() });
        }
        if options.terminal {
            // The command runs in the foreground of this console.
            extras.push(Extra { path: "terminal".into(), bytes: b"hvc0\n".to_vec() });
        }
        if !binds.is_empty() {
            extras.push(Extra { path: "binds".into(), bytes: binds });
        }
        let files = Files(dir.path());
        initramfs::append(&boot.initramfs, &extras, &files.initramfs())?;
        let size = options::bytes(&options.nvme_size).context("--nvme-size: too large")?;
        let others = [(files.stick(), STICK_BYTES), (files.sata(), STICK_BYTES), (files.swap(), SWAP_BYTES)];
        let drives = files.drives().into_iter().chain(files.more_drives(options.more_nvme));
        for (path, size) in drives.map(|path| (path, size)).chain(others) {
            File::create(&path)
                .and_then(|file| file.set_len(size))
                .with_context(|| format!("cannot create {}", path.display()))?;
        }
        for path in [files.console(), files.control()] {
            File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        let written = Arc::new(Mutex::new(Instant::now()));
        let forwards = vec![
            forward(&files.out(), io::stdout(), written.clone())?,
            forward(&files.err(), io::stderr(), written.clone())?,
        ];
        let disk = options
            .disk
            .as_deref()
            .map(|disk| fs::canonicalize(disk).with_context(|| format!("--disk: {}", disk.display())));
        let options = &Options { disk: disk.transpose()?, ..options.clone() };
        let plugin = match &out {
            Some(out) if options.count_instructions && accelerator == "tcg" => {
                qemu::plugin(&tools.counting_plugin()?, &out.join(INSTRUCTIONS))?
            }
            _ => Vec::new(),
        };
        let start = Start { emulator: &emulator, accelerator, plugin: &plugin, boot: &boot, igb };
        let qemu = spawn(&start, &files, options, out.as_deref())?;
        progress.show(&coming_up(accelerator, Duration::ZERO));
        let terminal = options.terminal.then(|| Terminal::start(&files.terminal()));
        Ok(Self {
            qemu,
            terminal,
            forwards,
            written,
            accelerator,
            keep_console: options.keep_console.clone(),
            refused: false,
            dir,
        })
    }

    fn files(&self) -> Files<'_> {
        Files(self.dir.path())
    }

    /// True if the machine has booted and written to its status file.
    fn came_up(&self) -> bool {
        fs::metadata(self.files().control()).is_ok_and(|meta| meta.len() > 0)
    }

    /// Waits for the machine's end.
    fn watch(&mut self, options: &Options, signals: &Signals, progress: &Progress) -> End {
        let start = Instant::now();
        let mut shown = options.verbose.then(|| File::open(self.files().console())).and_then(Result::ok);
        let mut vital = Vital::new(start);
        let status = loop {
            if let Some(signal) = signals.caught() {
                return End::Interrupted(signal);
            }
            if self.terminal.as_ref().is_some_and(Terminal::is_ended) {
                return End::Interrupted(SIGINT);
            }
            if let Some(console) = &mut shown {
                // A failed write to stderr does no harm.
                let _ = io::copy(console, &mut io::stderr());
            }
            if let Ok(Some(status)) = self.qemu.try_wait() {
                break status;
            }
            let now = Instant::now();
            let written = *self.written.lock().unwrap_or_else(PoisonError::into_inner);
            let signs = fs::metadata(self.files().control()).map_or(0, |meta| meta.len());
            if let Some(reason) = vital.look(now, signs, written, options.silence_limit) {
                self.show_end(progress, &reason);
                return End::Died;
            }
            match vital.comes_up_for(now) {
                Some(time) => progress.show(&coming_up(self.accelerator, time)),
                None => progress.end(),
            }
            if now.duration_since(start) >= options.time_limit {
                let seconds = options.time_limit.as_secs();
                let more = if vital.comes_up_for(now).is_some() { "; it was still booting" } else { "" };
                self.show_end(
                    progress,
                    &format!("time limit of {seconds} s reached; the emulated machine is stopped{more}"),
                );
                return if more.is_empty() { End::TimeLimit } else { End::Died };
            }
            thread::sleep(POLL);
        };
        progress.end();
        if let Some(terminal) = &mut self.terminal {
            terminal.finish();
        }
        self.drain();
        self.refused = status.code().is_some();
        self.ended(status, signals, progress)
    }

    /// Returns the result for a machine whose emulator has exited.
    fn ended(&self, status: ExitStatus, signals: &Signals, progress: &Progress) -> End {
        if let Some(signal) = signals.caught() {
            return End::Interrupted(signal);
        }
        let said = read_lossy(&self.files().control());
        match said_of_itself(&said) {
            Ok(status) => End::Exited(status),
            Err(reason) => {
                let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
                self.show_end(progress, &format!("the emulated machine ended early{reason} (emulator: {status})"));
                End::Died
            }
        }
    }

    /// Waits until the whole output of the command has been forwarded.
    fn drain(&mut self) {
        for path in [self.files().out(), self.files().err()] {
            // If the emulator failed early, it never opened the FIFO, and the thread that reads the FIFO still waits for a
            // writer. Opening the FIFO here ends this wait.
            let _ = OpenOptions::new().write(true).custom_flags(nonblocking()).open(path);
        }
        for forward in self.forwards.drain(..) {
            // The thread does not panic.
            let _ = forward.join();
        }
    }

    /// Prints `reason`, the last lines of the console, and QEMU's messages.
    fn show_end(&self, progress: &Progress, reason: &str) {
        progress.say(reason);
        progress.say("the end of its console:");
        let console = read_lossy(&self.files().console()).replace('\r', "");
        let lines: Vec<&str> = console.lines().collect();
        let panic = lines.iter().find(|line| line.contains("Kernel panic")).map(|line| format!("  > {line}\n"));
        let tail = lines[lines.len().saturating_sub(TAIL)..].iter().map(|line| format!("  | {line}\n"));
        let log = read_lossy(&self.files().log());
        let text: String =
            panic.into_iter().chain(tail).chain(log.lines().map(|line| format!("  qemu: {line}\n"))).collect();
        // If stderr is closed, the text is lost.
        let _ = io::stderr().write_all(text.as_bytes());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Killing fails only if the emulator has ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        if let Some(kept) = &self.keep_console
            && let Err(error) = fs::copy(self.files().console(), kept)
        {
            eprintln!("cannot copy the console to {}: {error}", kept.display());
        }
    }
}

/// Returns the host paths that the run needs: checkout, working directory, target directory, cache, the command, and paths in
/// variables of this project.
fn places(options: &Options, checkout: &Path, directory: &Path) -> Vec<PathBuf> {
    let mut places = vec![checkout.to_path_buf(), directory.to_path_buf()];
    // This program is PROFILE/rig in the target directory.
    let target = env::current_exe().ok().and_then(|program| Some(program.parent()?.parent()?.to_path_buf()));
    places.extend(target);
    let named = env::vars_os().filter(|(name, _)| name.as_bytes().starts_with(b"CAROM_")).map(|(_, value)| value);
    let values = options.env.iter().filter_map(|item| Some(item.split_once('=')?.1.into()));
    let program = options.command.first().filter(|program| program.as_bytes().contains(&b'/')).cloned();
    let template = env::var(peers::OTHER).ok().and_then(|text| shlex::split(&text)).unwrap_or_default();
    let all = named.chain(values).chain(program).chain(template.into_iter().map(OsString::from));
    places.extend(all.map(PathBuf::from).filter(|path| path.is_absolute()));
    places
}

/// Creates the directory `out` if it is missing, and returns its absolute path.
fn made(out: &Path) -> Result<PathBuf> {
    fs::create_dir_all(out).with_context(|| format!("--out: cannot create {}", out.display()))?;
    let out = fs::canonicalize(out).with_context(|| format!("--out: {}", out.display()))?;
    ensure!(
        !out.as_os_str().as_bytes().contains(&b'\n'),
        "--out: {}: the name must not contain a line break",
        out.display()
    );
    Ok(out)
}

/// Chooses the accelerator.
fn accelerator(wanted: Accelerator, dir: &Path) -> Result<&'static str> {
    match wanted {
        Accelerator::Tcg => Ok("tcg"),
        Accelerator::Auto => Ok(if nested_kvm_works(dir) { "kvm" } else { "tcg" }),
        Accelerator::Kvm => {
            ensure!(
                nested_kvm_works(dir),
                "--accel kvm: nested KVM does not work on this host; without the option, the rig emulates the CPUs"
            );
            Ok("kvm")
        }
    }
}

/// True if this host's KVM supports nested KVM.
fn nested_kvm_works(dir: &Path) -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has = |flag| flags.split_whitespace().any(|word| word == flag);
    let module = if has("svm") { "kvm_amd" } else { "kvm_intel" };
    let nested = fs::read_to_string(format!("/sys/module/{module}/parameters/nested")).unwrap_or_default();
    (has("svm") || has("vmx")) && ["Y", "1"].contains(&nested.trim()) && kvm::works(dir)
}

/// Inputs for starting the emulator.
struct Start<'a> {
    /// Emulator with its first arguments.
    emulator: &'a [OsString],
    accelerator: &'static str,
    /// Arguments for the plug-in.
    plugin: &'a [String],
    boot: &'a Boot,
    /// True if the emulator has an igb card.
    igb: bool,
}

fn spawn(start: &Start<'_>, files: &Files, options: &Options, out: Option<&Path>) -> Result<Child> {
    let log = File::create(files.log()).context("cannot create QEMU's log")?;
    // The kernel kills the emulator if this program is killed.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL"])
        .args(start.emulator)
        .args(qemu::accelerator(start.accelerator, options.icount))
        .args(start.plugin)
        .args(qemu::arguments(files, start.boot, options, out, start.igb)?)
        .args(options.qemu_args.iter().flat_map(|words| words.split_whitespace()))
        // Only this program gets the terminal's signals. It then ends the emulator.
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("cannot duplicate the descriptor of QEMU's log")?)
        .stderr(log);
    command.spawn().context("cannot start setpriv (Debian package util-linux), which starts QEMU")
}

/// Creates a FIFO and a thread that forwards its data to `target`.
fn forward(
    path: &Path,
    mut target: impl Write + Send + 'static,
    written: Arc<Mutex<Instant>>,
) -> Result<JoinHandle<()>> {
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, path, FileType::Fifo, mode, 0).with_context(|| format!("cannot create {}", path.display()))?;
    let path = path.to_path_buf();
    Ok(thread::spawn(move || {
        let Ok(mut fifo) = File::open(path) else { return };
        let mut bytes = [0; 65536];
        let mut wanted = true;
        loop {
            match fifo.read(&mut bytes) {
                Ok(0) => return,
                Ok(count) => {
                    *written.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
                    // The program that reads our output may have ended. The command continues anyway.
                    wanted = wanted && target.write_all(&bytes[..count]).and_then(|()| target.flush()).is_ok();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }))
}

fn nonblocking() -> i32 {
    OFlags::NONBLOCK.bits().cast_signed()
}

/// Returns the version that the emulator reports. If the emulator is this project's own build, adds the build's key, which is the
/// name of the emulator's directory.
fn version(emulator: &[OsString]) -> Result<String> {
    let [program, arguments @ ..] = emulator else { return Ok(String::new()) };
    let output = Command::new(program).args(arguments).arg("--version").output();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    ensure!(output.status.success(), "{} --version failed: {}", program.display(), output.status);
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().next().unwrap_or_default();
    let build = Path::new(program).parent().and_then(Path::file_name).map(|name| name.to_string_lossy());
    Ok(match build.filter(|name| name.len() == 20 && name.chars().all(|digit| digit.is_ascii_hexdigit())) {
        Some(build) => format!("{line}, build {build}"),
        None => line.to_owned(),
    })
}

fn coming_up(accelerator: &str, time: Duration) -> String {
    format!("rig: starting the emulated machine ({accelerator}), {} s", time.as_secs())
}

/// Signs of life of a machine.
struct Vital {
    start: Instant,
    /// Length of the machine's status file at the last check, and the time at which this length last changed.
    signs: (u64, Instant),
    /// Time at which the machine had booted, if it has booted.
    up: Option<Instant>,
}

impl Vital {
    fn new(start: Instant) -> Self {
        Self { start, signs: (0, start), up: None }
    }

    /// Returns the reason why the machine counts as dead, if it does.
    fn look(&mut self, now: Instant, signs: u64, written: Instant, silence_limit: Duration) -> Option<String> {
        if signs != self.signs.0 {
            self.signs = (signs, now);
            self.up.get_or_insert(now);
        }
        let Some(up) = self.up else {
            let late = now.duration_since(self.start) >= COMING_UP;
            return late.then(|| format!("the emulated machine did not boot in {} s", COMING_UP.as_secs()));
        };
        let dead_after = DEAD_AFTER.as_secs();
        if now.duration_since(self.signs.1) >= DEAD_AFTER {
            return Some(format!("the emulated machine has shown no sign of life for {dead_after} s"));
        }
        let silent = !silence_limit.is_zero() && now.saturating_duration_since(written.max(up)) >= silence_limit;
        silent.then(|| {
            let seconds = silence_limit.as_secs();
            format!("--silence-limit: the command wrote nothing for {seconds} s; the machine counts as dead")
        })
    }

    /// Returns the time since the start while the machine is still booting.
    fn comes_up_for(&self, now: Instant) -> Option<Duration> {
        self.up.is_none().then(|| now.duration_since(self.start))
    }
}

/// Returns the command's exit status. If the machine reported no status, returns the machine's reason for its failure, if it
/// reported any.
fn said_of_itself(control: &str) -> Result<u8, Option<String>> {
    let status = control.lines().rev().find_map(|line| line.strip_prefix("EXIT ")?.parse().ok());
    status.ok_or_else(|| control.lines().find_map(|line| line.strip_prefix("FAIL ")).map(String::from))
}

fn read_lossy(path: &Path) -> String {
    let mut bytes = Vec::new();
    // If the file cannot be read, there is nothing to show.
    let _ = File::open(path).and_then(|mut file| {
        file.seek(SeekFrom::Start(0))?;
        file.read_to_end(&mut bytes)
    });
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_LIMIT: Duration = Duration::ZERO;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn machine_that_does_not_come_up_is_dead() {
        let start = Instant::now();
        let mut vital = Vital::new(start);
        assert_eq!(vital.look(start + seconds(119), 0, start, NO_LIMIT), None);
        assert!(vital.look(start + seconds(120), 0, start, NO_LIMIT).unwrap().contains("did not boot"));
    }

    #[test]
    fn machine_is_dead_after_100_seconds_without_a_sign() {
        let start = Instant::now();
        let mut vital = Vital::new(start);
        assert_eq!(vital.look(start + seconds(5), 3, start, NO_LIMIT), None);
        assert_eq!(vital.look(start + seconds(104), 3, start, NO_LIMIT), None);
        assert_eq!(vital.look(start + seconds(104), 5, start, NO_LIMIT), None);
        assert_eq!(vital.look(start + seconds(203), 5, start, NO_LIMIT), None);
        assert!(vital.look(start + seconds(204), 5, start, NO_LIMIT).unwrap().contains("no sign of life for 100 s"));
    }

    #[test]
    fn silence_counts_only_after_the_machine_has_booted() {
        let start = Instant::now();
        let mut vital = Vital::new(start);
        assert_eq!(vital.look(start + seconds(50), 3, start, seconds(20)), None);
        assert_eq!(vital.look(start + seconds(69), 4, start, seconds(20)), None);
        assert_eq!(vital.look(start + seconds(80), 5, start + seconds(61), seconds(20)), None);
        assert!(vital.look(start + seconds(81), 6, start + seconds(61), seconds(20)).unwrap().contains("for 20 s"));
    }

    #[test]
    fn last_status_line_of_the_machine_counts() {
        assert_eq!(said_of_itself("UP\n.\n.\nEXIT 3\n"), Ok(3));
        assert_eq!(said_of_itself("FAIL cannot mount /x\n"), Err(Some("cannot mount /x".into())));
        assert_eq!(said_of_itself("UP\n.\n"), Err(None));
        assert_eq!(said_of_itself("UP\nEXIT \n"), Err(None));
    }

    #[test]
    fn exit_status_shows_the_end() {
        let ends = [End::Exited(7), End::TimeLimit, End::Died, End::Interrupted(15)];
        assert_eq!(ends.map(End::status), [7, 124, 125, 143]);
    }

    #[test]
    fn fifo_output_is_forwarded_and_absent_writer_does_not_hang() {
        let dir = tempfile::tempdir().unwrap();
        let (used, unused) = (dir.path().join("used"), dir.path().join("unused"));
        let copy = dir.path().join("copy");
        let long_ago = Arc::new(Mutex::new(Instant::now()));
        let before = *long_ago.lock().unwrap();
        let first = forward(&used, File::create(&copy).unwrap(), long_ago.clone()).unwrap();
        let second = forward(&unused, io::sink(), long_ago.clone()).unwrap();

        fs::write(&used, "said").unwrap();
        first.join().unwrap();
        while OpenOptions::new().write(true).custom_flags(nonblocking()).open(&unused).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
        second.join().unwrap();

        assert_eq!(fs::read_to_string(copy).unwrap(), "said");
        assert!(*long_ago.lock().unwrap() > before);
    }
}
