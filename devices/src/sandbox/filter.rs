// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Seccomp filter of a role.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{BpfProgram, Error, SeccompAction, apply_filter};

use super::call::{Argument, Call, ThreadRole};
use super::common::{COMMON, REFUSED};
use super::program::{Rules, program};

/// Bits of an `ioctl` request that hold its type.
const IOCTL_TYPE: u32 = 0xff00;

/// Calls that the starter thread needs to start and filter a thread, and calls that a new thread makes before it is filtered. For example,
/// disk threads create io_uring rings before they are filtered.
const STARTING: &[Call] = &[
    Call::Any(libc::SYS_io_uring_setup),
    Call::Any(libc::SYS_io_uring_register),
    Call::Any(libc::SYS_ioctl),
    Call::Any(libc::SYS_clone),
    Call::Any(libc::SYS_clone3),
    Call::With(libc::SYS_sched_setaffinity, 0, 0),
    Call::With(libc::SYS_seccomp, 0, libc::SECCOMP_SET_MODE_FILTER),
    Call::With(libc::SYS_prctl, 0, libc::PR_SET_NO_NEW_PRIVS.cast_unsigned()),
    Call::Any(libc::SYS_landlock_restrict_self),
];

/// Seccomp filter of a thread.
#[derive(Clone, Debug)]
pub(super) struct Filter(BpfProgram);

impl Filter {
    /// Creates the filter of `role`. Calls that the role does not allow get the action `other`.
    pub(super) fn of(role: &ThreadRole, other: SeccompAction) -> Self {
        let mut rules = Rules::new();
        let own = role.calls.iter().copied().flatten();
        // The role's own rules come first, so that a vCPU's `ioctl` requests match early.
        for call in own.chain(COMMON).copied() {
            add(&mut rules, call);
        }
        let (any, by_arguments) = apart(rules);
        let errno = SeccompAction::Errno(libc::EACCES.cast_unsigned());
        let refused = REFUSED.iter().filter(|number| !by_arguments.contains_key(number));
        let mut fixed: BTreeMap<i64, SeccompAction> = refused.map(|number| (*number, errno.clone())).collect();
        fixed.extend(any.into_keys().map(|number| (number, SeccompAction::Allow)));
        Self(program(&fixed, &by_arguments, other))
    }

    /// Creates the filter of the starter thread, which starts threads of all these roles. The started threads inherit this filter, and the
    /// filters of their roles limit them further. The starter's filter allows every `ioctl`, because otherwise two filters would check each
    /// `ioctl` request of a vCPU.
    pub(super) fn of_starter(roles: &[ThreadRole], other: SeccompAction) -> Self {
        let mut rules = Rules::new();
        let calls = roles.iter().flat_map(|role| role.calls.iter().copied().flatten());
        for call in calls.chain(COMMON).chain(STARTING).copied() {
            add(&mut rules, call);
        }
        for number in REFUSED {
            rules.entry(*number).or_default();
        }
        let (any, by_arguments) = apart(rules);
        let fixed = any.into_keys().map(|number| (number, SeccompAction::Allow)).collect();
        Self(program(&fixed, &by_arguments, other))
    }

    /// Applies the filter to this thread and to the threads that it starts.
    pub(super) fn install(&self) -> io::Result<()> {
        apply_filter(&self.0).map_err(failed)
    }
}

fn failed(error: Error) -> io::Error {
    match error {
        Error::Seccomp(error) | Error::Prctl(error) => error,
        error => io::Error::other(error),
    }
}

/// Splits the rules. The first part contains the calls that are allowed with any arguments. The second part contains all other calls.
fn apart(rules: Rules) -> (Rules, Rules) {
    rules.into_iter().partition(|(_, rules)| rules.is_empty())
}

fn add(rules: &mut Rules, call: Call) {
    let number = call.number();
    let earlier = rules.get(&number);
    let conditions: &[Argument] = match call {
        Call::Any(_) => &[],
        Call::With(_, index, value) => &[Argument::Is(index, value)],
        Call::Without(_, index, bits) => &[Argument::Bits(index, bits, 0)],
        Call::Where(_, conditions) => conditions,
        Call::OnItself(_) => &[Argument::Is(0, std::process::id())],
        Call::Ioctl(request) => &[Argument::Is(1, request)],
        Call::IoctlsOf(kind) => &[Argument::Bits(1, IOCTL_TYPE, u32::from(kind) << 8)],
    };
    if conditions.is_empty() {
        rules.insert(number, Vec::new());
        return;
    }
    if earlier.is_some_and(Vec::is_empty) {
        // The call is allowed with any arguments already.
        return;
    }
    let alternatives = rules.entry(number).or_default();
    // The starter thread's filter merges the calls of several roles, which may contain the same alternative.
    if !alternatives.iter().any(|known| known == conditions) {
        alternatives.push(conditions.to_vec());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::calls;
    use crate::sandbox::program::tests::answer;

    #[test]
    fn role_without_open_gets_eacces_and_traps_on_unlisted_calls() {
        let Filter(program) = Filter::of(&ThreadRole { name: "test", calls: &[] }, SeccompAction::Trap);
        let of = |number: i64| answer(&program, u32::try_from(number).unwrap(), 0);
        assert_eq!(of(libc::SYS_openat), u32::from(SeccompAction::Errno(libc::EACCES.cast_unsigned())));
        assert_eq!(of(libc::SYS_futex), u32::from(SeccompAction::Allow));
        assert_eq!(of(libc::SYS_execve), u32::from(SeccompAction::Trap));
    }

    #[test]
    fn starter_filter_has_role_conditions_except_for_ioctl() {
        const READING: &[Call] = &[Call::Without(libc::SYS_openat, 2, libc::O_RDWR.cast_unsigned())];
        let calls = &[calls::POLICY, calls::TAP, calls::SOCKETS, calls::MAPPINGS, READING];
        let roles = [ThreadRole { name: "test", calls }];
        let Filter(program) = Filter::of_starter(&roles, SeccompAction::Trap);
        let of = |number: i64, argument: u32| answer(&program, u32::try_from(number).unwrap(), argument);
        let (allowed, trapped) = (u32::from(SeccompAction::Allow), u32::from(SeccompAction::Trap));
        assert_eq!(of(libc::SYS_ioctl, 0x5412), allowed);
        for number in [libc::SYS_sched_setscheduler, libc::SYS_sched_setaffinity, libc::SYS_prlimit64] {
            assert_eq!([of(number, 0), of(number, 1)], [allowed, trapped], "call {number}");
        }
        assert_eq!([of(libc::SYS_tgkill, std::process::id()), of(libc::SYS_tgkill, 1)], [allowed, trapped]);
        assert_eq!([of(libc::SYS_socket, libc::AF_INET.cast_unsigned()), of(libc::SYS_kill, 0)], [trapped; 2]);
        assert_eq!(of(libc::SYS_openat, libc::O_RDWR.cast_unsigned()), trapped);
    }

    #[test]
    fn all_conditions_of_a_call_must_hold() {
        const ZERO_WITHOUT_BIT_2: &[Argument] = &[Argument::Is(0, 0), Argument::Bits(1, 4, 0), Argument::Null(2)];
        let role = ThreadRole { name: "test", calls: &[&[Call::Where(libc::SYS_sync, ZERO_WITHOUT_BIT_2)]] };
        let Filter(program) = Filter::of(&role, SeccompAction::Trap);
        let of = |argument: u32| answer(&program, u32::try_from(libc::SYS_sync).unwrap(), argument);
        assert_eq!(of(0), u32::from(SeccompAction::Allow));
        assert_eq!([of(1), of(4)], [u32::from(SeccompAction::Trap); 2]);
    }

    #[test]
    fn any_argument_rule_wins_over_narrow_rules_in_any_order() {
        for calls in [[Call::Ioctl(1), Call::Any(libc::SYS_ioctl)], [Call::Any(libc::SYS_ioctl), Call::IoctlsOf(2)]] {
            let mut rules = Rules::new();
            calls.into_iter().for_each(|call| add(&mut rules, call));
            assert_eq!(rules, Rules::from([(libc::SYS_ioctl, Vec::new())]));
        }
    }
}
