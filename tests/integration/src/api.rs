// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Carom driven by its API: a process that a test starts, calls and looks at, and that does not outlive it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::Site;
use crate::document;
use crate::events::{self, Event};
use crate::initramfs::{self, Extra};
use crate::vmm::Kernel;

/// How often something is looked at again.
const POLL: Duration = Duration::from_millis(50);

/// Characters of the console, and of stderr, that are shown of a test that failed.
const SHOWN: usize = 4000;

/// Longest wait for an answer: booting pins and loads, which takes seconds under emulation.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// Calls the API at `socket`; status and body.
///
/// # Errors
/// When there is no answer, or none that is HTTP.
pub fn exchange(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, String)> {
    let mut stream = UnixStream::connect(socket).context("cannot connect to the API")?;
    stream.set_read_timeout(Some(ANSWER_TIME))?;
    let body = body.map_or(String::new(), Value::to_string);
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len())?;
    let mut reader = BufReader::new(stream);
    let mut status = String::new();
    reader.read_line(&mut status)?;
    let status = status.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no status in the answer")?;
    Ok((status, answer_body(&mut reader)?))
}

/// The body of an answer whose status line was read. Cloud Hypervisor keeps a connection that its client wants closed, so
/// the head says where the body ends.
fn answer_body(reader: &mut impl BufRead) -> Result<String> {
    let mut len = 0;
    loop {
        let mut line = String::new();
        ensure!(reader.read_line(&mut line)? > 0, "no end of the answer's head");
        match line.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                len = value.trim().parse().context("Content-Length of the answer")?;
            }
            Some(_) => {}
            None => break,
        }
    }
    let mut body = String::new();
    reader.take(len).read_to_string(&mut body)?;
    ensure!(body.len() as u64 == len, "the answer's body ends after {} of {len} bytes", body.len());
    Ok(body)
}

/// Starts carom with its files in `dir`.
fn spawn(site: &Site, dir: &Path, arguments: &[&str]) -> Result<Child> {
    Command::new(&site.carom)
        .arg("--api-socket")
        .arg(format!("path={}", dir.join("socket").display()))
        .arg("--event-monitor")
        .arg(format!("path={}", dir.join("events").display()))
        .arg("--no-shutdown")
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(File::create(dir.join("stderr")).context("cannot create a file for stderr")?)
        .spawn()
        .context("cannot start carom")
}

/// A running `carom --api-socket`, with the files of a guest to boot.
pub struct ApiVmm {
    child: Child,
    dir: TempDir,
    kernel: PathBuf,
}

impl ApiVmm {
    /// Starts it, with no VM yet. A guest that is booted from [`ApiVmm::kernel`] and [`ApiVmm::initramfs`] has the patched
    /// kernel and runs `job`.
    ///
    /// # Errors
    /// When it cannot be started, or its API does not answer.
    pub fn start(site: &Site, job: &str) -> Result<Self> {
        Self::start_with(site, Kernel::Patched, job)
    }

    /// As [`ApiVmm::start`], with a kernel of choice.
    ///
    /// # Errors
    /// When the site lacks the kernel, Carom cannot be started, or its API does not answer.
    pub fn start_with(site: &Site, kernel: Kernel, job: &str) -> Result<Self> {
        Self::start_with_files(site, kernel, &[Extra { path: "job".into(), bytes: job.as_bytes().to_vec() }])
    }

    /// As [`ApiVmm::start_with`]. The guest also has a program, `/bin/NAME`.
    ///
    /// # Errors
    /// When the site lacks the kernel, Carom cannot be started, or its API does not answer.
    pub fn start_with_program(site: &Site, kernel: Kernel, name: &str, program: Vec<u8>, job: &str) -> Result<Self> {
        let program = Extra { path: format!("bin/{name}"), bytes: program };
        Self::start_with_files(site, kernel, &[program, Extra { path: "job".into(), bytes: job.as_bytes().to_vec() }])
    }

    /// As [`ApiVmm::start_with`]. The guest also has its own kernel as the file `/bin/kernel`.
    ///
    /// # Errors
    /// When the site lacks the kernel, Carom cannot be started, or its API does not answer.
    pub fn start_with_its_kernel(site: &Site, kernel: Kernel, job: &str) -> Result<Self> {
        let (file, _) = kernel.files(site)?;
        let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        Self::start_with_program(site, kernel, "kernel", bytes, job)
    }

    fn start_with_files(site: &Site, kernel: Kernel, files: &[Extra]) -> Result<Self> {
        let dir = tempfile::tempdir().context("cannot create a directory for the guest's files")?;
        let (kernel, base) = kernel.files(site)?;
        initramfs::append(base, files, &dir.path().join("initramfs"))?;
        let child = spawn(site, dir.path(), &[])?;
        let vmm = Self { child, dir, kernel: kernel.to_path_buf() };
        vmm.wait_for_api()?;
        Ok(vmm)
    }

    /// Starts another process in the place of one that has ended: with further arguments, and with the same socket and files. That
    /// of events begins anew.
    ///
    /// # Errors
    /// When the former has not ended, this one cannot be started, or its API does not answer.
    pub fn start_again(&mut self, site: &Site, arguments: &[&str]) -> Result<()> {
        ensure!(self.child.try_wait()?.is_some(), "carom runs still");
        self.child = spawn(site, self.dir.path(), arguments)?;
        self.wait_for_api()
    }

    fn wait_for_api(&self) -> Result<()> {
        let start = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            ensure!(start.elapsed() < ANSWER_TIME, "its API cannot be connected to");
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Directory of the files, which is removed in the end.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Socket of its API.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Kernel for a guest.
    #[must_use]
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// Initramfs with the job.
    #[must_use]
    pub fn initramfs(&self) -> PathBuf {
        self.dir.path().join("initramfs")
    }

    /// File for the guest's console.
    #[must_use]
    pub fn console_file(&self) -> PathBuf {
        self.dir.path().join("console")
    }

    /// What is on the guest's console now.
    #[must_use]
    pub fn console(&self) -> String {
        let bytes = fs::read(self.console_file()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    /// Complete lines on the guest's console now, without a last line that has not ended yet.
    #[must_use]
    pub fn whole_lines(&self) -> String {
        let mut console = self.console();
        console.truncate(console.rfind('\n').unwrap_or(0));
        console
    }

    /// Waits until the console has `text` `times` times.
    ///
    /// # Errors
    /// When `limit` is over.
    pub fn wait_for(&self, text: &str, times: usize, limit: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let console = self.console();
            if console.matches(text).count() >= times {
                return Ok(());
            }
            if start.elapsed() > limit {
                bail!("no {text:?} ({times} times) on the console after {limit:?}");
            }
            thread::sleep(POLL);
        }
    }

    /// Calls the API; status and body, null where there is none.
    ///
    /// # Errors
    /// When there is no answer, or none that is HTTP, or it is not as the API's document says.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        let (status, body) = self.exchange(method, path, body)?;
        document::check(method, path, status, &body)?;
        Ok((status, if body.is_empty() { Value::Null } else { serde_json::from_str(&body)? }))
    }

    /// What is at a path, as text.
    ///
    /// # Errors
    /// When there is no answer, or another than 200.
    pub fn text(&self, path: &str) -> Result<String> {
        let (status, body) = self.exchange("GET", path, None)?;
        ensure!(status == 200, "{path}: status {status}: {body}");
        Ok(body)
    }

    /// Runs carom-remote on its socket; what it printed.
    ///
    /// # Errors
    /// When it ends with another status than 0; with what it said.
    pub fn remote(&self, site: &Site, arguments: &[&str]) -> Result<String> {
        let program = site.remote.as_deref().context("CAROM_REMOTE is not set")?;
        let output = Command::new(program)
            .args(arguments)
            .env("CAROM_API_SOCKET", self.socket())
            .output()
            .context("cannot start carom-remote")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "carom-remote {}: {}: {said}", arguments.join(" "), output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn exchange(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, String)> {
        exchange(&self.socket(), method, path, body)
    }

    /// What it has said on stderr.
    #[must_use]
    pub fn said(&self) -> String {
        fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default()
    }

    /// Process ID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The events so far.
    ///
    /// # Errors
    /// When the file holds something else.
    pub fn events(&self) -> Result<Vec<Event>> {
        events::read(&self.dir.path().join("events"))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it does not end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(start.elapsed() < limit, "carom does not end");
            thread::sleep(POLL);
        }
    }
}

impl Drop for ApiVmm {
    /// Of a test that fails, what guest and VMM have said is told.
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("end of the console:\n{}\nand of stderr:\n{}", end(&self.console()), end(&self.said()));
        }
        // Fails only where it has ended already.
        let _ = self.child.kill();
        let _ = self.wait(Duration::from_secs(30));
    }
}

/// The end of a text that may be long.
fn end(text: &str) -> &str {
    let from = text.char_indices().rev().nth(SHOWN - 1).map_or(0, |(at, _)| at);
    &text[from..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_of_an_answer_ends_where_its_head_says_so() {
        let answer = |text: &str| answer_body(&mut text.as_bytes());
        assert_eq!(answer("Server: s\r\nContent-length: 3\r\n\r\nabcdef").unwrap(), "abc");
        assert_eq!(answer("Server: s\r\n\r\n").unwrap(), "");
        assert!(answer("Server: s\r\n").unwrap_err().to_string().contains("no end"));
        assert!(answer("Content-Length: 3\r\n\r\nab").unwrap_err().to_string().contains("after 2 of 3 bytes"));
    }
}
