// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The `carom` program. Its exit status is 0 if the guest powered off, 1 for a failure, and 2 for a user error.

use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use carom_api::cli::{
    self, CliOutcome, EventMonitorOption, FileOrFd, InheritedFd, Invocation, MetricsAddress, OptionName, Program,
    Seccomp, streams,
};
use carom_api::error::FileError;
use carom_api::{CheckedConfig, Field, RestoreConfig};
use devices::crash;
use devices::descriptors;
use devices::listening_socket::ListeningSocket;
use devices::sandbox::{self, Mode};
use rustix::thread::set_no_new_privs;
use vmm::api::{ApiServer, SharedApi};
use vmm::control::{Control, ControlError, Options};
use vmm::error::VmError;
use vmm::limits::file_bounds::FileBounds;
use vmm::limits::file_limits;
use vmm::process::crash_file::CrashFile;
use vmm::process::event_monitor::EventMonitor;
use vmm::process::inherited::InheritedFds;
use vmm::process::log_flood::LogFlood;
use vmm::process::log_stream::{self, LastLines, LogWriter};
use vmm::process::output_file;
use vmm::process::signal_actions;
use vmm::process::thread_roles;
use vmm::vm::Vm;

/// Exit status for a failure that the user cannot fix by changing the command line.
const FAILURE: u8 = 1;
/// Exit status for a user error.
const MISTAKE: u8 = 2;
/// Maximum time to write the last events when the program ends.
const LAST_EVENTS: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let prepared = signal_actions::prepare().and_then(|()| crash::watch_signals());
    let program = std::env::args_os().next().map_or_else(Program::default, |path| Program::of(&path)).name();
    let invocation = match cli::parse(std::env::args_os()) {
        Ok(invocation) => invocation,
        Err(CliOutcome::Information(text)) => {
            return streams::inform(program, &text);
        }
        Err(CliOutcome::Mistake(text)) => {
            streams::complain(program, &text);
            return ExitCode::from(MISTAKE);
        }
    };
    let prepared = prepared.map_err(|source| VmError::Device { what: "set up signals", source });
    let mut last_lines = None;
    match prepared.and_then(|()| run(invocation, &mut last_lines)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log_stream::complain(program, &error.to_string());
            ExitCode::from(if error.is_user_error() { MISTAKE } else { FAILURE })
        }
    }
}

/// Runs the program. Sets `last_lines` when lines to standard error begin to be queued. Dropping `last_lines` waits until all queued lines
/// are written.
fn run(invocation: Invocation, last_lines: &mut Option<LastLines>) -> Result<(), VmError> {
    // After this call, an executed file cannot raise the program's privileges. The program itself executes no files.
    set_no_new_privs(true).map_err(|error| VmError::Device { what: "set no_new_privs", source: error.into() })?;
    descriptors::prepare();
    filter_calls(invocation.seccomp)?;
    let Invocation { program, vm, restore, api_socket, defaults, metrics, no_shutdown, event_monitor, .. } = invocation;
    let crash_report = invocation.crash_report;
    // The order of the steps matters:
    // - Inherited descriptors are taken before the program opens files, because an opened file could have the number of a missing
    //   descriptor.
    // - The API socket is bound after `watch_signals`, so that a signal ends the program cleanly and the socket is removed.
    // - Files are emptied after the bind. If another process already serves the socket, the bind fails, and that process's files stay
    //   unchanged.
    let of_parts = vm.iter().flat_map(|vm| vm.parts());
    let of_parts = of_parts.flat_map(|part| part.inherited().iter().map(|number| (part.kind().field, *number)));
    let kept = invocation.inherit.iter().map(|InheritedFd(number)| (InheritedFd::OPTION, *number)).chain(of_parts);
    let kept: Vec<(Field, i32)> = kept.collect();
    // If two options name the same descriptor, the error names the later option.
    let own = [named(api_socket.as_ref()), named(event_monitor.as_ref()), named(crash_report.as_ref())];
    let named: Vec<(Field, i32)> = own.into_iter().flatten().chain(kept.iter().copied()).collect();
    let mut inherited = InheritedFds::take(&named)?;
    kept.iter().try_for_each(|(field, number)| inherited.keep(*field, *number))?;
    // The log starts before the crash file is opened, so that a crash report is written after the message of its panic.
    *last_lines = Some(log_stream::start().map_err(no_log)?);
    // The crash file stays open until the program ends.
    let crash_file = crash_report
        .as_ref()
        .map(|option| open(option, &mut inherited, CrashFile::open, CrashFile::inherited))
        .transpose()?;
    let log_file = invocation.log_file.map(|path| LogFile::open(Field::only("--log-file"), &path)).transpose()?;
    if let Some(file) = &log_file {
        log_stream::log_to(file.writer()?).map_err(no_log)?;
    }
    start_log(invocation.verbosity);
    let (monitor, events) = match event_monitor {
        Some(option) => open_event_monitor(&option, &mut inherited)?,
        None => (EventMonitor::none(), None),
    };
    let removed = api_socket.as_ref().and_then(FileOrFd::path).into_iter();
    let removed = removed.chain(crash_report.as_ref().and_then(FileOrFd::path)).map(Path::to_path_buf).collect();
    let bounds = match invocation.landlock {
        None => FileBounds::All,
        Some(_) if vm.is_some() => FileBounds::OfFirstVm,
        Some(rules) => {
            file_limits::check_host()?;
            FileBounds::of_rules(&rules)?
        }
    };
    let options = Options { defaults, no_shutdown, has_api: api_socket.is_some(), removed, bounds };
    let control = Control::<Vm>::new(monitor.clone(), options);
    control.watch_signals()?;
    let socket = api_socket
        .map(|option| open(&option, &mut inherited, ListeningSocket::bind, ListeningSocket::inherited))
        .transpose()?;
    for file in log_file.into_iter().chain(events) {
        file.empty()?;
    }
    let metrics = metrics.map(listen_for_metrics).transpose()?;
    monitor.event("vmm", "starting");
    let server = (socket.is_some() || metrics.is_some())
        .then(|| ApiServer::start(socket, metrics, SharedApi::new(control.handle(), program)))
        .transpose()
        .map_err(|source| VmError::Device { what: "serve the API", source })?;
    // The log's threads start only now, so that clients get answers sooner. No guest has run yet.
    log_stream::start_threads().map_err(no_log)?;
    sandbox::confine(thread_roles::CONTROL).map_err(no_filter)?;
    let result = serve(control, vm, restore);
    monitor.event("vmm", "shutdown");
    drop(server);
    monitor.flush(LAST_EVENTS);
    drop(crash_file);
    result
}

/// Makes the kernel restrict each new thread to the system calls of its role.
fn filter_calls(seccomp: Seccomp) -> Result<(), VmError> {
    let mode = match seccomp {
        Seccomp::True => Mode::Stop,
        Seccomp::Log => Mode::Log,
        Seccomp::Errno => Mode::Refuse,
        Seccomp::False => return Ok(()),
    };
    sandbox::begin(mode, &vmm::vm::thread_roles()).map_err(no_filter)
}

fn no_filter(source: io::Error) -> VmError {
    VmError::Device { what: "filter system calls (--seccomp false disables the filter)", source }
}

/// If the command line has a VM, boots or restores it. Then serves clients and the guest until the program ends.
fn serve(mut control: Control<Vm>, vm: Option<CheckedConfig>, restore: Option<RestoreConfig>) -> Result<(), VmError> {
    let started = match (vm, restore) {
        (Some(vm), _) => control.create(vm).and_then(|()| control.boot()),
        (None, Some(source)) => control.restore(&source),
        (None, None) => Ok(()),
    };
    started.map_err(|error| match error {
        ControlError::Vm(error) => error,
        error => VmError::Guest(error.to_string()),
    })?;
    control.run()
}

/// File to which this process appends lines.
struct LogFile {
    field: Field,
    path: String,
    file: File,
}

impl LogFile {
    /// Creates the file, or opens it without changing its contents.
    fn open(field: Field, path: &Path) -> Result<Self, VmError> {
        let path_text = path.display().to_string();
        match output_file::open(File::options().append(true), 0, path) {
            Ok(file) => Ok(Self { field, path: path_text, file }),
            Err(source) => Err(FileError { field, path: path_text, source }.into()),
        }
    }

    /// Returns another descriptor of the file, for a writer.
    fn writer(&self) -> Result<File, VmError> {
        self.file.try_clone().map_err(|source| self.error(source))
    }

    /// Empties the file if it is a regular file. An inherited file is not emptied, because its contents belong to the process that opened
    /// it.
    fn empty(&self) -> Result<(), VmError> {
        let is_file = self.file.metadata().map_err(|source| self.error(source))?.is_file();
        let is_file = is_file && !devices::inherited::is_kept(Path::new(&self.path));
        if is_file { self.file.set_len(0).map_err(|source| self.error(source)) } else { Ok(()) }
    }

    fn error(&self, source: io::Error) -> VmError {
        FileError { field: self.field, path: self.path.clone(), source }.into()
    }
}

fn no_log(source: io::Error) -> VmError {
    VmError::Device { what: "set up the log", source }
}

fn start_log(verbosity: u8) {
    let level = match verbosity {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    let mut builder = env_logger::Builder::new();
    builder.filter_level(level).format_target(false);
    builder.target(env_logger::Target::Pipe(Box::new(LogWriter)));
    if verbosity == 0 {
        // vfio_ioctls warns about each interrupt kind that a device lacks. Such warnings do not concern the user.
        builder.filter_module("vfio_ioctls", log::LevelFilter::Error);
    }
    let log = builder.build();
    let level = log.filter();
    // This call succeeds, because the program sets no other logger.
    if log::set_boxed_logger(Box::new(LogFlood::new(log))).is_ok() {
        log::set_max_level(level);
    }
}

/// Returns the descriptor that an option names, if it names one.
fn named<O: OptionName>(option: Option<&FileOrFd<O>>) -> Option<(Field, i32)> {
    option.and_then(FileOrFd::fd).map(|number| (O::OPTION, number))
}

/// Opens the file of an option: a path, or a descriptor that this process inherited.
fn open<O: OptionName, T>(
    option: &FileOrFd<O>,
    inherited: &mut InheritedFds,
    by_path: fn(&Path) -> io::Result<T>,
    of_fd: fn(OwnedFd) -> io::Result<T>,
) -> Result<T, VmError> {
    let (opened, path) = match option {
        FileOrFd::Path(path) => (by_path(path), path.display().to_string()),
        FileOrFd::Fd(number, _) => (inherited.give(*number).and_then(of_fd), format!("fd={number}")),
    };
    opened.map_err(|source| FileError { field: O::OPTION, path, source }.into())
}

fn listen_for_metrics(MetricsAddress(address): MetricsAddress) -> Result<TcpListener, VmError> {
    let file_error = |source| FileError { field: MetricsAddress::OPTION, path: format!("tcp={address}"), source };
    let listener = TcpListener::bind(address).map_err(file_error)?;
    // With port 0, the log shows the port that the kernel chose.
    log::info!("metrics are served at http://{}/metrics", listener.local_addr().map_err(file_error)?);
    Ok(listener)
}

/// Opens the event monitor. Returns the monitor, and the file to empty later. A file that was inherited as a descriptor is not emptied,
/// because its contents belong to the process that opened it.
fn open_event_monitor(
    option: &FileOrFd<EventMonitorOption>,
    inherited: &mut InheritedFds,
) -> Result<(EventMonitor, Option<LogFile>), VmError> {
    let field = EventMonitorOption::OPTION;
    match option {
        FileOrFd::Path(path) => {
            let file = LogFile::open(field, path)?;
            let monitor = EventMonitor::new(file.writer()?).map_err(|source| file.error(source))?;
            Ok((monitor, Some(file)))
        }
        FileOrFd::Fd(number, _) => {
            let fd = inherited.give(*number);
            let monitor = fd.map(File::from).and_then(EventMonitor::new);
            let path = format!("fd={number}");
            Ok((monitor.map_err(|source| FileError { field, path, source })?, None))
        }
    }
}
