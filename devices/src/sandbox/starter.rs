// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread that starts all others, once calls are filtered.

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

/// What becomes of a call that a thread's role does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It ends the process.
    Stop,
    /// It fails.
    Refuse,
    /// It is made, and the kernel's log tells of it.
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

/// Work of a thread before it is filtered, which returns its work after that.
type Prepare = Box<dyn FnOnce() -> Box<dyn FnOnce()> + Send>;

/// A thread to be started.
struct Job {
    role: ThreadRole,
    name: String,
    placement: Placement,
    prepare: Prepare,
    answer: Sender<io::Result<Started>>,
}

/// A thread that was started, and what becomes of its filter.
struct Started {
    thread: JoinHandle<()>,
    filtered: Receiver<io::Result<()>>,
}

/// What the thread is to do.
enum Order {
    Start(Box<Job>),
    /// To be held to these rules, as are those that it starts from then on.
    LimitFiles(RulesetCreated, Sender<io::Result<()>>),
}

/// Stack of a thread, in bytes. In one of 2 MiB, Rust's own choice, the host may put a huge page at the first touch where it happens to
/// be aligned: memory that no thread uses.
const STACK_BYTES: usize = (2 << 20) - (64 << 10);

static STARTER: OnceLock<(Mode, Sender<Order>)> = OnceLock::new();

/// Filters the calls of all threads that are started from now on, whose roles are among `roles`. Call it once, as the first thread,
/// before there are others; [`confine`] is for the first thread itself.
///
/// # Errors
/// The kernel takes no filter.
pub fn begin(mode: Mode, roles: &[ThreadRole]) -> io::Result<()> {
    trap::watch()?;
    let starter = Filter::of_starter(roles, mode.action());
    let known: Vec<&'static str> = roles.iter().map(|role| role.name).collect();
    let (orders, to_do) = channel();
    let (tell, told) = sync_channel(1);
    let run = move || {
        crash::set_role("threads");
        let installed = starter.install();
        let is_installed = installed.is_ok();
        // Nobody listens only where the process ends.
        let _ = tell.send(installed);
        if is_installed {
            serve(&to_do, mode, &known);
        }
    };
    // It ends with the process: threads may be started until then.
    named("threads".into()).spawn(run)?;
    told.recv().map_err(io::Error::other)??;
    STARTER.set((mode, orders)).map_err(|_| io::Error::other("calls are filtered already"))
}

/// A thread that is to be started. The library panics at a NUL in a name, so there is none.
fn named(name: String) -> Builder {
    let name = if name.contains('\0') { name.replace('\0', "") } else { name };
    Builder::new().name(name).stack_size(STACK_BYTES)
}

/// Filters the calls of this thread, whose role is `own`, if those of others are. Call it once.
///
/// # Errors
/// The kernel takes no filter.
pub fn confine(own: ThreadRole) -> io::Result<()> {
    crash::set_role(own.name);
    let Some((mode, _)) = STARTER.get() else { return Ok(()) };
    Filter::of(&own, mode.action()).install()
}

/// Starts a thread of `role`, called `name`, which runs `run`.
///
/// # Errors
/// The host gives no thread, or no filter can be made.
pub fn start(role: ThreadRole, name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Ok(start_on(role, name, None, run)?)
}

/// The same for a thread that is to run on `cpus` only. Threads that it starts run where others do.
///
/// # Errors
/// The host gives no thread, no filter can be made, or a CPU cannot be used.
pub fn start_on(
    role: ThreadRole,
    name: String,
    cpus: Option<HostCpus>,
    run: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, PinError> {
    start_prepared(role, name, cpus, move || run)
}

/// Starts a thread that first runs `prepare`, with the calls of the thread that starts others, and then what that returns, with those of
/// `role`.
///
/// # Errors
/// As of [`start_on`].
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

/// Checks that a thread of `role` could run on each of `cpus`, by one that does nothing else.
///
/// # Errors
/// A CPU cannot be used, or the host gives no thread.
pub fn check_host_cpus(role: ThreadRole, cpus: HostCpus) -> Result<(), PinError> {
    let ended = start_on(role, "host-cpus".into(), Some(cpus), || {})?.join();
    ended.map_err(|_| PinError::Host(io::Error::other("a thread that does nothing panicked")))
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
            let text = format!("the kernel takes no filter for a thread of role '{}': {error} (--seccomp)", role.name);
            Err(io::Error::new(error.kind(), text))
        }
        // One that ended without a word was not let go where it was to run: `placed` has why.
        Ok(Ok(())) | Err(_) => Ok(thread),
    }
}

/// Has the thread that starts others, if there is one, held to `rules`.
pub(super) fn limit_files(rules: &RulesetCreated) -> io::Result<()> {
    let Some((_, starter)) = STARTER.get() else { return Ok(()) };
    let (answer, answered) = channel();
    starter.send(Order::LimitFiles(rules.try_clone()?, answer)).map_err(|_| gone())?;
    answered.recv().map_err(|_| gone())?
}

fn gone() -> io::Error {
    io::Error::other("the thread that starts threads has ended")
}

fn serve(orders: &Receiver<Order>, mode: Mode, known: &[&str]) {
    // Made when the first thread of a role comes.
    let mut made = HashMap::new();
    for order in orders {
        let Job { role, name, placement, prepare, answer } = match order {
            Order::Start(job) => *job,
            Order::LimitFiles(rules, answer) => {
                // Whoever asked waits for it.
                let _ = answer.send(rules.restrict_self().map(drop).map_err(io::Error::other));
                continue;
            }
        };
        let filter = match made.get(role.name) {
            Some(filter) => Ok(Filter::clone(filter)),
            None if !known.contains(&role.name) => {
                Err(io::Error::other(format!("no thread can have the role '{}'", role.name)))
            }
            None => {
                let filter = Filter::of(&role, mode.action());
                made.insert(role.name, filter.clone());
                Ok(filter)
            }
        };
        let started = filter.and_then(|filter| start_filtered(role, name, filter, placement, prepare));
        // Whoever asked waits for it.
        let _ = answer.send(started);
    }
}

/// Starts the thread. It runs what `prepare` returns only once the kernel has taken its filter. The caller of [`start_prepared`] waits for
/// that. This thread does not, and starts others meanwhile.
fn start_filtered(
    role: ThreadRole,
    name: String,
    filter: Filter,
    placement: Placement,
    prepare: Prepare,
) -> io::Result<Started> {
    let (tell, filtered) = sync_channel(1);
    let thread = named(name).spawn(move || {
        crash::set_role(role.name);
        // Its filter does not let it go there.
        if !placement.take() {
            return;
        }
        let run = prepare();
        let installed = filter.install();
        let is_installed = installed.is_ok();
        drop(filter);
        // Whoever asked waits for it.
        let _ = tell.send(installed);
        drop(tell);
        if is_installed {
            run();
        }
    })?;
    Ok(Started { thread, filtered })
}
