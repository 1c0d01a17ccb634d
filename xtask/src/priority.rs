// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Priority of threads, and of the programs that they start.

use std::collections::BTreeMap;
use std::fs;
use std::io;

use rustix::process::{Pid, setpriority_process};

/// Lowest priority.
const LOWEST: i32 = 19;
/// Ordinary priority.
const ORDINARY: i32 = 0;

/// Gives this thread the lowest priority. Programs that the thread starts inherit this priority.
///
/// # Errors
/// Fails if the kernel refuses.
pub(crate) fn lower_own() -> io::Result<()> {
    // On Linux this changes the priority of the thread, not of the process.
    Ok(setpriority_process(None, LOWEST)?)
}

/// Restores ordinary priority for all threads of this process and of its descendants. On Linux, only root can raise a priority. Errors are
/// ignored, because a low priority only makes processes slower.
pub(crate) fn restore_all() {
    let parents = parents();
    for process in family(std::process::id(), &parents) {
        for thread in numbers(&format!("/proc/{process}/task")) {
            let thread = i32::try_from(thread).ok().and_then(Pid::from_raw);
            if let Some(thread) = thread {
                let _ = setpriority_process(Some(thread), ORDINARY);
            }
        }
    }
}

/// Returns the parent of each process.
fn parents() -> BTreeMap<u32, u32> {
    let parent = |process: u32| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name, in parentheses, can contain any character.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    numbers("/proc").into_iter().filter_map(|process| Some((process, parent(process)?))).collect()
}

/// Returns process `top` and all its descendants.
fn family(top: u32, parents: &BTreeMap<u32, u32>) -> Vec<u32> {
    let mut family = vec![top];
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        family.extend(parents.iter().filter(|(_, its)| **its == parent).map(|(process, _)| *process));
        next += 1;
    }
    family
}

/// Returns the numeric names in a directory.
fn numbers(folder: &str) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::thread;

    use rustix::process::{geteuid, getpriority_process};

    use super::*;

    #[test]
    fn family_has_the_process_and_its_descendants() {
        let parents = BTreeMap::from([(2, 1), (3, 2), (4, 3), (5, 1), (6, 9)]);
        assert_eq!(family(2, &parents), [2, 3, 4]);
        assert_eq!(family(7, &parents), [7]);
    }

    #[test]
    fn started_program_gets_ordinary_priority_back() {
        if !geteuid().is_root() {
            return eprintln!("not tested: only root can raise a priority");
        }
        let start = || {
            lower_own().unwrap();
            Command::new("cat").stdin(Stdio::piped()).spawn().unwrap()
        };
        let mut program = thread::spawn(start).join().unwrap();
        let of_program = || getpriority_process(i32::try_from(program.id()).ok().and_then(Pid::from_raw)).unwrap();
        assert_eq!(of_program(), LOWEST);
        restore_all();
        assert_eq!(of_program(), ORDINARY);
        drop(program.stdin.take());
        program.wait().unwrap();
    }
}
