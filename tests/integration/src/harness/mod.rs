// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Harness for tests with real guests. It runs the tests whose needs are met, one after the other, and records each result.
//!
//! A test is a function with the attribute [`guest_test`]. A program of such tests uses [`main`] as its main function, and
//! accepts the options of Rust's own tests (`--list`, `--skip`, `--exact`, `--nocapture`, `--include-ignored`, …).

mod capture;
mod need;
mod record;

use std::env;
use std::fs::File;
use std::io::{Write, stderr};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rustix::io::fcntl_dupfd_cloexec;

pub use carom_integration_macros::guest_test;
pub use inventory;
pub use need::{DMSETUP, FAILING_ALLOCATIONS, Need, QEMU_IMG, STORAGE_DAEMON, SYSTEMD, VIRTIOFSD};
pub use record::{Done, Outcome, Record};

use capture::Capture;

/// Environment variable that selects tests. With the value `by_iommufd`, only tests with the attribute `by_iommufd` run.
pub const SELECTION: &str = "CAROM_TESTS";

/// Duplicate of the program's stderr, for messages while a test's output is captured.
static STDERR: OnceLock<File> = OnceLock::new();

/// Test, as [`guest_test`] registers it.
#[derive(Debug)]
pub struct GuestTest {
    /// Path of the module, including the name of the program.
    pub module: &'static str,
    /// Name of the function.
    pub function: &'static str,
    /// Needs of the test.
    pub needs: &'static [Need],
    /// Reason why a plain run skips the test. `None` if a plain run includes the test.
    pub slow: Option<&'static str>,
    /// True if a run that uses IOMMUFD repeats the test.
    pub by_iommufd: bool,
    /// Test function. It panics if the test fails.
    pub run: fn(),
}

inventory::collect!(GuestTest);

impl GuestTest {
    /// Returns the name in the format of Rust's own tests: modules and function, without the program.
    #[must_use]
    pub fn name(&self) -> String {
        match self.module.split_once("::") {
            Some((_, modules)) => format!("{modules}::{}", self.function),
            None => self.function.into(),
        }
    }

    /// Returns the reason why the test must be skipped on this machine, if there is a reason.
    fn left_out(&self, slow_too: bool) -> Option<String> {
        let lacking = self.needs.iter().find_map(|need| need.lacking());
        lacking.or_else(|| self.slow.filter(|_| !slow_too).map(|reason| format!("slow: {reason}")))
    }
}

/// Prints a text immediately, for the progress of a long test. Other output of a test is shown only if the test fails. If the
/// tests print nothing for minutes, the rig treats its machine as dead.
pub fn tell(text: &str) {
    // A failed write to stderr does no harm.
    let _ = match STDERR.get() {
        Some(mut own) => writeln!(own, "{text}"),
        None => writeln!(stderr(), "{text}"),
    };
}

/// Runs the registered tests that the command line selects. If the environment names a [`Record`], skips tests that are
/// finished in this record, and records the results of the other tests.
pub fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    if let Ok(own) = fcntl_dupfd_cloexec(stderr(), 3) {
        // Setting fails only if the variable is set already, and no other code sets it.
        let _ = STDERR.set(own.into());
    }
    // Tests share devices, so they run one at a time.
    arguments.test_threads = Some(1);
    let record = match Record::from_env() {
        Ok(record) => Arc::new(record),
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::FAILURE;
        }
    };
    let selection = env::var(SELECTION).ok();
    let mut tests: Vec<_> = inventory::iter::<GuestTest>.into_iter().map(|test| (test.name(), test)).collect();
    tests.sort_by(|(one, _), (other, _)| one.cmp(other));
    let done = record.as_ref().as_ref().map(Record::done).unwrap_or_default();
    tests.retain(|(name, test)| !done.has(name) && (test.by_iommufd || selection.as_deref() != Some("by_iommufd")));
    let trials = tests.into_iter().map(|(name, test)| trial(name, test, &arguments, &record)).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(name: String, test: &'static GuestTest, arguments: &Arguments, record: &Arc<Option<Record>>) -> Trial {
    let slow_too = arguments.include_ignored || arguments.ignored;
    let (nocapture, record, own_name) = (arguments.nocapture, record.clone(), name.clone());
    let runner = move || match test.left_out(slow_too) {
        Some(reason) => Ok(Completion::ignored_with(reason)),
        None => run(&own_name, test.run, nocapture, record.as_ref().as_ref()),
    };
    // With `--ignored`, the library runs only tests with this flag, so set the flag for slow tests.
    Trial::ignorable_test(name, runner).with_ignored_flag(arguments.ignored && test.slow.is_some())
}

/// Runs a test in a thread with its name, as Rust's own tests do. Shows the test's output if it fails.
fn run(name: &str, test: fn(), nocapture: bool, record: Option<&Record>) -> Result<Completion, Failed> {
    let start = Instant::now();
    let note = |outcome: Outcome, text: &str| match record {
        Some(record) => {
            record.note(name, outcome, start.elapsed(), text).map_err(|error| Failed::from(format!("{error:#}")))
        }
        None => Ok(()),
    };
    note(Outcome::Started, "")?;
    let capture = (!nocapture).then(Capture::start).transpose().map_err(Failed::from)?;
    let joined = thread::Builder::new().name(name.into()).spawn(test).map(thread::JoinHandle::join);
    let said = capture.map(Capture::end).unwrap_or_default();
    match joined.map_err(Failed::from)? {
        Ok(()) => note(Outcome::Passed, "").map(|()| Completion::Completed),
        Err(_) => {
            note(Outcome::Failed, &said)?;
            Err(said.into())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    const PLAIN: GuestTest =
        GuestTest { module: "guest::usb", function: "works", needs: &[], slow: None, by_iommufd: false, run: || {} };

    #[test]
    fn test_name_contains_modules_but_not_the_program() {
        assert_eq!(PLAIN.name(), "usb::works");
        assert_eq!(GuestTest { module: "debug", ..PLAIN }.name(), "works");
    }

    #[test]
    fn slow_test_runs_on_request_and_unmet_needs_always_skip() {
        let slow = GuestTest { slow: Some("others do"), ..PLAIN };
        assert_eq!(PLAIN.left_out(false), None);
        assert_eq!(slow.left_out(false).as_deref(), Some("slow: others do"));
        assert_eq!(slow.left_out(true), None);
        let lacking = GuestTest { needs: &[Need::Usb], ..PLAIN };
        assert!(lacking.left_out(true).unwrap().contains("CAROM_USB"));
    }

    /// Test programs with this harness's main function do not run functions with Rust's own attribute `#[test]`.
    #[test]
    fn no_guest_test_has_the_attribute_of_other_tests() {
        let mut rest = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")];
        let mut files = 0;
        while let Some(path) = rest.pop() {
            if path.is_dir() {
                rest.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let wrong = text.lines().position(|line| line.trim() == "#[test]");
            assert_eq!(wrong, None, "{}: use `#[guest_test]`, not `#[test]` (line counted from 0)", path.display());
            files += 1;
        }
        assert!(files > 10, "{files} files");
    }
}
