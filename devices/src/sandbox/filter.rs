// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The filter of a role, as the kernel takes it.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompRule, apply_filter,
};

use super::call::{Call, ThreadRole};
use super::common::{COMMON, REFUSED};
use super::program::{Rules, program};

/// The bits of an `ioctl` request that say whose it is.
const IOCTL_TYPE: u64 = 0xff00;

/// The filter of a thread.
#[derive(Clone, Debug)]
pub(super) struct Filter(BpfProgram);

impl Filter {
    /// That of `role`. Another call is met with `other`.
    pub(super) fn of(role: &ThreadRole, other: SeccompAction) -> io::Result<Self> {
        let mut rules = Rules::new();
        let own = role.calls.iter().copied().flatten();
        for call in COMMON.iter().chain(own).copied() {
            add(&mut rules, call)?;
        }
        let (any, by_arguments): (Rules, Rules) = rules.into_iter().partition(|(_, rules)| rules.is_empty());
        let errno = SeccompAction::Errno(libc::EACCES.cast_unsigned());
        let refused = REFUSED.iter().filter(|number| !by_arguments.contains_key(number));
        let mut fixed: BTreeMap<i64, SeccompAction> = refused.map(|number| (*number, errno.clone())).collect();
        fixed.extend(any.into_keys().map(|number| (number, SeccompAction::Allow)));
        made(&fixed, by_arguments, other)
    }

    /// That of a thread that starts threads of all these roles, and theirs: what it allows is to be cut down by their own.
    pub(super) fn of_starter(roles: &[ThreadRole], other: SeccompAction) -> io::Result<Self> {
        let own = [
            libc::SYS_clone,
            libc::SYS_clone3,
            libc::SYS_sched_setaffinity,
            libc::SYS_seccomp,
            libc::SYS_prctl,
            libc::SYS_landlock_restrict_self,
        ];
        let calls = roles.iter().flat_map(|role| role.calls.iter().copied().flatten()).chain(COMMON);
        let numbers = calls.map(|call| call.number()).chain(own).chain(REFUSED.iter().copied());
        let fixed = numbers.map(|number| (number, SeccompAction::Allow)).collect();
        made(&fixed, Rules::new(), other)
    }

    /// Has the kernel hold this thread to it, and those that it starts.
    pub(super) fn install(&self) -> io::Result<()> {
        apply_filter(&self.0).map_err(failed)
    }
}

fn made(fixed: &BTreeMap<i64, SeccompAction>, rules: Rules, other: SeccompAction) -> io::Result<Filter> {
    program(fixed, rules, other).map(Filter).map_err(|error| failed(Error::Backend(error)))
}

fn failed(error: Error) -> io::Error {
    match error {
        Error::Seccomp(error) | Error::Prctl(error) => error,
        error => io::Error::other(error),
    }
}

fn add(rules: &mut Rules, call: Call) -> io::Result<()> {
    let number = call.number();
    let earlier = rules.get(&number);
    let condition = match call {
        Call::Any(_) => None,
        Call::With(_, index, value) => Some((index, SeccompCmpOp::Eq, u64::from(value))),
        Call::Without(_, index, bits) => Some((index, SeccompCmpOp::MaskedEq(bits.into()), 0)),
        Call::OnItself(_) => Some((0, SeccompCmpOp::Eq, u64::from(std::process::id()))),
        Call::Ioctl(request) => Some((1, SeccompCmpOp::Eq, u64::from(request))),
        Call::IoctlsOf(kind) => Some((1, SeccompCmpOp::MaskedEq(IOCTL_TYPE), u64::from(kind) << 8)),
    };
    let Some((index, op, value)) = condition else {
        rules.insert(number, Vec::new());
        return Ok(());
    };
    if earlier.is_some_and(Vec::is_empty) {
        // With any arguments already.
        return Ok(());
    }
    // The kernel takes 32 bits of these arguments, whatever the others are.
    let condition = SeccompCondition::new(index, SeccompCmpArgLen::Dword, op, value);
    let rule = condition.and_then(|condition| SeccompRule::new(vec![condition]));
    rules.entry(number).or_default().push(rule.map_err(|error| failed(Error::Backend(error)))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Role;
    use crate::sandbox::program::tests::answer;

    #[test]
    fn role_that_opens_no_files_is_refused_them_and_stopped_at_what_it_does_not_have() {
        let Filter(program) = Filter::of(&Role::Rng.thread(), SeccompAction::Trap).unwrap();
        let of = |number: i64| answer(&program, u32::try_from(number).unwrap(), 0);
        assert_eq!(of(libc::SYS_openat), u32::from(SeccompAction::Errno(libc::EACCES.cast_unsigned())));
        assert_eq!(of(libc::SYS_futex), u32::from(SeccompAction::Allow));
        assert_eq!(of(libc::SYS_execve), u32::from(SeccompAction::Trap));
    }

    #[test]
    fn call_with_any_arguments_stays_so_whatever_comes_before_or_after() {
        for calls in [[Call::Ioctl(1), Call::Any(libc::SYS_ioctl)], [Call::Any(libc::SYS_ioctl), Call::IoctlsOf(2)]] {
            let mut rules = Rules::new();
            calls.into_iter().for_each(|call| add(&mut rules, call).unwrap());
            assert_eq!(rules, Rules::from([(libc::SYS_ioctl, Vec::new())]));
        }
    }
}
