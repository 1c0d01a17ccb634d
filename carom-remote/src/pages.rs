// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Completions and man pages of both programs, generated from the definitions of their command lines.

use std::io;
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::{Shell, generate};

use crate::RemoteError;
use crate::cli::Cli;

fn programs() -> [Command; 2] {
    [carom_api::cli::Cli::command(), Cli::command()]
}

/// Returns the completions of both programs for `shell`.
pub(crate) fn completions(shell: Shell) -> Result<Vec<u8>, RemoteError> {
    let mut text = Vec::new();
    for mut program in programs() {
        let name = program.get_name().to_string();
        generate(shell, &mut program, name, &mut text);
    }
    Ok(text)
}

/// Writes man pages to `directory`: one for each program, and one for each verb of carom-remote.
pub(crate) fn man_pages(directory: &Path) -> Result<(), RemoteError> {
    let write = |program: Command| -> io::Result<()> { clap_mangen::generate_to(program, directory) };
    std::fs::create_dir_all(directory)
        .and_then(|()| programs().into_iter().try_for_each(write))
        .map_err(RemoteError::io(format!("cannot write man pages to {}", directory.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_name_options_and_verbs_of_both_programs() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = String::from_utf8(completions(shell).unwrap()).unwrap();
            for word in ["iommu-bounce", "api-socket", "power-button", "carom-remote"] {
                assert!(text.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn each_program_has_a_man_page() {
        let dir = tempfile::tempdir().unwrap();
        man_pages(dir.path()).unwrap();
        for (page, word) in [("carom.1", "iommu"), ("carom-remote.1", "socket"), ("carom-remote-resize.1", "memory")] {
            let text = std::fs::read_to_string(dir.path().join(page)).unwrap();
            assert!(text.starts_with(".ie") && text.contains(word), "{page}: {text}");
        }
    }

    /// `man` breaks lines only at spaces, so a longer word would extend beyond the line. On a terminal with 80 columns, the descriptions
    /// have lines of 66 columns.
    #[test]
    fn words_of_man_pages_fit_into_a_line() {
        let dir = tempfile::tempdir().unwrap();
        man_pages(dir.path()).unwrap();
        for page in std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()) {
            let text =
                std::fs::read_to_string(&page).unwrap().replace("\\fB", "").replace("\\fR", "").replace('\\', "");
            for word in text.split_whitespace() {
                assert!(word.chars().count() <= 66, "{}: {word}", page.display());
            }
        }
    }
}
