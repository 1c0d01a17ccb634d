// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The `carom` program: exit status 0 when the guest powered off, 1 for a failure, 2 for a mistake of the user's.

use std::fs::File;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;

use vmm::cli::{self, CliOutcome, EventMonitorConfig, Invocation};
use vmm::control::{Control, ControlError, Options};
use vmm::event_monitor::EventMonitor;
use vmm::vm::{Vm, VmError};

/// Exit status for a failure that the user cannot mend on the command line.
const FAILURE: u8 = 1;
/// Exit status for a mistake of the user's.
const MISTAKE: u8 = 2;

fn main() -> ExitCode {
    let invocation = match cli::parse(std::env::args_os()) {
        Ok(invocation) => invocation,
        Err(CliOutcome::Information(text)) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Err(CliOutcome::Mistake(text)) => {
            eprintln!("carom: {text}");
            return ExitCode::from(MISTAKE);
        }
    };
    match run(&invocation) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("carom: {error}");
            ExitCode::from(if error.is_user_error() { MISTAKE } else { FAILURE })
        }
    }
}

fn run(invocation: &Invocation) -> Result<(), VmError> {
    start_log(invocation)?;
    let file = invocation.event_monitor.as_ref().map(open_event_monitor).transpose()?;
    let monitor = EventMonitor::new(file);
    monitor.event("vmm", "starting");
    let control = Control::<Vm>::new(monitor.clone(), Options::default());
    let result = serve(control, invocation);
    monitor.event("vmm", "shutdown");
    result
}

/// Boots the VM of the command line and serves until the end.
fn serve(mut control: Control<Vm>, invocation: &Invocation) -> Result<(), VmError> {
    control.watch_signals()?;
    let booted = control.create(invocation.vm.clone()).and_then(|()| control.boot());
    booted.map_err(|error| match error {
        ControlError::Vm(error) => error,
        error => VmError::Guest(error.to_string()),
    })?;
    control.run()
}

fn create(option: &'static str, path: &Path) -> Result<File, VmError> {
    File::create(path).map_err(|source| VmError::File { option, path: path.display().to_string(), source })
}

fn start_log(invocation: &Invocation) -> Result<(), VmError> {
    let level = match invocation.verbosity {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    let mut builder = env_logger::Builder::new();
    builder.filter_level(level).format_target(false);
    if invocation.verbosity == 0 {
        // It warns of each interrupt kind that a device lacks, which is none of the user's concern.
        builder.filter_module("vfio_ioctls", log::LevelFilter::Error);
    }
    if let Some(path) = &invocation.log_file {
        builder.target(env_logger::Target::Pipe(Box::new(create("--log-file", path)?)));
    }
    builder.init();
    Ok(())
}

fn open_event_monitor(config: &EventMonitorConfig) -> Result<File, VmError> {
    match config {
        EventMonitorConfig::Path(path) => create("--event-monitor path", path),
        EventMonitorConfig::Fd(number) => {
            // A number that is no open descriptor is a mistake to report, not to write to.
            let exists = std::fs::metadata(format!("/proc/self/fd/{number}"));
            exists.map_err(|source| VmError::File {
                option: "--event-monitor fd",
                path: number.to_string(),
                source,
            })?;
            // SAFETY: the descriptor is open, as was just checked, above the standard three, and by naming it the user
            // hands it over; nothing of this program has opened one yet.
            let fd = unsafe { OwnedFd::from_raw_fd(*number) };
            Ok(File::from(fd))
        }
    }
}
