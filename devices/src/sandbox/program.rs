// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! BPF program of a seccomp filter.
//!
//! A program of the `seccompiler` crate compares the number of a call with each number that has rules, one after another. Such programs are
//! expensive to install. When a thread installs a filter, the kernel compiles the filter. The kernel then runs the filter for each call
//! number that all earlier filters of the thread allow (`seccomp_cache_prepare()` of kernel/seccomp.c). So the program of this module finds
//! a call by binary search. The program loads each argument only once, and compares the argument with all allowed values.

use std::collections::BTreeMap;
use std::mem::offset_of;

use seccompiler::{BpfProgram, SeccompAction, sock_filter};

use super::call::Argument;

/// Allowed calls by number, each with alternative lists of conditions. All conditions of one list must hold. A call without alternatives
/// may have any arguments.
pub(super) type Rules = BTreeMap<i64, Vec<Vec<Argument>>>;

/// `AUDIT_ARCH_X86_64` of linux/audit.h: the caller is a 64-bit program.
const X86_64: u32 = 0xc000_003e;

/// Instructions of linux/bpf_common.h.
const LOAD: u16 = code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS);
const JUMP: u16 = code(libc::BPF_JMP | libc::BPF_JA);
const JUMP_IF_EQUAL: u16 = code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
const JUMP_IF_NOT_LESS: u16 = code(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K);
const AND: u16 = code(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K);
const RETURN: u16 = code(libc::BPF_RET | libc::BPF_K);

/// Answer of the program to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The program returns this word.
    Word(u32),
    /// The rules of the call decide. The field is the number of instructions between the end of the search and the rules of the call.
    Rules(usize),
}

/// Creates the program. A call in `fixed` gets its fixed action. A call in `rules` is allowed if all conditions of one alternative hold.
/// All other calls get `other`. No call may be in both maps.
pub(super) fn program(fixed: &BTreeMap<i64, SeccompAction>, rules: &Rules, other: SeccompAction) -> BpfProgram {
    let other = u32::from(other);
    let mut by_rules = BpfProgram::new();
    let mut answers: BTreeMap<i64, Answer> =
        fixed.iter().map(|(number, action)| (*number, Answer::Word(action.clone().into()))).collect();
    for (number, alternatives) in rules {
        answers.insert(*number, Answer::Rules(by_rules.len()));
        by_rules.extend(compare(alternatives, other));
    }
    let mut program = vec![
        load(offset_of!(libc::seccomp_data, arch)),
        jump(JUMP_IF_EQUAL, X86_64, 1, 0),
        jump(RETURN, SeccompAction::KillProcess.into(), 0, 0),
        load(offset_of!(libc::seccomp_data, nr)),
    ];
    program.extend(search(&spans(&answers, Answer::Word(other)), 0));
    program.extend(by_rules);
    program
}

/// Returns instructions that allow a call if one of `alternatives` holds, and answer `other` otherwise.
fn compare(alternatives: &[Vec<Argument>], other: u32) -> BpfProgram {
    let value = |alternative: &Vec<Argument>| match alternative[..] {
        [Argument::Is(index, value)] => Some((index, value)),
        _ => None,
    };
    let mut values: BTreeMap<u8, Vec<u32>> = BTreeMap::new();
    for (index, value) in alternatives.iter().filter_map(value) {
        values.entry(index).or_default().push(value);
    }
    let mut program = BpfProgram::new();
    for (index, values) in values {
        // A conditional jump skips at most 255 instructions.
        for values in values.chunks(200) {
            program.push(load_argument(index, 0));
            let last = values.len() - 1;
            let equal = values.iter().enumerate();
            program
                .extend(equal.map(|(at, value)| jump(JUMP_IF_EQUAL, *value, short(last - at), u8::from(at == last))));
            program.push(allow());
        }
    }
    for conditions in alternatives.iter().filter(|alternative| value(alternative).is_none()) {
        let mut rest = vec![allow()];
        for condition in conditions.iter().rev() {
            let skip = rest.len();
            rest = [check(*condition, skip), rest].concat();
        }
        program.extend(rest);
    }
    program.push(jump(RETURN, other, 0, 0));
    program
}

/// Returns instructions that check a condition. If the condition does not hold, the check skips the next `skip` instructions.
fn check(condition: Argument, skip: usize) -> BpfProgram {
    let equals = |value, after: usize| jump(JUMP_IF_EQUAL, value, 0, short(skip + after));
    match condition {
        Argument::Is(index, value) => vec![load_argument(index, 0), equals(value, 0)],
        Argument::Bits(index, bits, value) => {
            vec![load_argument(index, 0), jump(AND, bits, 0, 0), equals(value, 0)]
        }
        // Compare both halves of a pointer. The other conditions compare only the low half, because the kernel uses only the low 32 bits of
        // these numbers.
        Argument::Null(index) => vec![load_argument(index, 0), equals(0, 2), load_argument(index, 4), equals(0, 0)],
    }
}

fn allow() -> sock_filter {
    jump(RETURN, SeccompAction::Allow.into(), 0, 0)
}

fn short(instructions: usize) -> u8 {
    u8::try_from(instructions).expect("a call has few conditions, and values are compared in chunks")
}

/// Returns the instruction that loads one half of an argument. `byte` is 0 for the low half, and 4 for the high half.
fn load_argument(index: u8, byte: usize) -> sock_filter {
    load(offset_of!(libc::seccomp_data, args) + usize::from(index) * size_of::<u64>() + byte)
}

/// Divides all call numbers into spans with the same answer. Returns the first number and the answer of each span, in ascending order. The
/// first span starts at 0.
fn spans(answers: &BTreeMap<i64, Answer>, other: Answer) -> Vec<(u32, Answer)> {
    let mut spans = vec![(0, other)];
    for (number, answer) in answers {
        let number = u32::try_from(*number).expect("a call's number is small and no error");
        spans.push((number, *answer));
        spans.push((number + 1, other));
    }
    // Of two spans that start at the same number, the later span counts.
    spans.reverse();
    spans.dedup_by_key(|(number, _)| *number);
    spans.reverse();
    spans.dedup_by_key(|(_, answer)| *answer);
    spans
}

/// Returns instructions that find the span of the loaded call number. The rules start `after` instructions after this search.
fn search(spans: &[(u32, Answer)], after: usize) -> BpfProgram {
    let (low, high) = spans.split_at(spans.len() / 2);
    let Some((middle, answer)) = high.first() else { return Vec::new() };
    if low.is_empty() {
        return vec![match answer {
            Answer::Word(word) => jump(RETURN, *word, 0, 0),
            Answer::Rules(at) => jump(JUMP, distance(after + at), 0, 0),
        }];
    }
    let high = search(high, after);
    let low = search(low, after + high.len());
    let over = match u8::try_from(low.len()) {
        Ok(over) => vec![jump(JUMP_IF_NOT_LESS, *middle, over, 0)],
        // A conditional jump skips at most 255 instructions, so use an unconditional jump.
        Err(_) => vec![jump(JUMP_IF_NOT_LESS, *middle, 0, 1), jump(JUMP, distance(low.len()), 0, 0)],
    };
    [over, low, high].concat()
}

fn distance(instructions: usize) -> u32 {
    u32::try_from(instructions).expect("a program has a few hundred instructions")
}

/// Returns the instruction that loads the word at offset `place` of `struct seccomp_data`.
fn load(place: usize) -> sock_filter {
    jump(LOAD, distance(place), 0, 0)
}

/// Creates an instruction. A conditional jump skips `jt` instructions if its condition holds, and `jf` instructions otherwise.
const fn jump(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

const fn code(bits: u32) -> u16 {
    bits.to_le_bytes()[0] as u16
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the program's answer to a call whose arguments are all `argument`.
    pub(in crate::sandbox) fn answer(program: &BpfProgram, number: u32, argument: u32) -> u32 {
        answer_to(program, number, [argument.into(); 6])
    }

    fn low(argument: u64) -> u32 {
        u32::try_from(argument & u64::from(u32::MAX)).unwrap()
    }

    fn answer_to(program: &BpfProgram, number: u32, arguments: [u64; 6]) -> u32 {
        let halves = arguments.iter().flat_map(|argument| [low(*argument), low(*argument >> 32)]);
        let words: Vec<u32> = [number, X86_64, 0, 0].into_iter().chain(halves).collect();
        let data = |place: u32| words[place as usize / 4];
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

    /// Returns rules that allow a call if its first argument is 7.
    fn only_seven() -> Vec<Vec<Argument>> {
        vec![vec![Argument::Is(0, 7)]]
    }

    fn holds(condition: Argument, arguments: [u64; 6]) -> bool {
        match condition {
            Argument::Is(index, value) => low(arguments[usize::from(index)]) == value,
            Argument::Bits(index, bits, value) => low(arguments[usize::from(index)]) & bits == value,
            Argument::Null(index) => arguments[usize::from(index)] == 0,
        }
    }

    fn condition() -> impl Strategy<Value = Argument> {
        prop_oneof![
            4 => (0_u8..6, 0_u32..4).prop_map(|(index, value)| Argument::Is(index, value)),
            1 => (0_u8..6, 0_u32..4, 0_u32..4).prop_map(|(index, bits, value)| Argument::Bits(index, bits, value)),
            1 => (0_u8..6).prop_map(Argument::Null),
        ]
    }

    /// Creates a program from the kind of each call. Calls of kind 0 are allowed, and calls of kind 1 are refused. A call of kind 2 is
    /// allowed if its first argument is 7.
    fn made(kinds: &BTreeMap<i64, u8>) -> BpfProgram {
        let of = |kind: u8| kinds.iter().filter(move |(_, is)| **is == kind).map(|(number, _)| *number);
        let fixed = of(0).map(|number| (number, SeccompAction::Allow)).chain(of(1).map(|number| (number, errno())));
        program(&fixed.collect(), &of(2).map(|number| (number, only_seven())).collect(), OTHER)
    }

    proptest! {
        #[test]
        fn call_is_allowed_if_all_conditions_of_a_rule_hold(
            alternatives in prop::collection::vec(prop::collection::vec(condition(), 1..4), 1..8),
            arguments in prop::array::uniform6(prop_oneof![0_u64..4, (0_u64..4).prop_map(|high| high << 32)]),
        ) {
            let is_allowed = alternatives.iter().any(|all| all.iter().all(|one| holds(*one, arguments)));
            let expected = if is_allowed { SeccompAction::Allow } else { OTHER };
            let program = program(&BTreeMap::new(), &Rules::from([(9, alternatives)]), OTHER);
            prop_assert_eq!(answer_to(&program, 9, arguments), u32::from(expected));
        }

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
    fn large_filter_uses_long_jumps_and_answers_every_call() {
        let kinds: BTreeMap<i64, u8> = (0..500).map(|n| (2 * n, 0)).collect();
        let program = made(&kinds);
        assert!(program.iter().any(|instruction| instruction.code == JUMP));
        for number in 0..1100 {
            let expected = if number < 1000 && number % 2 == 0 { SeccompAction::Allow } else { OTHER };
            assert_eq!(answer(&program, number, 0), u32::from(expected), "call {number}");
        }
    }

    #[test]
    fn call_can_have_more_values_than_a_jump_reaches() {
        let alternatives = (0..900).map(|value| vec![Argument::Is(1, 2 * value)]).collect();
        let program = program(&BTreeMap::new(), &Rules::from([(9, alternatives)]), OTHER);
        for value in 0..1802 {
            let expected = if value < 1800 && value % 2 == 0 { SeccompAction::Allow } else { OTHER };
            assert_eq!(answer(&program, 9, value), u32::from(expected), "{value}");
        }
    }

    #[test]
    fn program_without_calls_treats_all_calls_alike() {
        let program = made(&BTreeMap::new());
        assert_eq!([answer(&program, 0, 0), answer(&program, 59, 7)], [u32::from(OTHER); 2]);
    }
}
