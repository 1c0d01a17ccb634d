// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs programs. A signal that asks this process to end also ends the started program. An error names the program that failed.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::children::run_command;
use crate::tools::Tools;

/// Maximum number of log lines shown when a program fails.
const TAIL: usize = 40;

/// Returns a patch(1) command that requires the patch's full context in `tree`.
pub(crate) fn patch_command(tree: &Path, patch: &Path) -> Command {
    let mut command = Command::new("patch");
    command.arg("-d").arg(tree).args(["-p1", "-s", "-F0", "--no-backup-if-mismatch", "-i"]).arg(patch);
    command
}

impl Tools<'_> {
    /// Runs a program. Its output goes to stderr.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        let child = command.stdin(Stdio::null()).stdout(io::stderr()).spawn();
        self.attend(child, command)
    }

    /// Applies a patch. The patch's full context must be in `tree`.
    pub(crate) fn patch(&self, tree: &Path, patch: &Path) -> Result<()> {
        self.run(&mut patch_command(tree, patch)).with_context(|| format!("{} does not apply", patch.display()))
    }

    /// Runs a program without redirecting its input or output. Returns its exit status, or 1 if a signal ended the program.
    pub(crate) fn status(&self, command: &mut Command, starting: &'static str) -> Result<u8> {
        self.progress.end();
        let mut child = command.spawn().context(starting)?;
        let Some(status) = run_command(&mut child, self.signals)? else { bail!("interrupted") };
        Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }

    /// Runs a program and shows its output.
    pub(crate) fn run_shown(&self, command: &mut Command) -> Result<()> {
        self.show(command.stdin(Stdio::null()))
    }

    /// Runs a program with `input` as its standard input, and shows the program's output.
    pub(crate) fn run_shown_with(&self, command: &mut Command, input: File) -> Result<()> {
        self.show(command.stdin(input))
    }

    fn show(&self, command: &mut Command) -> Result<()> {
        self.progress.end();
        if let Some(output) = &self.output {
            let copy = || output.try_clone().context("cannot capture a program's output");
            command.stdout(copy()?).stderr(copy()?);
        }
        let child = command.spawn();
        self.attend(child, command)
    }

    /// Runs a program whose output goes to the file `log`. If the program fails, shows the end of the log.
    pub(crate) fn run_quietly(&self, command: &mut Command, log: &Path) -> Result<()> {
        let file = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let again = file.try_clone().with_context(|| log.display().to_string())?;
        let child = command.stdin(Stdio::null()).stdout(file).stderr(again).spawn();
        self.attend(child, command).inspect_err(|_| self.show_tail(log))
    }

    /// Runs a program and returns its standard output. Its messages go to stderr.
    pub(crate) fn output(&self, command: &mut Command) -> Result<String> {
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.with_context(|| starting(command))?;
        let mut stdout = child.stdout.take().context("cannot capture a program's output")?;
        let reader = thread::spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).map(|_| bytes)
        });
        self.attend(Ok(child), command)?;
        let bytes = reader
            .join()
            .map_err(|_| anyhow!("the thread that reads a program's output panicked"))?
            .with_context(|| starting(command))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Runs a program silently. Returns true if the program starts and ends with status 0.
    pub(crate) fn succeeds(&self, command: &mut Command) -> bool {
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        quiet.spawn().is_ok_and(|mut child| {
            run_command(&mut child, self.signals).is_ok_and(|status| status.is_some_and(|status| status.success()))
        })
    }

    /// Runs a program that reports its progress. Passes each output line to `line`, and writes the output to the file `log`. If the program
    /// fails, shows the end of the log.
    pub(crate) fn run_watched(&self, command: &mut Command, log: &Path, mut line: impl FnMut(&str)) -> Result<()> {
        let mut file = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let (reader, writer) = io::pipe().context("cannot create a pipe")?;
        let again = writer.try_clone().context("cannot create a pipe")?;
        let child = command.stdin(Stdio::null()).stdout(writer).stderr(again).spawn();
        // The pipe ends only when no process has its write end open, so drop the command's copies.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let (sender, lines) = mpsc::channel();
        let reader = thread::spawn(move || {
            for line in BufReader::new(reader).split(b'\n') {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut child = child.with_context(|| starting(command))?;
        let shown = thread::scope(|scope| {
            let waiter = scope.spawn(|| run_command(&mut child, self.signals));
            let mut written = Ok(());
            for bytes in lines {
                written = written.and_then(|()| file.write_all(&bytes)).and_then(|()| file.write_all(b"\n"));
                line(&String::from_utf8_lossy(&bytes));
            }
            written.with_context(|| format!("cannot write {}", log.display()))?;
            waiter.join().map_err(|_| anyhow!("the thread that waits for a program panicked"))?
        });
        // The reader thread has ended, because the pipe has ended.
        let _ = reader.join();
        let Some(status) = shown? else { bail!("interrupted") };
        if !status.success() {
            self.show_tail(log);
            bail!("{} failed ({status})", name(command));
        }
        Ok(())
    }

    /// Runs a program with `input` as its standard input, and returns its output.
    pub(crate) fn filter(&self, command: &mut Command, input: Vec<u8>) -> Result<Vec<u8>> {
        self.go_on()?;
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.with_context(|| starting(command))?;
        let mut stdin = child.stdin.take().context("cannot open a program's input")?;
        let writer = thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().with_context(|| starting(command))?;
        ensure!(output.status.success(), "{} failed ({})", name(command), output.status);
        writer
            .join()
            .map_err(|_| anyhow!("the thread that writes a program's input panicked"))?
            .with_context(|| starting(command))?;
        Ok(output.stdout)
    }

    fn attend(&self, child: io::Result<Child>, command: &Command) -> Result<()> {
        let mut child = child.with_context(|| starting(command))?;
        let Some(status) = run_command(&mut child, self.signals)? else { bail!("interrupted") };
        ensure!(status.success(), "{} failed ({status})", name(command));
        Ok(())
    }

    fn show_tail(&self, log: &Path) {
        self.progress.end();
        let text = fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(TAIL)..] {
            eprintln!("{line}");
        }
    }
}

/// Returns a command's program and first argument, for messages.
fn name(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args().take(1));
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn starting(command: &Command) -> String {
    format!("cannot run {}", command.get_program().display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools;

    fn with_tools(test: impl FnOnce(&Tools, &Path)) {
        let dir = tempfile::tempdir().unwrap();
        tools::with_tools(dir.path(), dir.path(), |tools| test(tools, dir.path()));
    }

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn program_output_and_failure_are_returned() {
        with_tools(|tools, _| {
            assert_eq!(tools.output(&mut sh("echo a; echo b")).unwrap(), "a\nb\n");
            assert!(tools.output(&mut sh("exit 3")).unwrap_err().to_string().starts_with("sh -c failed"));
            assert!(tools.run(&mut Command::new("/no/such/program")).is_err());
            assert!(tools.succeeds(&mut sh("exit 0")) && !tools.succeeds(&mut sh("exit 1")));
            assert_eq!(tools.filter(&mut sh("cat"), b"x".to_vec()).unwrap(), b"x");
        });
    }

    #[test]
    fn lines_of_both_outputs_are_seen_and_kept() {
        with_tools(|tools, dir| {
            let mut lines = Vec::new();
            let log = dir.join("log");

            let script = "echo one; echo two >&2; exit 1";
            tools.run_watched(&mut sh(script), &log, |line| lines.push(line.to_owned())).unwrap_err();

            assert_eq!(lines, ["one", "two"]);
            assert_eq!(fs::read_to_string(log).unwrap(), "one\ntwo\n");
        });
    }
}
