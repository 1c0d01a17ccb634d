// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests the API against its own OpenAPI document with schemathesis, on a VMM without a running guest.

use std::fs;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::cargo::WORKSPACE;
use crate::children::KilledOnDrop;
use crate::key::Key;
use crate::tools::Tools;

/// Time after which a program counts as hung. On a busy machine, an answer or the program's end may take long.
const HUNG: Duration = Duration::from_secs(120);

/// VM with windows. The VM need not boot, so its files need not exist.
const VM: &str = r#"{"payload": {"kernel": "/no/such/kernel"}, "devices": [{"path": "/no/such/device", "iommu": true}],
 "iommu_bounce": {"max": 1073741824}}"#;

impl Tools<'_> {
    pub(super) fn test_api(&self, out: &Path) -> Result<()> {
        self.need_packages("testing the API", &["python3-venv", "curl"])?;
        let python = self.schemathesis()?.join("bin/python");
        // Build together with a test of the package, so that cargo uses the features of the stage `unit`.
        self.build("carom", &[&WORKSPACE[..], &["--bin", "carom", "--test", "api_refusals"]].concat())?;
        let dir = out.join("api");
        fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let socket = dir.join("socket");
        let mut carom = Command::new(self.target_dir()?.join("debug/carom"));
        carom.arg("--api-socket").arg(format!("path={}", socket.display())).arg("--log-file").arg(dir.join("log"));
        let mut carom = KilledOnDrop(carom.spawn().context("cannot start carom")?);
        let start = Instant::now();
        while self.request(&socket, "GET", "vmm.ping", None).is_err() {
            ensure!(start.elapsed() < HUNG, "carom does not answer GET /api/v1/vmm.ping");
            self.go_on()?;
            thread::sleep(Duration::from_millis(50));
        }
        let check = Check { python, port: forward(&socket)?, dir };
        self.print("-- creating and deleting VMs\n");
        self.check_api(&check, &["--exclude-path", "/api/v1/vmm.shutdown"])?;
        // The second run tests operations that need a VM with windows.
        self.print("-- with an existing VM\n");
        // After the first run, the VM may be missing. So ignore an error.
        let _ = self.request(&socket, "PUT", "vm.delete", None);
        self.request(&socket, "PUT", "vm.create", Some(VM))?;
        self.check_api(&check, &["--exclude-path-regex", "/(vmm.shutdown|vm.create|vm.delete)$"])?;
        self.request(&socket, "PUT", "vmm.shutdown", None)?;
        let start = Instant::now();
        let status = loop {
            if let Some(status) = carom.0.try_wait().context("cannot wait for carom")? {
                break status;
            }
            ensure!(start.elapsed() < HUNG, "carom does not end after vmm.shutdown");
            thread::sleep(Duration::from_millis(20));
        };
        ensure!(status.success(), "carom ended with {status}");
        ensure!(!socket.exists(), "carom ended without removing its API socket");
        Ok(())
    }

    fn schemathesis(&self) -> Result<PathBuf> {
        let list = self.checkout.join("scripts/lib/schemathesis.txt");
        self.cached("schemathesis", &Key::default().path(&list)?.finish(), |dir| {
            self.progress.show("installing schemathesis (once)");
            self.run(Command::new("python3").args(["-m", "venv"]).arg(dir))?;
            let mut pip = Command::new(dir.join("bin/python"));
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]).arg(&list);
            self.run(&mut pip)
        })
    }

    /// Checks every operation with valid and invalid bodies.
    ///
    /// schemathesis does not check that all valid bodies are accepted: the document lacks rules between fields, and rules that depend on
    /// the VM's state. The API answers 500 to a call that does not fit the VM's state. `schemathesis_checks.py` distinguishes this answer
    /// from a failure.
    fn check_api(&self, check: &Check, more: &[&str]) -> Result<()> {
        let log = check.dir.join("schemathesis");
        let document = format!("http://127.0.0.1:{}/api/v1/openapi.json", check.port);
        // schemathesis keeps a cache in its working directory. An answer that takes 30 s counts as a hang. A shorter delay may mean that
        // the machine is busy.
        let mut python = Command::new(&check.python);
        python.args([
            "-m",
            "schemathesis.cli",
            "run",
            &document,
            "--exclude-checks",
            "positive_data_acceptance,not_a_server_error",
        ]);
        python.env("SCHEMATHESIS_HOOKS", "schemathesis_checks").env("PYTHONPATH", self.checkout.join("scripts/lib"));
        // Python must not write into the checkout.
        python.env("PYTHONDONTWRITEBYTECODE", "1");
        python.args(["--max-examples", "50", "--request-timeout", "30", "--warnings", "off", "--no-color"]).args(more);
        if let Err(error) = self.run_quietly(python.current_dir(&check.dir), &log) {
            self.print(&fs::read_to_string(&log).unwrap_or_default());
            return Err(error);
        }
        let said = fs::read_to_string(&log).with_context(|| format!("cannot read {}", log.display()))?;
        self.print(&summary(&said));
        Ok(())
    }

    fn request(&self, socket: &Path, method: &str, path: &str, body: Option<&str>) -> Result<()> {
        let mut curl = Command::new("curl");
        curl.args(["-s", "--fail", "-X", method, "--unix-socket"]).arg(socket).args(["-o", "/dev/null"]);
        if let Some(body) = body {
            curl.args(["-d", body]);
        }
        let path = format!("http://localhost/api/v1/{path}");
        ensure!(self.succeeds(curl.arg(&path)), "{method} {path} failed");
        Ok(())
    }
}

struct Check {
    python: PathBuf,
    port: u16,
    dir: PathBuf,
}

/// Forwards TCP connections to `socket` as long as this process lives, because schemathesis supports only TCP. Returns the port.
fn forward(socket: &Path) -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("cannot listen for TCP connections")?;
    let port = listener.local_addr().context("cannot get the port of the TCP listener")?.port();
    let socket = socket.to_path_buf();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // If a connection cannot be forwarded, `client` is dropped, which closes the connection.
            if let Ok(server) = UnixStream::connect(&socket) {
                let _ = join(client, server);
            }
        }
    });
    Ok(port)
}

/// Forwards data in both directions until both ends are closed. Each direction has its own thread.
fn join(mut client: TcpStream, mut server: UnixStream) -> io::Result<()> {
    let (mut from, mut to) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    thread::spawn(move || {
        let _ = io::copy(&mut server, &mut client);
        let _ = client.shutdown(Shutdown::Both);
    });
    Ok(())
}

/// Returns schemathesis' lines with the number of test cases.
fn summary(said: &str) -> String {
    let lines = said.lines().skip_while(|line| !line.starts_with("Test cases:"));
    let mut summary = String::new();
    for line in lines {
        summary += &format!("{line}\n");
        if line.starts_with("Seed") {
            break;
        }
    }
    summary
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn bytes_pass_both_ways() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let server = UnixListener::bind(&socket).unwrap();
        let answers = thread::spawn(move || {
            let (mut connection, _) = server.accept().unwrap();
            let mut said = String::new();
            connection.read_to_string(&mut said).unwrap();
            connection.write_all(said.to_uppercase().as_bytes()).unwrap();
        });
        let mut client = TcpStream::connect(("127.0.0.1", forward(&socket).unwrap())).unwrap();
        client.write_all(b"hello").unwrap();
        client.shutdown(Shutdown::Write).unwrap();

        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();

        assert_eq!(answer, "HELLO");
        answers.join().unwrap();
    }

    #[test]
    fn summary_is_cut_out() {
        assert_eq!(summary("a\nTest cases:\n  7\nSeed: 1\nb\n"), "Test cases:\n  7\nSeed: 1\n");
        assert_eq!(summary("a\n"), "");
    }
}
