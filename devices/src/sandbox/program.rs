// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The program of a filter. The library makes one that compares a call with each that has rules, one after another. The kernel takes one
//! for each thread, and runs it then for each number of a call that no earlier filter stops (`seccomp_cache_prepare()` of
//! kernel/seccomp.c). So here calls whose arguments do not matter are found by halving.

use std::collections::BTreeMap;
use std::mem::offset_of;

use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, SeccompRule, TargetArch, sock_filter};

/// Calls by number; a list without rules is for any arguments.
pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// `AUDIT_ARCH_X86_64` of linux/audit.h: the call is one of a 64-bit program.
const X86_64: u32 = 0xc000_003e;

/// Instructions of linux/bpf_common.h.
const LOAD: u16 = code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS);
const JUMP: u16 = code(libc::BPF_JMP | libc::BPF_JA);
const JUMP_IF_EQUAL: u16 = code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
const JUMP_IF_NOT_LESS: u16 = code(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K);
const RETURN: u16 = code(libc::BPF_RET | libc::BPF_K);

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The kernel gets this word for it.
    Word(u32),
    /// That is up to its rules.
    Rules,
}

/// The program that answers a call of `fixed` so, allows one that meets a rule of `rules`, and meets another with `other`. A call is in
/// one of the two at most.
pub(super) fn program(
    fixed: &BTreeMap<i64, SeccompAction>,
    rules: Rules,
    other: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    let words = fixed.iter().map(|(number, action)| (*number, Answer::Word(action.clone().into())));
    let answers = words.chain(rules.keys().map(|number| (*number, Answer::Rules))).collect();
    let mut program = vec![
        load(offset_of!(libc::seccomp_data, arch)),
        jump(JUMP_IF_EQUAL, X86_64, 1, 0),
        jump(RETURN, SeccompAction::KillProcess.into(), 0, 0),
        load(offset_of!(libc::seccomp_data, nr)),
    ];
    program.extend(search(&spans(&answers, Answer::Word(other.clone().into())), 0));
    if !rules.is_empty() {
        let by_rules: BpfProgram =
            SeccompFilter::new(rules, other, SeccompAction::Allow, TargetArch::x86_64)?.try_into()?;
        program.extend(by_rules);
    }
    Ok(program)
}

/// Where the answer changes, in order of the numbers, and what it is from there on. The first is at 0.
fn spans(answers: &BTreeMap<i64, Answer>, other: Answer) -> Vec<(u32, Answer)> {
    let mut spans = vec![(0, other)];
    for (number, answer) in answers {
        let number = u32::try_from(*number).expect("a call's number is small and no error");
        spans.push((number, *answer));
        spans.push((number + 1, other));
    }
    // Of two at one place the later counts.
    spans.reverse();
    spans.dedup_by_key(|(number, _)| *number);
    spans.reverse();
    spans.dedup_by_key(|(_, answer)| *answer);
    spans
}

/// Finds the span of the number that is loaded. The rules come `after` so many more instructions.
fn search(spans: &[(u32, Answer)], after: usize) -> BpfProgram {
    let (low, high) = spans.split_at(spans.len() / 2);
    let Some((middle, answer)) = high.first() else { return Vec::new() };
    if low.is_empty() {
        return vec![match answer {
            Answer::Word(word) => jump(RETURN, *word, 0, 0),
            Answer::Rules => jump(JUMP, distance(after), 0, 0),
        }];
    }
    let high = search(high, after);
    let low = search(low, after + high.len());
    let over = match u8::try_from(low.len()) {
        Ok(over) => vec![jump(JUMP_IF_NOT_LESS, *middle, over, 0)],
        // A condition does not reach so far.
        Err(_) => vec![jump(JUMP_IF_NOT_LESS, *middle, 0, 1), jump(JUMP, distance(low.len()), 0, 0)],
    };
    [over, low, high].concat()
}

fn distance(instructions: usize) -> u32 {
    u32::try_from(instructions).expect("a program has a few hundred instructions")
}

/// Loads the word of `struct seccomp_data` at `place`.
fn load(place: usize) -> sock_filter {
    jump(LOAD, distance(place), 0, 0)
}

/// An instruction, and how many to leave out if its condition holds and if not.
const fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn code(bits: u32) -> u16 {
    bits.to_le_bytes()[0] as u16
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition};

    use super::*;

    /// What a program answers to a call whose arguments are all `argument`.
    pub(in crate::sandbox) fn answer(program: &BpfProgram, number: u32, argument: u32) -> u32 {
        const AND: u16 = code(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K);
        let data = |place: u32| *[number, X86_64, 0, 0].get(place as usize / 4).unwrap_or(&argument);
        let (mut at, mut loaded) = (0, 0);
        loop {
            let sock_filter { code, jt, jf, k } = program[at];
            at += 1;
            let mut branch = |holds: bool| at += usize::from(if holds { jt } else { jf });
            match code {
                LOAD => loaded = data(k),
                AND => loaded &= k,
                JUMP_IF_EQUAL => branch(loaded == k),
                JUMP_IF_NOT_LESS => branch(loaded >= k),
                JUMP => at += k as usize,
                RETURN => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    const OTHER: SeccompAction = SeccompAction::Trap;

    fn errno() -> SeccompAction {
        SeccompAction::Errno(13)
    }

    /// Allowed where the first argument is 7.
    fn only_seven() -> Vec<SeccompRule> {
        let condition = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, 7).unwrap();
        vec![SeccompRule::new(vec![condition]).unwrap()]
    }

    /// The kind of each call: allowed, refused, by its argument.
    fn made(kinds: &BTreeMap<i64, u8>) -> BpfProgram {
        let of = |kind: u8| kinds.iter().filter(move |(_, is)| **is == kind).map(|(number, _)| *number);
        let fixed = of(0).map(|number| (number, SeccompAction::Allow)).chain(of(1).map(|number| (number, errno())));
        program(&fixed.collect(), of(2).map(|number| (number, only_seven())).collect(), OTHER).unwrap()
    }

    proptest! {
        #[test]
        fn each_call_gets_its_answer(kinds in prop::collection::btree_map(0_i64..600, 0_u8..3, 0..300)) {
            let program = made(&kinds);
            for number in (0..602).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
                for argument in [7, 8] {
                    let expected = match kinds.get(&i64::from(number)) {
                        Some(0) => SeccompAction::Allow,
                        Some(1) => errno(),
                        Some(_) if argument == 7 => SeccompAction::Allow,
                        _ => OTHER,
                    };
                    prop_assert_eq!(answer(&program, number, argument), u32::from(expected), "call {}", number);
                }
            }
        }
    }

    #[test]
    fn program_of_each_second_call_reaches_over_more_than_a_condition_can() {
        let kinds: BTreeMap<i64, u8> = (0..500).map(|n| (2 * n, 0)).collect();
        let program = made(&kinds);
        assert!(program.iter().any(|instruction| instruction.code == JUMP));
        for number in 0..1100 {
            let expected = if number < 1000 && number % 2 == 0 { SeccompAction::Allow } else { OTHER };
            assert_eq!(answer(&program, number, 0), u32::from(expected), "call {number}");
        }
    }

    #[test]
    fn program_without_calls_meets_each_alike() {
        let program = made(&BTreeMap::new());
        assert_eq!([answer(&program, 0, 0), answer(&program, 59, 7)], [u32::from(OTHER); 2]);
    }
}
