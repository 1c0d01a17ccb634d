// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Carom process of a test, which the test controls by API calls. Dropping [`ApiVmm`] ends the process.

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

/// Interval between checks of the API, the console and the process.
const POLL: Duration = Duration::from_millis(50);

/// A failed test prints at most this number of characters from the end of the console, and at most this number from the end of
/// stderr.
const SHOWN: usize = 4000;

/// Maximum time for an answer. Answers to boot requests take longest: booting pins memory and loads files, which takes seconds
/// under emulation.
const ANSWER_TIME: Duration = Duration::from_secs(60);

/// Calls the API at `socket` and returns status and body.
///
/// # Errors
/// Fails if there is no answer, or if the answer is not HTTP.
pub fn exchange(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, String)> {
    let mut stream = UnixStream::connect(socket).context("cannot connect to the API")?;
    stream.set_read_timeout(Some(ANSWER_TIME))?;
    let body = body.map_or(String::new(), Value::to_string);
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len())?;
    let mut reader = BufReader::new(stream);
    let mut status = String::new();
    reader.read_line(&mut status)?;
    let status = status.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no HTTP status in the answer")?;
    Ok((status, answer_body(&mut reader)?))
}

/// Reads the body of an answer whose status line has been read. Cloud Hypervisor keeps the connection open in spite of
/// `Connection: close` in the request. So only `Content-Length` in the header tells where the body ends.
fn answer_body(reader: &mut impl BufRead) -> Result<String> {
    let mut len = 0;
    loop {
        let mut line = String::new();
        ensure!(reader.read_line(&mut line)? > 0, "the answer ends within its header");
        match line.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                len = value.trim().parse().context("invalid Content-Length in the answer")?;
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

/// Starts carom. Its socket, event file and stderr are in `dir`.
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

/// Running process `carom --api-socket`, and the files of the guest that a test boots in it.
pub struct ApiVmm {
    child: Child,
    dir: TempDir,
    kernel: PathBuf,
}

impl ApiVmm {
    /// Starts Carom without a VM. The tests later boot a guest from the files [`ApiVmm::kernel`] and [`ApiVmm::initramfs`].
    /// This guest has the patched kernel and runs `job`.
    ///
    /// # Errors
    /// Fails if Carom cannot be started or its API does not answer.
    pub fn start(site: &Site, job: &str) -> Result<Self> {
        Self::start_with(site, Kernel::Patched, job)
    }

    /// Like [`ApiVmm::start`], with `kernel` instead of the patched kernel.
    ///
    /// # Errors
    /// Fails if the site lacks the kernel, Carom cannot be started, or its API does not answer.
    pub fn start_with(site: &Site, kernel: Kernel, job: &str) -> Result<Self> {
        Self::start_with_files(site, kernel, &[Extra { path: "job".into(), bytes: job.as_bytes().to_vec() }])
    }

    /// Like [`ApiVmm::start_with`], with an additional program `/bin/NAME` in the guest.
    ///
    /// # Errors
    /// Fails if the site lacks the kernel, Carom cannot be started, or its API does not answer.
    pub fn start_with_program(site: &Site, kernel: Kernel, name: &str, program: Vec<u8>, job: &str) -> Result<Self> {
        let program = Extra { path: format!("bin/{name}"), bytes: program };
        Self::start_with_files(site, kernel, &[program, Extra { path: "job".into(), bytes: job.as_bytes().to_vec() }])
    }

    /// Like [`ApiVmm::start_with`], with a copy of the guest's kernel as the file `/bin/kernel` in the guest.
    ///
    /// # Errors
    /// Fails if the site lacks the kernel, Carom cannot be started, or its API does not answer.
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

    /// Starts another process after the previous process has ended. The new process has the same socket and files, and additional
    /// arguments. The event file starts empty.
    ///
    /// # Errors
    /// Fails if the previous process has not ended, Carom cannot be started, or its API does not answer.
    pub fn start_again(&mut self, site: &Site, arguments: &[&str]) -> Result<()> {
        ensure!(self.child.try_wait()?.is_some(), "carom is still running");
        self.child = spawn(site, self.dir.path(), arguments)?;
        self.wait_for_api()
    }

    fn wait_for_api(&self) -> Result<()> {
        let start = Instant::now();
        while UnixStream::connect(self.socket()).is_err() {
            ensure!(start.elapsed() < ANSWER_TIME, "cannot connect to carom's API");
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Returns the directory with the files of Carom and the guest. The directory is removed when this value is dropped.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns the path of the API socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Returns the path of the kernel for a guest.
    #[must_use]
    pub fn kernel(&self) -> &Path {
        &self.kernel
    }

    /// Returns the path of the initramfs with the job.
    #[must_use]
    pub fn initramfs(&self) -> PathBuf {
        self.dir.path().join("initramfs")
    }

    /// Returns the path of the file for the guest's console.
    #[must_use]
    pub fn console_file(&self) -> PathBuf {
        self.dir.path().join("console")
    }

    /// Returns the current text of the guest's console.
    #[must_use]
    pub fn console(&self) -> String {
        let bytes = fs::read(self.console_file()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    /// Returns the text of the guest's console without the last line if this line is incomplete.
    #[must_use]
    pub fn whole_lines(&self) -> String {
        let mut console = self.console();
        console.truncate(console.rfind('\n').unwrap_or(0));
        console
    }

    /// Waits at most `limit` until the console contains `text` at least `times` times.
    ///
    /// # Errors
    /// Fails if the console does not contain the text in time.
    pub fn wait_for(&self, text: &str, times: usize, limit: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            let console = self.console();
            if console.matches(text).count() >= times {
                return Ok(());
            }
            if start.elapsed() > limit {
                bail!("the console does not contain {text:?} {times} times after {limit:?}");
            }
            thread::sleep(POLL);
        }
    }

    /// Calls the API and returns status and body. An empty body becomes null.
    ///
    /// # Errors
    /// Fails if there is no answer, or if the answer is not HTTP or does not match the API's document.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<(u16, Value)> {
        let (status, body) = self.exchange(method, path, body)?;
        document::check(method, path, status, &body)?;
        Ok((status, if body.is_empty() { Value::Null } else { serde_json::from_str(&body)? }))
    }

    /// Returns the body of the answer to a GET request for an API path.
    ///
    /// # Errors
    /// Fails if there is no answer, or if its status is not 200.
    pub fn text(&self, path: &str) -> Result<String> {
        let (status, body) = self.exchange("GET", path, None)?;
        ensure!(status == 200, "{path}: status {status}: {body}");
        Ok(body)
    }

    /// Runs carom-remote on this process's socket and returns its output.
    ///
    /// # Errors
    /// Fails if the exit status is not 0. The error contains stderr.
    pub fn remote(&self, site: &Site, arguments: &[&str]) -> Result<String> {
        let program = site.remote.as_deref().context("CAROM_REMOTE is not set; run scripts/test, which sets it")?;
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

    /// Returns carom's stderr.
    #[must_use]
    pub fn said(&self) -> String {
        fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default()
    }

    /// Returns the process ID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the events so far.
    ///
    /// # Errors
    /// Fails if the event file contains a line that is not an event.
    pub fn events(&self) -> Result<Vec<Event>> {
        events::read(&self.dir.path().join("events"))
    }

    /// Waits for the end of the process.
    ///
    /// # Errors
    /// Fails if the process does not end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(start.elapsed() < limit, "carom did not end within {limit:?}");
            thread::sleep(POLL);
        }
    }
}

impl Drop for ApiVmm {
    /// If the test failed, shows the end of the guest's console and of the VMM's stderr. Then ends the process.
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("end of the console:\n{}\nend of stderr:\n{}", end(&self.console()), end(&self.said()));
        }
        // Killing fails only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.wait(Duration::from_secs(30));
    }
}

/// Returns the last [`SHOWN`] characters of a text.
fn end(text: &str) -> &str {
    let from = text.char_indices().rev().nth(SHOWN - 1).map_or(0, |(at, _)| at);
    &text[from..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_body_has_the_length_in_its_header() {
        let answer = |text: &str| answer_body(&mut text.as_bytes());
        assert_eq!(answer("Server: s\r\nContent-length: 3\r\n\r\nabcdef").unwrap(), "abc");
        assert_eq!(answer("Server: s\r\n\r\n").unwrap(), "");
        assert!(answer("Server: s\r\n").unwrap_err().to_string().contains("ends within its header"));
        assert!(answer("Content-Length: 3\r\n\r\nab").unwrap_err().to_string().contains("after 2 of 3 bytes"));
    }
}
