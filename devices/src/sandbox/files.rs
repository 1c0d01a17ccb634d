// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which files threads may reach (Landlock), and that they reach no other process by a signal or an abstract socket.
//!
//! A thread hands its limits on to those that it starts, and can have more of them, never less.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, Erratum, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope,
};

use super::starter;

/// Whether the threads that open files are limited.
static LIMITED: AtomicBool = AtomicBool::new(false);

/// What is refused unless a rule allows it, as far as the host's kernel knows it: all that Linux 6.10 has.
pub fn known_accesses() -> BitFlags<AccessFs> {
    AccessFs::from_all(ABI::V5)
}

/// Scopes to limit threads to, from Linux 6.12 on: no abstract socket that another program made, no signal to another process. `fixed`
/// are errors that the host's kernel has no more. One of them refuses signals between threads of one process that were limited
/// separately, such as a vCPU and the thread that stops it.
fn scopes(fixed: BitFlags<Erratum>) -> BitFlags<Scope> {
    let sockets = Scope::AbstractUnixSocket;
    if fixed.contains(Erratum::ScopedSignalHandling) { sockets | Scope::Signal } else { sockets.into() }
}

/// Rules that allow nothing yet.
///
/// # Errors
/// The host's kernel has no Landlock.
pub fn no_files() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(known_accesses())?
        .scope(scopes(Erratum::current()))?
        .create()
        // The process gave up privileges when it started; a filter may refuse the call.
        .map(|rules| rules.no_new_privs(false))
}

/// Has the kernel hold this thread to `rules`, all threads that are started from now on, and those that these start.
///
/// # Errors
/// The kernel does not take them: a thread has 16 sets of rules at most. Nothing has changed for this thread then.
pub fn limit_files(rules: RulesetCreated) -> io::Result<()> {
    starter::limit_files(&rules)?;
    rules.restrict_self().map_err(io::Error::other)?;
    LIMITED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether threads are limited by [`limit_files`].
pub fn files_are_limited() -> bool {
    LIMITED.load(Ordering::Relaxed)
}

/// Gives up all files that this thread has not open already, other processes and their abstract sockets, if the kernel can. It is for threads that need none, and are there before the
/// limits of others are known.
pub fn give_up_files() {
    if let Err(error) = no_files().and_then(RulesetCreated::restrict_self) {
        log::debug!("the kernel keeps no files from this thread: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::process::{Command, Stdio};
    use std::sync::mpsc::channel;
    use std::thread;

    use rustix::process::{Pid, test_kill_process};
    use rustix::thread::set_no_new_privs;
    use vmm_sys_util::signal::{Killable, register_signal_handler};

    use super::*;

    /// True if the host's kernel has both scopes, and keeps signals within a process apart from those to others.
    fn host_has_scopes() -> bool {
        let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement).scope(Scope::Signal);
        rules.and_then(|rules| rules.create()).is_ok() && Erratum::current().contains(Erratum::ScopedSignalHandling)
    }

    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

    #[test]
    fn limited_thread_reaches_its_own_process_and_no_other() {
        if !host_has_scopes() {
            eprintln!("not tested: the host's kernel has no scopes");
            return;
        }
        let name = format!("carom-scopes-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        let mut other = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let id = Pid::from_child(&other);
        let number = libc::SIGRTMIN();
        register_signal_handler(number, nothing).unwrap();

        let (end, wait) = channel::<()>();
        let sibling = thread::spawn(move || wait.recv());
        let signalled = move || test_kill_process(id).map_err(|error| io::Error::from(error).kind());
        let reached = move || (signalled(), UnixStream::connect_addr(&address));
        let limited = thread::spawn(move || {
            assert!(matches!(reached(), (Ok(()), Ok(_))));
            set_no_new_privs(true).unwrap();
            no_files().unwrap().restrict_self().unwrap();
            let (signal, socket) = reached();
            assert_eq!(signal, Err(ErrorKind::PermissionDenied));
            assert_eq!(socket.unwrap_err().kind(), ErrorKind::PermissionDenied);
            sibling.kill(number).unwrap();
            end.send(()).unwrap();
            sibling.join().unwrap().unwrap();
        });
        let result = limited.join();
        drop(other.stdin.take());
        other.wait().unwrap();
        result.unwrap();
    }

    #[test]
    fn kernel_that_confuses_signals_scopes_sockets_only() {
        assert_eq!(scopes(BitFlags::EMPTY), Scope::AbstractUnixSocket);
        assert_eq!(scopes(Erratum::TcpSocketIdentification.into()), Scope::AbstractUnixSocket);
        assert_eq!(scopes(BitFlags::from(ABI::V6)), Scope::AbstractUnixSocket | Scope::Signal);
    }
}
