// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Each role of a thread, held to its system calls, in a process of its own.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::process::{Command, Output};

use devices::crash;
use devices::sandbox::{self, Mode as Filtered, Role, ThreadRole};
use rustix::fs::{Mode, OFlags};
use vmm::thread_roles::{CONTROL, all};

const ROLE: &str = "CAROM_TEST_ROLE";
const MODE: &str = "CAROM_TEST_MODE";
const WORK: &str = "CAROM_TEST_WORK";
/// File for reports, if there is one.
const REPORTS: &str = "CAROM_TEST_REPORTS";

/// The role of the thread that starts the others, and its name.
const STARTER: &str = "threads";

/// Runs `work` in a thread of `role`, in a process whose calls are filtered.
fn run(role: &str, mode: &str, work: &str) -> Output {
    command(role, mode, work).output().unwrap()
}

fn command(role: &str, mode: &str, work: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "process_with_a_thread_of_a_role", "--nocapture"]);
    command.env(ROLE, role).env(MODE, mode).env(WORK, work).env("RUST_BACKTRACE", "1");
    command
}

/// No test of its own: the others start it as a process, and say by variables what it is to do.
#[test]
fn process_with_a_thread_of_a_role() {
    let Ok(mode) = std::env::var(MODE) else { return };
    let mode = match mode.as_str() {
        "log" => Filtered::Log,
        "errno" => Filtered::Refuse,
        _ => Filtered::Stop,
    };
    let work = match std::env::var(WORK).unwrap().as_str() {
        "forbidden" => forbidden,
        "open" => open,
        "fault" => fault,
        "nothing" => || {},
        _ => ordinary,
    };
    let role = std::env::var(ROLE).unwrap();
    if let Some(path) = std::env::var_os(REPORTS) {
        crash::leave_reports_in(File::create(path).unwrap()).unwrap();
    }
    if std::env::var(MODE).unwrap() != "false" {
        sandbox::begin(mode, &all()).unwrap();
    }
    sandbox::confine(CONTROL).unwrap();
    if role == CONTROL.name {
        return work();
    }
    if role == STARTER {
        return in_starter(work);
    }
    let role = *all().iter().find(|known| known.name == role).unwrap();
    sandbox::start(role, "test".into(), work).unwrap().join().unwrap();
}

/// Has the thread that starts others do `work`, though it runs nothing of its own for anybody: it drops what a thread was to run that cannot be
/// started, and here the end of that is the work.
fn in_starter(work: fn()) {
    struct AtItsEnd(fn());
    impl Drop for AtItsEnd {
        fn drop(&mut self) {
            self.0();
        }
    }
    let work = AtItsEnd(work);
    let nobodys = ThreadRole { name: "nobody's", calls: &[] };
    let refused = sandbox::start(nobodys, "test".into(), move || drop(work)).unwrap_err();
    assert!(refused.to_string().contains("no thread can have the role"), "{refused}");
}

/// No thread begins a session.
fn forbidden() {
    eprintln!("it was: {:?}", rustix::process::setsid());
}

/// Runs out of its stack.
fn fault() {
    fn deeper(depth: u64) -> u64 {
        let room = std::hint::black_box([depth; 1000]);
        if depth == 0 { 0 } else { deeper(depth + 1) + room[999] }
    }
    eprintln!("it was: {}", deeper(1));
}

/// By either call that there is for it.
fn open() {
    let by_path = rustix::fs::open("/dev/null", OFlags::RDONLY, Mode::empty()).map_err(std::io::Error::from);
    let opened = File::open("/dev/null").and(by_path.map(drop));
    eprintln!("it was: {:?}", opened.map_err(|error| error.kind()));
}

/// What any thread may come to do: allocate, look at the time, wait, panic, start another.
fn ordinary() {
    let many: Vec<Vec<u8>> = (1..200).map(|len| vec![1; len * 1000]).collect();
    std::thread::sleep(std::time::Duration::from_millis(1));
    let panicked =
        std::panic::catch_unwind(|| assert!(std::time::Instant::now().elapsed().is_zero(), "{}", many.len()));
    drop(many);
    // That thread would wait for itself.
    if std::thread::current().name() != Some(STARTER) {
        sandbox::start(Role::Rng.thread(), "another".into(), || eprintln!("another one")).unwrap().join().unwrap();
    }
    eprintln!("it did: {}", panicked.is_err());
}

fn every_role() -> impl Iterator<Item = &'static str> {
    all().into_iter().map(|role| role.name).chain([CONTROL.name, STARTER])
}

#[test]
fn call_that_a_role_does_not_have_ends_the_process_with_a_message() {
    for role in every_role() {
        let output = run(role, "true", "forbidden");
        let text = String::from_utf8_lossy(&output.stderr);
        let message = format!("carom: a thread of role '{role}' made system call setsid (112), which");
        assert!(text.contains(&message) && !text.contains("it was"), "{role}: {text}");
        assert_eq!(output.status.code(), Some(1), "{role}");
    }
}

#[test]
fn ordinary_work_and_a_panic_with_its_trace_are_for_every_role() {
    for role in every_role() {
        let output = run(role, "true", "ordinary");
        let text = String::from_utf8_lossy(&output.stderr);
        let started = role == STARTER || text.contains("another one");
        assert!(output.status.success() && started && text.contains("it did: true"), "{role}: {text}");
    }
}

#[test]
fn file_is_opened_by_a_thread_whose_role_it_is_and_by_no_other() {
    for role in every_role() {
        let output = run(role, "true", "open");
        // The one that starts threads may what any of them may.
        let opens = [CONTROL.name, Role::WindowReader.name(), STARTER].contains(&role);
        let expected = if opens { "it was: Ok" } else { "it was: Err(PermissionDenied)" };
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(expected), "{role}: {text}");
    }
}

#[test]
fn call_is_made_where_it_is_only_logged_and_fails_where_it_is_refused() {
    for (mode, expected) in [("log", "it was: Ok"), ("errno", "it was: Err(Os { code: 1")] {
        let output = run("rng", mode, "forbidden");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(expected), "{mode}: {text}");
    }
}

/// What is left of a thread of `role` that did `work`: the report, and what was written to standard error.
fn report(role: &str, mode: &str, work: &str) -> (String, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = command(role, mode, work).env(REPORTS, file.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (std::fs::read_to_string(file.path()).unwrap(), said)
}

#[test]
fn report_says_which_thread_of_which_role_crashed_and_why() {
    let version = concat!("report of a crash, form 1\nversion: carom ", env!("CARGO_PKG_VERSION"), "\n");
    for role in every_role() {
        for (work, cause) in [
            ("forbidden", "cause: system call setsid (112) with "),
            ("fault", "cause: SIGSEGV (code "),
            ("ordinary", "cause: panic at vmm/tests/sandbox.rs:"),
        ] {
            let (report, said) = report(role, "true", work);
            assert!(report.starts_with(version), "{role}, {work}: {report} {said}");
            assert!(
                report.contains(cause) && report.contains(&format!(" (role {role})\n")),
                "{role}, {work}: {report}"
            );
            let thread = if role == STARTER { "thread: threads " } else { "thread: test " };
            assert!(role == CONTROL.name || report.contains(thread), "{role}, {work}: {report}");
            assert!(report.ends_with("end of the report\n"), "{role}, {work}: {report}");
            assert_eq!(report.matches(version).count(), 1, "{role}, {work}: {report}");
        }
    }
    assert_eq!(report("rng", "true", "nothing").0, "");
    assert!(report("rng", "false", "fault").0.contains(" (role rng)\n"));
}
