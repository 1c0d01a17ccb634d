// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Limits on the files that threads may access (Landlock), on signals to other processes, and on connections to abstract sockets of other
//! processes.
//!
//! A thread passes its limits on to the threads that it starts. A thread can add limits but not remove them.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, Erratum, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope,
};

use super::starter;

/// True if [`limit_files`] was called.
static LIMITED: AtomicBool = AtomicBool::new(false);

/// Returns the accesses that are denied unless a rule allows them. These are all accesses that Landlock knows in Linux 6.10, as far as the
/// host's kernel supports them.
pub fn known_accesses() -> BitFlags<AccessFs> {
    AccessFs::from_all(ABI::V5)
}

/// Returns the scopes that limit threads. From Linux 6.12 on, a thread cannot connect to another program's abstract socket, and cannot
/// signal another process.
///
/// `fixed` is the set of Landlock bugs that are fixed in the host's kernel. Without the fix of `ScopedSignalHandling`, the kernel denies
/// signals between separately limited threads of one process. For example, another thread could then not stop a vCPU by a signal. So
/// without this fix, the result does not include the scope of signals.
fn scopes(fixed: BitFlags<Erratum>) -> BitFlags<Scope> {
    let sockets = Scope::AbstractUnixSocket;
    if fixed.contains(Erratum::ScopedSignalHandling) { sockets | Scope::Signal } else { sockets.into() }
}

/// Creates rules that deny all known accesses. The caller can add rules that allow accesses.
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
        // Do not set `no_new_privs` again. The process set `no_new_privs` at its start, and the seccomp filter of this thread may not allow
        // the call.
        .map(|rules| rules.no_new_privs(false))
}

/// Applies `rules` to this thread and to all threads that are started from now on.
///
/// # Errors
/// The kernel rejects the rules, for example because a thread can have at most 16 sets of rules. In this case, this thread's limits are
/// unchanged.
pub fn limit_files(rules: RulesetCreated) -> io::Result<()> {
    starter::limit_files(&rules)?;
    rules.restrict_self().map_err(io::Error::other)?;
    LIMITED.store(true, Ordering::Relaxed);
    Ok(())
}

/// True if [`limit_files`] limits threads.
pub fn files_are_limited() -> bool {
    LIMITED.load(Ordering::Relaxed)
}

/// Denies this thread access to files that it has not opened yet, as far as the kernel supports this. Also denies signals to other
/// processes and connections to their abstract sockets. Call this function in a thread that needs none of these rights, and that starts
/// before [`limit_files`] is called.
pub fn give_up_files() {
    if let Err(error) = no_files().and_then(RulesetCreated::restrict_self) {
        log::debug!("the kernel cannot deny this thread access to files (Landlock): {error}");
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

    /// True if the host's kernel has both scopes, and allows signals between separately limited threads of one process.
    fn host_has_scopes() -> bool {
        let rules = Ruleset::default().set_compatibility(CompatLevel::HardRequirement).scope(Scope::Signal);
        rules.and_then(|rules| rules.create()).is_ok() && Erratum::current().contains(Erratum::ScopedSignalHandling)
    }

    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

    #[test]
    fn limited_thread_can_signal_only_its_own_process() {
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
    fn kernel_without_signal_fix_scopes_sockets_only() {
        assert_eq!(scopes(BitFlags::EMPTY), Scope::AbstractUnixSocket);
        assert_eq!(scopes(Erratum::TcpSocketIdentification.into()), Scope::AbstractUnixSocket);
        assert_eq!(scopes(BitFlags::from(ABI::V6)), Scope::AbstractUnixSocket | Scope::Signal);
    }
}
