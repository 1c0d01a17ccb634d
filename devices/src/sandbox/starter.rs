// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Starter thread, which starts all other threads once system calls are filtered.

use std::collections::HashMap;
use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::{Builder, JoinHandle};

use landlock::RulesetCreated;
use seccompiler::SeccompAction;

use super::call::ThreadRole;
use super::filter::Filter;
use super::host_cpus::{HostCpus, PinError, Placement};
use super::trap;
use crate::crash;

/// Effect of a call that a thread's role does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The call ends the process.
    Stop,
    /// The call fails.
    Refuse,
    /// The kernel executes the call, and logs it.
    Log,
}

impl Mode {
    fn action(self) -> SeccompAction {
        match self {
            Self::Stop => SeccompAction::Trap,
            Self::Refuse => SeccompAction::Errno(libc::EPERM.cast_unsigned()),
            Self::Log => SeccompAction::Log,
        }
    }
}

/// First part of a thread's work, which runs before the thread is filtered. The first part returns the second part, which runs after the
/// thread is filtered.
type Prepare = Box<dyn FnOnce() -> Box<dyn FnOnce()> + Send>;

/// Request to start a thread.
struct Job {
    role: ThreadRole,
    name: String,
    placement: Placement,
    prepare: Prepare,
    answer: Sender<io::Result<Started>>,
}

/// Started thread, and a channel that delivers the result of installing the thread's filter.
struct Started {
    thread: JoinHandle<()>,
    filtered: Receiver<io::Result<()>>,
}

/// Order for the starter thread.
enum Order {
    Start(Box<Job>),
    /// Apply these rules to the starter thread, and to all threads that it starts from now on.
    LimitFiles(RulesetCreated, Sender<io::Result<()>>),
}

/// Stack size of a thread, in bytes. The size is below Rust's default of 2 MiB. If a stack of 2 MiB happened to be aligned, the host could
/// allocate a whole huge page at the first access, which wastes memory.
const STACK_BYTES: usize = (2 << 20) - (64 << 10);

static STARTER: OnceLock<(Mode, Sender<Order>)> = OnceLock::new();

/// Filters the system calls of all threads that are started from now on. The roles of these threads must be in `roles`. Call this function
/// once, from the first thread, before other threads exist. [`confine`] filters the first thread itself.
///
/// # Errors
/// The kernel rejects the filter.
pub fn begin(mode: Mode, roles: &[ThreadRole]) -> io::Result<()> {
    trap::watch()?;
    let starter = Filter::of_starter(roles, mode.action());
    let known: Vec<&'static str> = roles.iter().map(|role| role.name).collect();
    let (orders, to_do) = channel();
    let (sender, receiver) = sync_channel(1);
    let run = move || {
        crash::set_role("threads");
        let installed = starter.install();
        let is_installed = installed.is_ok();
        // The receiver is missing only if the process is ending.
        let _ = sender.send(installed);
        if is_installed {
            serve(&to_do, mode, &known);
        }
    };
    // The starter thread runs until the process ends, because other threads may be started at any time.
    named("threads".into()).spawn(run)?;
    receiver.recv().map_err(io::Error::other)??;
    STARTER.set((mode, orders)).map_err(|_| io::Error::other("system calls are filtered already"))
}

/// Returns a builder for a thread. Removes NULs from the name, because the library panics at them.
fn named(name: String) -> Builder {
    let name = if name.contains('\0') { name.replace('\0', "") } else { name };
    Builder::new().name(name).stack_size(STACK_BYTES)
}

/// If [`begin`] was called, filters the system calls of this thread, whose role is `own`. Call this function once in a thread.
///
/// # Errors
/// The kernel rejects the filter.
pub fn confine(own: ThreadRole) -> io::Result<()> {
    crash::set_role(own.name);
    let Some((mode, _)) = STARTER.get() else { return Ok(()) };
    Filter::of(&own, mode.action()).install()
}

/// Starts a thread of `role`, called `name`, which runs `run`.
///
/// # Errors
/// The host cannot create a thread, or the kernel rejects its filter.
pub fn start(role: ThreadRole, name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Ok(start_on(role, name, None, run)?)
}

/// Like [`start`], but pins the thread to `cpus`. Threads that the pinned thread starts are not pinned.
///
/// # Errors
/// The host cannot create a thread, the kernel rejects its filter, or a CPU cannot be used.
pub fn start_on(
    role: ThreadRole,
    name: String,
    cpus: Option<HostCpus>,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, PinError> {
    start_prepared(role, name, cpus, move || run)
}

/// Starts a thread that first runs `prepare`, with the filter of the starter thread. Then the thread runs the result of `prepare`, with the
/// filter of `role`.
///
/// # Errors
/// The errors of [`start_on`].
pub fn start_prepared<R: FnOnce() + 'static>(
    role: ThreadRole,
    name: String,
    cpus: Option<HostCpus>,
    prepare: impl FnOnce() -> R + Send + 'static,
) -> Result<JoinHandle<()>, PinError> {
    let (placement, placed) = Placement::new(cpus);
    let prepare: Prepare = Box::new(move || Box::new(prepare()));
    let thread = start_placed(role, name, placement, prepare).map_err(PinError::Host)?;
    placed.map_or(Ok(()), |placed| placed.recv().map_err(|_| PinError::Host(gone()))?)?;
    Ok(thread)
}

/// Checks that a thread of `role` can be pinned to all of `cpus`. For this check, starts a thread that does nothing.
///
/// # Errors
/// A CPU cannot be used, or the host cannot create a thread.
pub fn check_host_cpus(role: ThreadRole, cpus: HostCpus) -> Result<(), PinError> {
    let ended = start_on(role, "host-cpus".into(), Some(cpus), || {})?.join();
    ended.map_err(|_| PinError::Host(io::Error::other("the thread that checks the CPUs panicked")))
}

fn start_placed(role: ThreadRole, name: String, placement: Placement, prepare: Prepare) -> io::Result<JoinHandle<()>> {
    let Some((_, starter)) = STARTER.get() else {
        return named(name).spawn(move || {
            crash::set_role(role.name);
            if placement.take() {
                prepare()();
            }
        });
    };
    let (answer, answered) = channel();
    let job = Job { role, name, placement, prepare, answer };
    starter.send(Order::Start(Box::new(job))).map_err(|_| gone())?;
    let Started { thread, filtered } = answered.recv().map_err(|_| gone())??;
    match filtered.recv() {
        Ok(Err(error)) => {
            let text = format!(
                "the host kernel rejected the system call filter of thread role '{}': {error}; --seccomp false turns the filters off",
                role.name
            );
            Err(io::Error::new(error.kind(), text))
        }
        // If the thread ended before it sent the result of installing the filter, the thread could not be pinned. The channel `placed` in
        // `start_prepared` has the reason.
        Ok(Ok(())) | Err(_) => Ok(thread),
    }
}

/// Applies `rules` to the starter thread, if it exists.
pub(super) fn limit_files(rules: &RulesetCreated) -> io::Result<()> {
    let Some((_, starter)) = STARTER.get() else { return Ok(()) };
    let (answer, answered) = channel();
    starter.send(Order::LimitFiles(rules.try_clone()?, answer)).map_err(|_| gone())?;
    answered.recv().map_err(|_| gone())?
}

fn gone() -> io::Error {
    io::Error::other("the thread that starts all other threads has ended")
}

fn serve(orders: &Receiver<Order>, mode: Mode, known: &[&str]) {
    // Filters by role. The filter of a role is created when the first thread of the role starts.
    let mut made = HashMap::new();
    for order in orders {
        let Job { role, name, placement, prepare, answer } = match order {
            Order::Start(job) => *job,
            Order::LimitFiles(rules, answer) => {
                // Ignore an error. The requester waits for the result, so the channel is open.
                let _ = answer.send(rules.restrict_self().map(drop).map_err(io::Error::other));
                continue;
            }
        };
        let filter = match made.get(role.name) {
            Some(filter) => Ok(Filter::clone(filter)),
            None if !known.contains(&role.name) => Err(io::Error::other(format!(
                "no thread can have the role '{}': pass the role to sandbox::begin()",
                role.name
            ))),
            None => {
                let filter = Filter::of(&role, mode.action());
                made.insert(role.name, filter.clone());
                Ok(filter)
            }
        };
        let started = filter.and_then(|filter| start_filtered(role, name, filter, placement, prepare));
        // Ignore an error. The requester waits for the result, so the channel is open.
        let _ = answer.send(started);
    }
}

/// Starts the thread. The thread runs the result of `prepare` only after the kernel has accepted the thread's filter. The caller of
/// [`start_prepared`] waits until the filter is installed. The starter thread does not wait, so it can start other threads meanwhile.
fn start_filtered(
    role: ThreadRole,
    name: String,
    filter: Filter,
    placement: Placement,
    prepare: Prepare,
) -> io::Result<Started> {
    let (sender, filtered) = sync_channel(1);
    let thread = named(name).spawn(move || {
        crash::set_role(role.name);
        // Pin the thread before its filter is installed, because the filter does not allow sched_setaffinity(2).
        if !placement.take() {
            return;
        }
        let run = prepare();
        let installed = filter.install();
        let is_installed = installed.is_ok();
        drop(filter);
        // Ignore an error. The requester waits for the result, so the channel is open.
        let _ = sender.send(installed);
        drop(sender);
        if is_installed {
            run();
        }
    })?;
    Ok(Started { thread, filtered })
}
