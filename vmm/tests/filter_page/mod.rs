// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Compares the tables of roles and calls in `docs/security.md` with the filters in the code.

use std::collections::{BTreeMap, BTreeSet};

use devices::sandbox::{Argument, COMMON, Call, REFUSED, ThreadRole};

/// Calls by name and condition, with the roles that may make them.
pub(crate) type Calls = BTreeMap<(String, String), BTreeSet<String>>;

/// Word in the page that means all roles.
const EVERY: &str = "every";
/// Words in the page that mark calls that fail.
const FAILS: &str = "fails with `EACCES`";
/// Word in the page that means any arguments.
const ANY: &str = "any";

/// Returns the calls that the filters allow.
pub(crate) fn of_code(roles: &[ThreadRole]) -> Calls {
    let mut calls = Calls::new();
    let mut add = |name: String, condition: String, role: &str| {
        calls.entry((name, condition)).or_default().insert(role.to_string());
    };
    for call in COMMON {
        add(call.name(), condition(*call), EVERY);
    }
    for number in REFUSED {
        add(Call::Any(*number).name(), FAILS.to_string(), EVERY);
    }
    for role in roles {
        for call in role.calls.iter().copied().flatten() {
            if !COMMON.contains(call) {
                add(call.name(), condition(*call), role.name);
            }
        }
    }
    calls
}

/// Returns the calls in the page's table, and the errors in the table. The columns of the table are `| call | arguments | roles | reason
/// |`.
pub(crate) fn of_page(page: &str) -> (Calls, Vec<String>) {
    let (mut calls, mut wrong) = (Calls::new(), Vec::new());
    for row in rows(page, "| call | ") {
        let [names, conditions, roles, reason] = &row[..] else {
            wrong.push(format!("{row:?} does not have 4 cells"));
            continue;
        };
        if reason.is_empty() {
            wrong.push(format!("{names}: no reason"));
        }
        let roles: BTreeSet<String> = listed(roles, ", ");
        for name in listed(names, ", ") {
            for condition in conditions.split(" or ") {
                let key = (name.clone(), condition.trim().to_string());
                if calls.insert(key.clone(), roles.clone()).is_some() {
                    wrong.push(format!("{key:?} occurs twice"));
                }
            }
        }
    }
    (calls, wrong)
}

/// Returns the roles in the page's table of roles.
pub(crate) fn roles_of_page(page: &str) -> BTreeSet<String> {
    rows(page, "| role | ")
        .into_iter()
        .filter_map(|row| row.into_iter().next())
        .flat_map(|cell| listed(&cell, ", "))
        .collect()
}

fn listed(cell: &str, between: &str) -> BTreeSet<String> {
    cell.split(between).map(|one| one.trim().to_string()).map(|one| unquoted(&one)).collect()
}

/// Removes the backticks of a text that is a single name in backticks.
fn unquoted(text: &str) -> String {
    match text.strip_prefix('`').and_then(|rest| rest.strip_suffix('`')) {
        Some(name) if !name.contains('`') && !name.contains(' ') => name.to_string(),
        _ => text.to_string(),
    }
}

/// Returns the cells of each row of the table whose head starts with `head`.
fn rows(page: &str, head: &str) -> Vec<Vec<String>> {
    let lines = page.lines().skip_while(|line| !line.starts_with(head)).skip(2);
    let rows = lines.take_while(|line| line.starts_with('|'));
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_string()).collect();
    rows.map(cells).collect()
}

/// Returns the page's description of the arguments that a call may have.
fn condition(call: Call) -> String {
    let number = call.number();
    let shown = |argument: &Argument| match *argument {
        Argument::Is(index, value) => format!("{} = {}", parameter(number, index), value_name(number, index, value)),
        Argument::Bits(index, bits, 0) => {
            format!("{} without {}", parameter(number, index), value_name(number, index, bits))
        }
        Argument::Bits(index, _, value) => {
            format!("{} = {} and its flags", parameter(number, index), value_name(number, index, value))
        }
        Argument::Null(index) => format!("{} = null", parameter(number, index)),
    };
    match call {
        Call::Any(_) => ANY.to_string(),
        Call::With(_, index, value) => shown(&Argument::Is(index, value)),
        Call::Without(_, index, bits) => shown(&Argument::Bits(index, bits, 0)),
        Call::Where(_, arguments) => arguments.iter().map(shown).collect::<Vec<_>>().join(", "),
        Call::OnItself(_) => format!("{} = its own", parameter(number, 0)),
        Call::Ioctl(request) => value_name(number, 1, request),
        Call::IoctlsOf(kind) => format!("all of {}", ioctl_kind(kind)),
    }
}

fn ioctl_kind(kind: u8) -> &'static str {
    match kind {
        0xae => "KVM",
        b';' => "VFIO and IOMMUFD",
        _ => "another driver",
    }
}

/// Returns the name that the call's manual page gives to a parameter.
fn parameter(number: i64, index: u8) -> String {
    let name = match (number, index) {
        (libc::SYS_prlimit64, 0) => "pid",
        (libc::SYS_prlimit64, 2) => "new_limit",
        (libc::SYS_sched_getattr, 0) | (libc::SYS_sched_setattr, 0) => "pid",
        (libc::SYS_sched_getscheduler, 0) | (libc::SYS_sched_setscheduler, 0) => "pid",
        (libc::SYS_fcntl, 1) => "op",
        (libc::SYS_fcntl, 2) => "arg",
        (libc::SYS_socket, 0) | (libc::SYS_socketpair, 0) => "domain",
        (libc::SYS_socket, 1) | (libc::SYS_socketpair, 1) => "type",
        (libc::SYS_socket, 2) | (libc::SYS_socketpair, 2) => "protocol",
        (libc::SYS_sendto, 4) => "dest_addr",
        (libc::SYS_madvise, 2) => "advice",
        (libc::SYS_mmap, 2) | (libc::SYS_mprotect, 2) => "prot",
        (libc::SYS_mbind, 5) | (libc::SYS_sched_setattr, 2) => "flags",
        (libc::SYS_open, 1) | (libc::SYS_openat, 2) => "flags",
        (libc::SYS_prctl, 0) => "op",
        (libc::SYS_kill, 0) => "pid",
        (libc::SYS_tgkill, 0) => "tgid",
        _ => return format!("argument {index}"),
    };
    name.to_string()
}

/// Returns the name that the kernel's headers give to a value of a parameter, in backticks.
fn value_name(number: i64, index: u8, value: u32) -> String {
    let of = |names: &[(i32, &str)]| {
        names.iter().find(|(known, _)| known.cast_unsigned() == value).map(|(_, name)| format!("`{name}`"))
    };
    let name = match (number, index) {
        (libc::SYS_fcntl, 1) => of(&[
            (libc::F_GETFD, "F_GETFD"),
            (libc::F_SETFD, "F_SETFD"),
            (libc::F_GETFL, "F_GETFL"),
            (libc::F_SETFL, "F_SETFL"),
            (libc::F_DUPFD_CLOEXEC, "F_DUPFD_CLOEXEC"),
            (libc::F_ADD_SEALS, "F_ADD_SEALS"),
            (libc::F_OFD_SETLK, "F_OFD_SETLK"),
            (libc::F_OFD_GETLK, "F_OFD_GETLK"),
        ]),
        (libc::SYS_fcntl, 2) => of(&[(libc::O_ASYNC, "O_ASYNC")]),
        (libc::SYS_socket | libc::SYS_socketpair, 0) => {
            of(&[(libc::AF_UNIX, "AF_UNIX"), (libc::AF_INET, "AF_INET"), (libc::AF_INET6, "AF_INET6")])
        }
        (libc::SYS_socket | libc::SYS_socketpair, 1) => {
            of(&[(libc::SOCK_STREAM, "SOCK_STREAM"), (libc::SOCK_DGRAM, "SOCK_DGRAM")])
        }
        (libc::SYS_madvise, 2) => of(&[
            (libc::MADV_DONTNEED, "MADV_DONTNEED"),
            (libc::MADV_FREE, "MADV_FREE"),
            (libc::MADV_REMOVE, "MADV_REMOVE"),
            (libc::MADV_DONTFORK, "MADV_DONTFORK"),
            (libc::MADV_MERGEABLE, "MADV_MERGEABLE"),
            (libc::MADV_HUGEPAGE, "MADV_HUGEPAGE"),
            (libc::MADV_NOHUGEPAGE, "MADV_NOHUGEPAGE"),
            (libc::MADV_DONTDUMP, "MADV_DONTDUMP"),
            (libc::MADV_POPULATE_READ, "MADV_POPULATE_READ"),
            (libc::MADV_POPULATE_WRITE, "MADV_POPULATE_WRITE"),
            (libc::MADV_COLLAPSE, "MADV_COLLAPSE"),
            (102, "MADV_GUARD_INSTALL"),
            (103, "MADV_GUARD_REMOVE"),
        ]),
        (libc::SYS_mmap | libc::SYS_mprotect, 2) => of(&[(libc::PROT_EXEC, "PROT_EXEC")]),
        (libc::SYS_open, 1) | (libc::SYS_openat, 2) => {
            of(&[(libc::O_WRONLY | libc::O_RDWR | libc::O_CREAT | libc::O_TRUNC, "O_WRONLY/O_RDWR/O_CREAT/O_TRUNC")])
        }
        (libc::SYS_prctl, 0) => of(&[
            (libc::PR_SET_VMA, "PR_SET_VMA"),
            (libc::PR_SET_NAME, "PR_SET_NAME"),
            (libc::PR_GET_NAME, "PR_GET_NAME"),
        ]),
        (libc::SYS_ioctl, 1) => request_name(value).map(|name| format!("`{name}`")),
        _ => None,
    };
    name.unwrap_or_else(|| if value < 10 { value.to_string() } else { format!("{value:#x}") })
}

/// Returns the name of an `ioctl` request.
fn request_name(request: u32) -> Option<&'static str> {
    Some(match request {
        0x5401 => "TCGETS",
        0x5402 => "TCSETS",
        0x5403 => "TCSETSW",
        0x5404 => "TCSETSF",
        0x802c_542a => "TCGETS2",
        0x402c_542b => "TCSETS2",
        0x402c_542c => "TCSETSW2",
        0x402c_542d => "TCSETSF2",
        0x5413 => "TIOCGWINSZ",
        0x8004_5430 => "TIOCGPTN",
        0x4004_5431 => "TIOCSPTLCK",
        0x5441 => "TIOCGPTPEER",
        0x5421 => "FIONBIO",
        0x4004_54ca => "TUNSETIFF",
        0x4004_54cb => "TUNSETPERSIST",
        0x8004_54cf => "TUNGETFEATURES",
        0x4004_54d0 => "TUNSETOFFLOAD",
        0x8004_54d2 => "TUNGETIFF",
        0x4004_54d8 => "TUNSETVNETHDRSZ",
        0x4004_54d9 => "TUNSETQUEUE",
        0x8913 => "SIOCGIFFLAGS",
        0x8914 => "SIOCSIFFLAGS",
        0x8916 => "SIOCSIFADDR",
        0x891c => "SIOCSIFNETMASK",
        0x8921 => "SIOCGIFMTU",
        0x8922 => "SIOCSIFMTU",
        0x8924 => "SIOCSIFHWADDR",
        0x8933 => "SIOCGIFINDEX",
        0x125e => "BLKROGET",
        0x1268 => "BLKSSZGET",
        0x127b => "BLKPBSZGET",
        0x8008_1272 => "BLKGETSIZE64",
        0xae80 => "KVM_RUN",
        0x4008_ae61 => "KVM_IRQ_LINE",
        0x4020_ae46 => "KVM_SET_USER_MEMORY_REGION",
        0x4008_ae6a => "KVM_SET_GSI_ROUTING",
        0x4020_ae76 => "KVM_IRQFD",
        0x4040_ae79 => "KVM_IOEVENTFD",
        0x4020_aea5 => "KVM_SIGNAL_MSI",
        _ => return None,
    })
}
