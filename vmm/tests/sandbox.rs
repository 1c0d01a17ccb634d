// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the system call filter of each thread role in a separate process.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod filter_page;
mod foreign_calls;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, OnceLock};

use devices::crash;
use devices::host_memory::{Origin, Registration, Supply, missing_memory, register};
use devices::platform::HostRange;
use devices::sandbox::{self, Mode as Filtered, ThreadRole};
use devices::virtio::{block, rng};
use devices::windows;
use foreign_calls::ForeignCall;
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use vm_memory::{FileOffset, MmapRegion};
use vmm::process::thread_roles::CONTROL;
use vmm::vm::thread_roles;

const ROLE: &str = "CAROM_TEST_ROLE";
const MODE: &str = "CAROM_TEST_MODE";
const WORK: &str = "CAROM_TEST_WORK";
/// Variable with the file for crash reports. Without this variable, no reports are written.
const REPORTS: &str = "CAROM_TEST_REPORTS";

/// Variable with the ID of another process.
const OTHER: &str = "CAROM_TEST_OTHER";
/// Variable with the index of the foreign call to make. Without this variable, all calls are made.
const FOREIGN: &str = "CAROM_TEST_FOREIGN";

/// Role of the thread that starts the other threads.
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

/// Not a test by itself: the other tests start a process that runs only this function, and describe its task in environment variables.
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
        "ring" => ring,
        "fault" => fault,
        "foreign" => foreign,
        "lost memory" => {
            lose_huge_page();
            lost_memory
        }
        "nothing" => || {},
        _ => ordinary,
    };
    let role = std::env::var(ROLE).unwrap();
    if let Some(path) = std::env::var_os(REPORTS) {
        crash::leave_reports_in(File::create(path).unwrap()).unwrap();
    }
    if std::env::var(MODE).unwrap() != "false" {
        sandbox::begin(mode, &thread_roles()).unwrap();
    }
    sandbox::confine(CONTROL).unwrap();
    if role == CONTROL.name {
        return work();
    }
    if role == STARTER {
        return in_starter(work);
    }
    let role = *thread_roles().iter().find(|known| known.name == role).unwrap();
    if std::env::var(WORK).unwrap() == "own ring" {
        return sandbox::start_prepared(role, "test".into(), None, own_ring).unwrap().join().unwrap();
    }
    sandbox::start(role, "test".into(), work).unwrap().join().unwrap();
}

/// Runs `work` in the thread that starts the other threads. This thread only starts threads. If it cannot start a thread, it drops the
/// closure of that thread. In this test, dropping the closure runs `work`.
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

/// Makes a call that no role allows: setsid(2), which begins a session.
fn forbidden() {
    eprintln!("it was: {:?}", rustix::process::setsid());
}

/// Makes the calls of [`foreign_calls`], and prints their results.
fn foreign() {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<i32>().unwrap());
    let mut calls = foreign_calls::all(number(OTHER).unwrap());
    if let Some(index) = number(FOREIGN) {
        calls = vec![calls[usize::try_from(index).unwrap()]];
    }
    for call in calls {
        let result = call.make().map_err(|error| error.raw_os_error().unwrap());
        eprintln!("foreign: {}: {result:?}", call.what);
    }
    eprintln!("all calls were made");
}

/// Overflows the stack.
fn fault() {
    fn deeper(depth: u64) -> u64 {
        let room = std::hint::black_box([depth; 1000]);
        if depth == 0 { 0 } else { deeper(depth + 1) + room[999] }
    }
    eprintln!("it was: {}", deeper(1));
}

/// Opens a file with each of the two calls that open files.
fn open() {
    let by_path = rustix::fs::open("/dev/null", OFlags::RDONLY, Mode::empty()).map_err(std::io::Error::from);
    let opened = File::open("/dev/null").and(by_path.map(drop));
    eprintln!("it was: {:?}", opened.map_err(|error| error.kind()));
}

/// Creates an io_uring ring. Returns the kernel's result.
fn make_ring() -> i64 {
    let mut parameters = [0u32; 30];
    // SAFETY: The kernel writes to the parameters, which have the size that it expects.
    unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) }
}

/// Creates an io_uring ring before the thread is filtered. Returns a closure that enters the ring in the filtered thread.
fn own_ring() -> impl FnOnce() {
    let ring = make_ring();
    // SAFETY: The ring has no operations.
    move || eprintln!("it was: {ring}, {}", unsafe { libc::syscall(libc::SYS_io_uring_enter, ring, 0, 0, 0, 0, 0) })
}

/// Creates an io_uring ring. Then enters a ring that does not exist, and registers with that ring.
fn ring() {
    let said = |result: i64| if result >= 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap() };
    let made = said(make_ring());
    // SAFETY: No ring has this number, so the kernel uses no memory.
    let entered = said(unsafe { libc::syscall(libc::SYS_io_uring_enter, -1, 0, 0, 0, 0, 0) });
    // SAFETY: As above.
    let registered = said(unsafe { libc::syscall(libc::SYS_io_uring_register, -1, 0, 0, 0) });
    eprintln!("it was: {:?}", [made, entered, registered].map(|error| error == libc::EPERM));
}

/// Registers two pages as memory that consists of huge pages. The file has no data for the second page, as if the host had no free
/// huge page.
fn lose_huge_page() {
    static KEPT: OnceLock<(MmapRegion, Registration)> = OnceLock::new();
    const LEN: usize = 2 * 4096;
    let file = File::from(memfd_create("huge", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&[1; LEN], 0).unwrap();
    file.set_len(2 * LEN as u64).unwrap();
    let mapped = MmapRegion::from_file(FileOffset::new(file.try_clone().unwrap(), 0), LEN).unwrap();
    let range = HostRange { address: mapped.as_ptr().addr(), len: LEN };
    let name = "zone 'huge'".into();
    let origin = Origin { name, supply: Supply::HugePages, file: Some(Arc::new(file)), offset: 0, gpa: None };
    assert!(KEPT.set((mapped, register(range, origin))).is_ok());
}

/// Prints a description of the memory that the host has lost.
fn lost_memory() {
    eprintln!("it was: {:?}", missing_memory());
}

/// Does all that every thread may do: allocates memory, reads the time, waits, panics, and starts another thread.
fn ordinary() {
    let many: Vec<Vec<u8>> = (1..200).map(|len| vec![1; len * 1000]).collect();
    std::thread::sleep(std::time::Duration::from_millis(1));
    let panicked =
        std::panic::catch_unwind(|| assert!(std::time::Instant::now().elapsed().is_zero(), "{}", many.len()));
    drop(many);
    // Here, the thread that starts the other threads cannot start one more, because it would wait for itself.
    if std::thread::current().name() != Some(STARTER) {
        sandbox::start(rng::ROLE, "another".into(), || eprintln!("another one")).unwrap().join().unwrap();
    }
    eprintln!("it did: {}", panicked.is_err());
}

fn every_role() -> impl Iterator<Item = &'static str> {
    thread_roles().into_iter().map(|role| role.name).chain([CONTROL.name, STARTER])
}

#[test]
fn forbidden_call_ends_the_process_naming_role_and_call() {
    for role in every_role() {
        let output = run(role, "true", "forbidden");
        let text = String::from_utf8_lossy(&output.stderr);
        let message = format!("carom: a thread of role '{role}' made system call setsid (112), which");
        assert!(text.contains(&message) && !text.contains("it was"), "{role}: {text}");
        assert_eq!(output.status.code(), Some(1), "{role}");
    }
}

#[test]
fn every_role_may_do_ordinary_work_and_panic_with_a_trace() {
    for role in every_role() {
        let output = run(role, "true", "ordinary");
        let text = String::from_utf8_lossy(&output.stderr);
        let started = role == STARTER || text.contains("another one");
        assert!(output.status.success() && started && text.contains("it did: true"), "{role}: {text}");
    }
}

#[test]
fn missing_huge_page_is_named_by_every_role() {
    for role in every_role() {
        let output = run(role, "true", "lost memory");
        let text = String::from_utf8_lossy(&output.stderr);
        let is_named = text.contains("zone 'huge'; no huge page is free");
        assert!(output.status.success() && is_named, "{role}: {text}");
    }
}

#[test]
fn only_roles_that_open_files_can_open_a_file() {
    for role in every_role() {
        let output = run(role, "true", "open");
        // The thread that starts the other threads may make the calls of every role.
        let opens = [CONTROL.name, windows::READER_ROLE.name, STARTER].contains(&role);
        let expected = if opens { "it was: Ok" } else { "it was: Err(PermissionDenied)" };
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(expected), "{role}: {text}");
    }
}

/// Only threads of disks may use rings, because filters cannot see the operations of a ring.
#[test]
fn no_role_makes_rings_and_threads_of_disks_use_theirs() {
    if make_ring() < 0 {
        return eprintln!("not tested: the host does not allow io_uring");
    }
    for role in every_role() {
        let output = run(role, "errno", "ring");
        // A thread of a disk creates its ring before it is filtered, with the calls of the thread that starts it.
        let [setup, enter, register] = match role {
            STARTER => [false; 3],
            _ if role == block::ROLE.name => [true, false, true],
            _ => [true; 3],
        };
        let text = String::from_utf8_lossy(&output.stderr);
        let expected = format!("it was: {:?}", [setup, enter, register]);
        assert!(output.status.success() && text.contains(&expected), "{role}: {text}");
    }
    let output = run(block::ROLE.name, "true", "own ring");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("it was: ") && !text.contains("-1"), "{text}");
}

#[test]
fn forbidden_call_succeeds_in_log_mode_and_fails_in_errno_mode() {
    for (mode, expected) in [("log", "it was: Ok"), ("errno", "it was: Err(Os { code: 1")] {
        let output = run("rng", mode, "forbidden");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(expected), "{mode}: {text}");
    }
}

/// Process that waits until its standard input ends.
struct Other(std::process::Child);

impl Other {
    fn start() -> Self {
        Self(Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap())
    }

    /// Makes foreign calls to this process from a thread of `role`: the call at `index`, or all calls.
    fn reached(&self, role: &str, mode: &str, index: Option<usize>) -> Output {
        let mut command = command(role, mode, "foreign");
        command.env(OTHER, self.0.id().to_string());
        index.map(|index| command.env(FOREIGN, index.to_string()));
        command.output().unwrap()
    }

    fn calls(&self) -> Vec<ForeignCall> {
        foreign_calls::all(i32::try_from(self.0.id()).unwrap())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn foreign_call_is_refused_to_every_role() {
    let other = Other::start();
    for role in every_role() {
        let output = other.reached(role, "errno", None);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("all calls were made"), "{role}: {text}");
        for call in other.calls() {
            if role == STARTER && call.is_for_starter() {
                continue;
            }
            let refused = format!("foreign: {}: Err({})\n", call.what, libc::EPERM);
            let line = text.lines().find(|line| line.contains(&format!("foreign: {}: ", call.what)));
            assert!(text.contains(&refused), "role {role} may call {}: {line:?}", call.what);
        }
    }
}

/// Only the filters refuse the calls: a process without filters can make all of them.
#[test]
fn foreign_call_without_a_filter_is_made() {
    if !rustix::process::getuid().is_root() {
        eprintln!("not tested: the kernel refuses some of these calls to an ordinary user");
        return;
    }
    let output = Other::start().reached("rng", "false", None);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("all calls were made"), "{text}");
    let refused: Vec<&str> = text.lines().filter(|line| line.ends_with(&format!("Err({})", libc::EPERM))).collect();
    assert_eq!(refused, Vec::<&str>::new());
}

/// Each role makes only a part of the calls. With `CAROM_SANDBOX_ALL`, each role makes all calls.
#[test]
fn foreign_call_ends_the_process() {
    let other = Other::start();
    let (roles, calls) = (every_role().collect::<Vec<_>>(), other.calls());
    let all = std::env::var_os("CAROM_SANDBOX_ALL").is_some();
    for (place, role) in roles.iter().enumerate() {
        for (index, call) in calls.iter().enumerate() {
            if *role == STARTER && call.is_for_starter() || !all && index % roles.len() != place {
                continue;
            }
            let output = other.reached(role, "true", Some(index));
            let text = String::from_utf8_lossy(&output.stderr);
            let message = format!("carom: a thread of role '{role}' made system call ");
            assert!(text.contains(&message) && !text.contains("foreign: "), "{role}: {}: {text}", call.what);
            assert!(text.contains(&format!("({})", call.number)), "{role}: {}: {text}", call.what);
            assert_eq!(output.status.code(), Some(1), "{role}: {}", call.what);
        }
    }
}

/// Runs `work` in a thread of `role`. Returns the crash report and standard error.
fn report(role: &str, mode: &str, work: &str) -> (String, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = command(role, mode, work).env(REPORTS, file.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (std::fs::read_to_string(file.path()).unwrap(), said)
}

#[test]
fn crash_report_names_thread_role_and_cause() {
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

/// With `CAROM_SANDBOX_LIST`, prints the calls in the form of the page's table.
#[test]
fn page_has_the_calls_of_every_role() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/security.md")).unwrap();
    let roles: Vec<ThreadRole> = thread_roles().into_iter().chain([CONTROL]).collect();
    let names = roles.iter().map(|role| role.name).chain([STARTER]).map(str::to_string).collect();
    assert_eq!(filter_page::roles_of_page(&page), names);
    let (code, (reported, wrong)) = (filter_page::of_code(&roles), filter_page::of_page(&page));
    if std::env::var_os("CAROM_SANDBOX_LIST").is_some() {
        code.iter().for_each(|((name, condition), roles)| println!("`{name}` | {condition} | {roles:?}"));
    }
    assert_eq!(wrong, Vec::<String>::new());
    let differ = |one: &filter_page::Calls, other: &filter_page::Calls| -> Vec<String> {
        let missing = one.iter().filter(|(call, roles)| other.get(*call) != Some(*roles));
        missing.map(|((name, condition), roles)| format!("{name} ({condition}): {roles:?}")).collect()
    };
    assert_eq!(differ(&code, &reported), Vec::<String>::new(), "docs/security.md lacks these calls");
    assert_eq!(
        differ(&reported, &code),
        Vec::<String>::new(),
        "docs/security.md has these calls, but the filters do not"
    );
}
