// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs test programs to their end. If an emulated machine dies, a new machine runs the remaining tests.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use carom_integration::harness::{Done, Outcome, Record, SELECTION};
use carom_integration::rig::{self, End, Kernel, Options};
use carom_tools::children::run_command;
use carom_tools::progress::Progress;
use carom_tools::signals::Signals;

use crate::program::Program;

/// Memory of the emulated machine.
const MEMORY: &str = "6G";

/// Number of slowest tests that the summary names.
const LONGEST: usize = 12;

/// Place where the tests run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the emulated machine with this kernel. With the IOMMUFD kernel, devices use IOMMUFD.
    Rig(Kernel),
    /// On this host.
    Here,
}

/// Time limits of an emulated machine. A machine that exceeds a limit is stopped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) time: Duration,
    /// Maximum time without output.
    pub(crate) silence: Duration,
}

/// Function that runs a command in an emulated machine until the command or the machine ends.
pub(crate) type Machine<'a> = Box<dyn Fn(&Options) -> Result<End> + 'a>;

/// Run of several test programs, and the result so far.
pub(crate) struct Suites<'a> {
    machine: Machine<'a>,
    out: &'a Path,
    limits: Limits,
    signals: &'a Signals,
    progress: &'a Progress,
    /// Number of machines that died.
    died: usize,
    failed: bool,
    /// Number in the name of the newest record. Numbers that earlier runs have used in the same directory are skipped.
    runs: usize,
}

impl<'a> Suites<'a> {
    pub(crate) fn new(out: &'a Path, limits: Limits, signals: &'a Signals, progress: &'a Progress) -> Self {
        let machine = Box::new(move |options: &Options| rig::run(options, signals, progress));
        Self { machine, out, limits, signals, progress, died: 0, failed: false, runs: 0 }
    }

    /// Runs a test program that uses the harness. With `by_iommufd`, runs only the tests with the attribute `by_iommufd`.
    ///
    /// The emulated machine sometimes hangs, independently of the tests. Then a new machine runs the tests that have not finished,
    /// including the interrupted test. If a machine finishes no test and dies in the same test as the previous machine, the
    /// remaining tests do not run.
    pub(crate) fn run(
        &mut self,
        program: &Program,
        place: Place,
        arguments: &[OsString],
        by_iommufd: bool,
    ) -> Result<()> {
        let record = self.new_record(program);
        let mut environment = vec![(Record::VARIABLE, record.path().as_os_str().to_owned())];
        if by_iommufd {
            environment.push((SELECTION, "by_iommufd".into()));
        }
        let mut before = Done::default();
        loop {
            let start = Instant::now();
            let end = self.start(program, place, arguments, &environment)?;
            if end != End::Died {
                self.failed |= end != End::Exited(0);
                if end == End::TimeLimit {
                    print!("\n{}", unprinted(&record, &before, true, start.elapsed()));
                }
                print!("{}", longest(&record.done()));
                break;
            }
            self.died += 1;
            let done = record.done();
            let give_up = done.finished() == before.finished() && done.at_hand() == before.at_hand();
            print!("\n{}", unprinted(&record, &before, give_up, start.elapsed()));
            let at_hand = done.at_hand().map(|test| format!(" in {test}")).unwrap_or_default();
            let goes_on = if give_up {
                "no test has finished since the previous machine died, so the other tests do not run"
            } else {
                "the other tests run in a new machine"
            };
            self.progress
                .say(&format!("the emulated machine died{at_hand}; {} tests are done, {goes_on}", done.finished()));
            self.failed |= give_up || done.count(Outcome::Failed) > 0;
            if give_up {
                break;
            }
            before = done;
        }
        Ok(())
    }

    /// Returns a record whose file does not exist yet. Earlier runs, for example with another kernel, may have left records in the
    /// same directory.
    fn new_record(&mut self, program: &Program) -> Record {
        loop {
            self.runs += 1;
            let path = self.out.join(format!("record-{}-{}", self.runs, program.name));
            if !path.exists() {
                return Record::new(&path);
            }
        }
    }

    /// Runs a test program with Rust's standard harness, which keeps no record. If the machine dies, runs the whole program once
    /// more.
    pub(crate) fn run_whole(&mut self, program: &Program, place: Place) -> Result<()> {
        let arguments = [OsString::from("--test-threads=1")];
        let mut end = self.start(program, place, &arguments, &[])?;
        if end == End::Died {
            self.died += 1;
            self.progress.say(&format!("the emulated machine died; {} runs again in a new machine", program.name));
            end = self.start(program, place, &arguments, &[])?;
        }
        self.failed |= end != End::Exited(0);
        Ok(())
    }

    /// Prints the number of machines that died, if any. Returns true if all tests passed.
    pub(crate) fn passed(&self) -> bool {
        if self.died > 0 {
            println!("emulated machines that died: {}", self.died);
        }
        !self.failed
    }

    fn start(
        &mut self,
        program: &Program,
        place: Place,
        arguments: &[OsString],
        environment: &[(&str, OsString)],
    ) -> Result<End> {
        let end = match place {
            Place::Here => self.start_here(program, arguments, environment)?,
            Place::Rig(kernel) => {
                if kernel == Kernel::Iommufd {
                    self.progress.say(&format!("running the test program {} by IOMMUFD", program.name));
                }
                let options = self.options(program, kernel, arguments, environment)?;
                (self.machine)(&options)?
            }
        };
        match end {
            End::Interrupted(_) => bail!("interrupted"),
            end => Ok(end),
        }
    }

    fn options(
        &self,
        program: &Program,
        kernel: Kernel,
        arguments: &[OsString],
        environment: &[(&str, OsString)],
    ) -> Result<Options> {
        let mut env = Vec::new();
        for (name, value) in environment {
            let value = value.to_str().with_context(|| format!("{name}: {} is not UTF-8", value.display()))?;
            env.push(format!("{name}={value}"));
        }
        if kernel == Kernel::Iommufd {
            env.push("CAROM_IOMMUFD=on".into());
        }
        let program_and_arguments =
            [program.executable.as_os_str()].into_iter().chain(arguments.iter().map(AsRef::as_ref));
        Ok(Options {
            kernel,
            env,
            memory: MEMORY.into(),
            time_limit: self.limits.time,
            silence_limit: self.limits.silence,
            out: Some(self.out.into()),
            keep_console: Some(self.out.join("rig.console")),
            directory: Some(program.directory.clone()),
            command: program_and_arguments.map(Into::into).collect(),
            ..Options::plain()
        })
    }

    fn start_here(&self, program: &Program, arguments: &[OsString], environment: &[(&str, OsString)]) -> Result<End> {
        let mut command = Command::new(&program.executable);
        command.args(arguments).current_dir(&program.directory).stdin(Stdio::null());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.executable.display()))?;
        let status = run_command(&mut child, self.signals)?;
        let code = status.and_then(|status| u8::try_from(status.code()?).ok());
        Ok(match self.signals.caught() {
            Some(signal) => End::Interrupted(signal),
            None => End::Exited(code.unwrap_or(u8::MAX)),
        })
    }
}

/// Returns a line with the slowest tests, which users can leave out to shorten a run.
fn longest(done: &Done) -> String {
    let tests = done.longest(LONGEST).into_iter();
    let words: Vec<_> = tests.map(|(test, time)| format!("{test} {:.0} s", time.as_secs_f64())).collect();
    if words.is_empty() { String::new() } else { format!("longest tests: {}\n\n", words.join(", ")) }
}

/// Returns the failures and the result line that the test program could not print, because its machine died or was stopped.
fn unprinted(record: &Record, before: &Done, gave_up: bool, time: Duration) -> String {
    let result = result_line(before, &record.done(), gave_up, time);
    format!("{}{result}", new_part(&record.failures(), before))
}

/// Returns the part of `failures` that the newest machine has recorded. The failures of earlier machines precede this part, and
/// `before` contains their number.
fn new_part(failures: &str, before: &Done) -> String {
    let sections = failures.split_inclusive('\n').filter(|line| line.starts_with("---- ")).count();
    let known = before.count(Outcome::Failed);
    if sections <= known {
        return String::new();
    }
    let start =
        failures.match_indices("---- ").filter(|(at, _)| *at == 0 || failures[..*at].ends_with('\n')).nth(known);
    start.map(|(at, _)| format!("failures:\n\n{}\n", &failures[at..])).unwrap_or_default()
}

/// Returns the result line of a machine that died, in the format of a normal result. If `gave_up` is true, the interrupted test
/// counts as failed.
fn result_line(before: &Done, done: &Done, gave_up: bool, time: Duration) -> String {
    let of = |outcome| done.count(outcome).saturating_sub(before.count(outcome));
    let failed = of(Outcome::Failed) + usize::from(gave_up);
    let word = if failed == 0 { "ok" } else { "FAILED" };
    format!(
        "test result: {word}. {} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out; finished in {:.2}s\n\n",
        of(Outcome::Passed),
        time.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs;
    use std::io::Write;

    use super::*;

    fn done(text: &str) -> Done {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::new(&dir.path().join("record"));
        fs::write(record.path(), text).unwrap();
        record.done()
    }

    fn program() -> Program {
        Program { name: "guest".into(), directory: "/".into(), executable: "/guest".into() }
    }

    #[test]
    fn finished_tests_of_an_earlier_run_run_again() {
        let out = tempfile::tempdir().unwrap();
        let (signals, progress) = (Signals::default(), Progress::new("test"));
        let limits = Limits { time: Duration::ZERO, silence: Duration::ZERO };
        for _run in 0..2 {
            let mut suites = Suites::new(out.path(), limits, &signals, &progress);
            suites.machine = Box::new(|options| {
                let prefix = format!("{}=", Record::VARIABLE);
                let record = options.env.iter().find_map(|item| item.strip_prefix(&prefix)).unwrap();
                assert_eq!(Record::new(Path::new(record)).done(), Done::default());
                fs::write(record, "passed a 0\n").unwrap();
                Ok(End::Exited(0))
            });
            for _program in 0..2 {
                suites.run(&program(), Place::Rig(Kernel::Debian), &[], false).unwrap();
            }
        }
    }

    /// Runs tests in machines. Each pair contains the lines that a machine records, and the way in which this machine ends.
    /// Returns the number of started machines, the number of dead machines, and true if all tests passed.
    fn run_in(machines: &[(&str, End)]) -> (usize, usize, bool) {
        let out = tempfile::tempdir().unwrap();
        let (signals, progress) = (Signals::default(), Progress::new("test"));
        let limits = Limits { time: Duration::ZERO, silence: Duration::ZERO };
        let mut suites = Suites::new(out.path(), limits, &signals, &progress);
        let started = Cell::new(0);
        suites.machine = Box::new(|options| {
            let (lines, end) = machines[started.replace(started.get() + 1)];
            let prefix = format!("{}=", Record::VARIABLE);
            let record = options.env.iter().find_map(|item| item.strip_prefix(&prefix)).unwrap();
            let file = fs::File::options().create(true).append(true).open(record);
            file.unwrap().write_all(lines.as_bytes()).unwrap();
            Ok(end)
        });
        suites.run(&program(), Place::Rig(Kernel::Debian), &[], false).unwrap();
        let (died, passed) = (suites.died, suites.passed());
        drop(suites);
        (started.get(), died, passed)
    }

    #[test]
    fn run_continues_in_a_new_machine_after_a_death() {
        let first = ("started a 0\npassed a 0\nstarted b 0\n", End::Died);
        assert_eq!(run_in(&[first, ("started b 0\npassed b 0\n", End::Exited(0))]), (2, 1, true));
        assert_eq!(run_in(&[first, ("started b 0\nfailed b 0\n", End::Exited(101))]), (2, 1, false));
        assert_eq!(
            run_in(&[("started a 0\n", End::Died), ("started a 0\npassed a 0\n", End::Exited(0))]),
            (2, 1, true)
        );
        assert_eq!(run_in(&[("started a 0\nfailed a 0\n", End::Died), ("", End::Exited(0))]), (2, 1, false));
    }

    #[test]
    fn run_ends_after_two_deaths_in_the_same_test() {
        let same = ("started b 0\n", End::Died);
        assert_eq!(run_in(&[("passed a 0\nstarted b 0\n", End::Died), same]), (2, 2, false));
        assert_eq!(run_in(&[("", End::Died)]), (1, 1, false));
    }

    #[test]
    fn dead_machine_result_line_counts_only_its_own_tests() {
        let before = done("passed a 0\nfailed b 0\n");
        let after = done("passed a 0\nfailed b 0\npassed c 0\npassed d 0\nstarted e 0\n");
        let line = result_line(&before, &after, false, Duration::from_millis(1500));
        let expected =
            "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.50s\n\n";
        assert_eq!(line, expected);
        assert!(
            result_line(&Done::default(), &after, false, Duration::ZERO)
                .starts_with("test result: FAILED. 3 passed; 1 failed;")
        );
    }

    #[test]
    fn test_that_ends_two_machines_is_counted_as_failed() {
        let same = done("passed a 0\nstarted b 0\n");
        assert!(
            result_line(&same, &same, true, Duration::ZERO).starts_with("test result: FAILED. 0 passed; 1 failed;")
        );
    }

    #[test]
    fn longest_tests_are_named_with_their_time() {
        assert_eq!(longest(&done("passed a 1400\nfailed b 61000\n")), "longest tests: b 61 s, a 1 s\n\n");
        assert_eq!(longest(&Done::default()), "");
    }

    #[test]
    fn stopped_machine_reports_failures_and_fails_current_test() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::new(&dir.path().join("record"));
        fs::write(record.path(), "passed a 0\nfailed b 0\nstarted c 0\n").unwrap();
        fs::write(dir.path().join("record.failures"), "---- b ----\nwhy\n").unwrap();
        let printed = unprinted(&record, &Done::default(), true, Duration::ZERO);
        assert!(printed.contains("---- b ----\nwhy"), "{printed}");
        assert!(printed.contains("FAILED. 1 passed; 2 failed"), "{printed}");
    }

    #[test]
    fn failures_are_shown_once() {
        let failures = "---- a ----\nfirst ---- x\n---- b ----\nsecond\n";
        assert_eq!(new_part(failures, &Done::default()), format!("failures:\n\n{failures}\n"));
        assert_eq!(new_part(failures, &done("failed a 0\n")), "failures:\n\n---- b ----\nsecond\n\n");
        assert_eq!(new_part(failures, &done("failed a 0\nfailed b 0\n")), "");
        assert_eq!(new_part("", &Done::default()), "");
    }
}
