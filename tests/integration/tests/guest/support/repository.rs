// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signed repository of Debian packages, and a web server for it.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tempfile::TempDir;

/// Repository with a web server that runs until the tests end. The repository has a flat layout: `deb [signed-by=…]
/// http://HOST:PORT/ ./`.
pub(crate) struct Repository {
    pub(crate) port: u16,
    asked: Arc<Mutex<Vec<String>>>,
    dir: TempDir,
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn sha256(file: &Path) -> String {
    run(Command::new("sha256sum").arg(file)).split(' ').next().unwrap().into()
}

/// Creates a package with one file.
fn greeting(dir: &Path) -> PathBuf {
    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("DEBIAN")).unwrap();
    fs::create_dir_all(tree.join("usr/share/carom-greeting")).unwrap();
    let control = "Package: carom-greeting\nVersion: 1.0\nArchitecture: all\nMaintainer: T <t@packages.invalid>\nDescription: greeting\n";
    fs::write(tree.join("DEBIAN/control"), control).unwrap();
    fs::write(tree.join("usr/share/carom-greeting/text"), "hello from the repository\n").unwrap();
    let package = dir.join("carom-greeting_1.0_all.deb");
    run(Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).arg(&tree).arg(&package));
    package
}

impl Repository {
    /// Creates and serves a repository that contains a small package and the packages `more`. Signs the repository with a new
    /// key.
    pub(crate) fn serve(more: &[&Path]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (top, keys) = (dir.path().join("www"), dir.path().join("keys"));
        fs::create_dir_all(&top).unwrap();
        fs::create_dir(&keys).unwrap();
        fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let mut index = String::new();
        for source in [greeting(dir.path())].iter().map(PathBuf::as_path).chain(more.iter().copied()) {
            // apt encodes these characters of a version in the path that it requests.
            let name = source.file_name().unwrap().to_str().unwrap().replace(['~', '+'], "_");
            let file = top.join(&name);
            fs::copy(source, &file).unwrap();
            let size = fs::metadata(&file).unwrap().len();
            let control = run(Command::new("dpkg-deb").arg("--field").arg(&file));
            writeln!(index, "{control}Filename: ./{name}\nSize: {size}\nSHA256: {}\n", sha256(&file)).unwrap();
        }
        let packages = top.join("Packages");
        fs::write(&packages, &index).unwrap();
        let date = run(Command::new("date").args(["-Ru"]));
        let release = format!("Date: {}\nSHA256:\n {} {} Packages\n", date.trim(), sha256(&packages), index.len());
        let plain = dir.path().join("Release");
        fs::write(&plain, release.replace("+0000", "UTC")).unwrap();
        let gpg = || {
            let mut gpg = Command::new("gpg");
            gpg.args(["--batch", "--quiet", "--homedir"]).arg(&keys);
            gpg
        };
        let owner = "repository@packages.invalid";
        run(gpg().args(["--passphrase", "", "--quick-generate-key", owner, "ed25519", "sign", "1d"]));
        run(gpg().arg("--output").arg(top.join("key.gpg")).args(["--export", owner]));
        run(gpg().arg("--output").arg(top.join("InRelease")).arg("--clearsign").arg(&plain));
        run(Command::new("gpgconf").arg("--homedir").arg(&keys).args(["--kill", "all"]));

        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let names = asked.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client may close the connection during an answer.
                let _ = answer(stream, &top, &names);
            }
        });
        Self { port, asked, dir }
    }

    /// Serves a file in addition to the packages.
    pub(crate) fn publish(&self, file: &Path) {
        fs::copy(file, self.dir.path().join("www").join(file.file_name().unwrap())).unwrap();
    }

    /// Returns the requested paths, in order.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Answers one HTTP/1.1 request and closes the connection.
fn answer(mut stream: TcpStream, top: &Path, asked: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let path = first.split(' ').nth(1).unwrap_or_default();
    asked.lock().unwrap_or_else(PoisonError::into_inner).push(path.into());
    let name = path.rsplit('/').next().unwrap_or_default();
    match fs::read(top.join(name)) {
        Ok(bytes) => {
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", bytes.len())?;
            stream.write_all(&bytes)
        }
        Err(_) => write!(stream, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
    }
}
