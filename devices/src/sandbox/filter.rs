// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The filter of a role, as the kernel takes it.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, Error, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter,
};

use super::call::{Call, ThreadRole};
use super::common::{COMMON, REFUSED};

/// Calls by number; a list without rules is for any arguments.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

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
        let refused: Rules =
            REFUSED.iter().filter(|number| !rules.contains_key(number)).map(|number| (*number, Vec::new())).collect();
        let errno = SeccompAction::Errno(libc::EACCES.cast_unsigned());
        let refused = program(refused, SeccompAction::Allow, errno)?;
        let allowed = program(rules, other, SeccompAction::Allow)?;
        Ok(Self(in_turn(refused, allowed)))
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
        let rules = numbers.map(|number| (number, Vec::new())).collect();
        Ok(Self(program(rules, other, SeccompAction::Allow)?))
    }

    /// Has the kernel hold this thread to it, and those that it starts.
    pub(super) fn install(&self) -> io::Result<()> {
        apply_filter(&self.0).map_err(failed)
    }
}

/// One program of two: `second` has the calls for which `first` has no rule. It is one filter instead of two, as the kernel takes its
/// time to take one.
///
/// The last instruction of a program answers those calls, and is reached for them only. None of the rules of `first` may have
/// conditions: a call that has rules but meets none is answered elsewhere.
fn in_turn(mut first: BpfProgram, second: BpfProgram) -> BpfProgram {
    first.pop();
    first.extend(second);
    first
}

fn program(rules: Rules, mismatch: SeccompAction, matching: SeccompAction) -> io::Result<BpfProgram> {
    let filter = SeccompFilter::new(rules, mismatch, matching, TargetArch::x86_64);
    filter.and_then(TryInto::try_into).map_err(|error| failed(Error::Backend(error)))
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

    /// What `program` answers to a call without arguments, by the instructions that the library makes of rules without conditions.
    fn answer(program: &BpfProgram, number: u32) -> u32 {
        const LOAD: u16 = 0x20;
        const JUMP_IF_EQUAL: u16 = 0x15;
        const JUMP: u16 = 0x05;
        const RETURN: u16 = 0x06;
        // Of `struct seccomp_data`: the number of the call, and `AUDIT_ARCH_X86_64`.
        let data = |place: u32| [number, 0xc000_003e].get(place as usize / 4).copied().unwrap_or(0);
        let (mut at, mut loaded) = (0, 0);
        loop {
            let instruction = &program[at];
            at += 1;
            match instruction.code {
                LOAD => loaded = data(instruction.k),
                JUMP_IF_EQUAL if loaded == instruction.k => at += usize::from(instruction.jt),
                JUMP_IF_EQUAL => at += usize::from(instruction.jf),
                JUMP => at += instruction.k as usize,
                RETURN => return instruction.k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn each_call_gets_the_first_answer_that_a_program_has_for_it() {
        let rules = |numbers: &[i64]| numbers.iter().map(|number| (*number, Vec::new())).collect::<Rules>();
        let errno = SeccompAction::Errno(libc::EACCES.cast_unsigned());
        for refused in [&[][..], &[2], &[2, 4, 400]] {
            let first = program(rules(refused), SeccompAction::Allow, errno.clone()).unwrap();
            let second = program(rules(&[0, 2, 3, 4, 400, 401]), SeccompAction::Trap, SeccompAction::Allow).unwrap();
            let both = in_turn(first.clone(), second.clone());
            for number in 0..450 {
                let is_refused = refused.contains(&i64::from(number));
                let expected = if is_refused { answer(&first, number) } else { answer(&second, number) };
                assert_eq!(answer(&both, number), expected, "call {number}, refused {refused:?}");
            }
        }
    }

    #[test]
    fn role_that_opens_no_files_is_refused_them_and_stopped_at_what_it_does_not_have() {
        let Filter(program) = Filter::of(&Role::Rng.thread(), SeccompAction::Trap).unwrap();
        let of = |number: i64| answer(&program, u32::try_from(number).unwrap());
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
