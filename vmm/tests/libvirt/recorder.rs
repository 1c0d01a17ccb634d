// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Proxy between libvirt and the VMM that libvirt has started. It records the requests.
//!
//! The proxy is a separate process, which `emulator.sh` starts. This process inherits libvirt's listening socket.

use std::collections::VecDeque;
use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Variable with the test's directory. Its subdirectory `recorded` gets a file for each request.
const DIRECTORY: &str = "CAROM_LIBVIRT_DIRECTORY";
/// Variable with the number of libvirt's listening descriptor.
const LISTENER: &str = "CAROM_LIBVIRT_LISTENER";
/// Variable with the socket of the VMM.
const VMM: &str = "CAROM_LIBVIRT_VMM";

/// Maximum number of descriptors with a message.
const MAX_FDS: usize = 16;

/// Forwards connections until the process ends with its namespace. Does nothing if `emulator.sh` did not start the process.
pub(crate) fn run() {
    let (Ok(listener), Some(vmm)) = (env::var(LISTENER), env::var_os(VMM)) else { return };
    // SAFETY: libvirt passed the descriptor to `emulator.sh`, and only this process uses it. The VMM gets another socket.
    let listener = unsafe { UnixListener::from_raw_fd(listener.parse().unwrap()) };
    let vmm = PathBuf::from(vmm);
    let directory = PathBuf::from(env::var_os(DIRECTORY).unwrap()).join("recorded");
    for client in listener.incoming() {
        let (client, server, directory) = (client.unwrap(), connect(&vmm), directory.clone());
        thread::spawn(move || pass_on(client, server, &directory));
    }
}

fn connect(vmm: &Path) -> UnixStream {
    loop {
        match UnixStream::connect(vmm) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Forwards one connection. libvirt sends the next request only after the answer. So when an answer arrives, the file of its request
/// contains the whole request.
fn pass_on(client: UnixStream, server: UnixStream, directory: &Path) {
    let (from_server, to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let answers = thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok((len @ 1.., _)) = receive(&from_server, &mut bytes) {
            if (&to_client).write_all(&bytes[..len]).is_err() {
                break;
            }
        }
        let _ = to_client.shutdown(std::net::Shutdown::Both);
    });
    let mut requests = Requests::default();
    let mut bytes = [0; 4096];
    while let Ok((len @ 1.., fds)) = receive(&client, &mut bytes) {
        // The request is recorded before it is forwarded, because it may end the VMM.
        requests.add(&bytes[..len], directory);
        let numbers: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let sent = server.send_with_fds(&[&bytes[..len]], &numbers).unwrap();
        (&server).write_all(&bytes[sent..len]).unwrap();
    }
    let _ = server.shutdown(std::net::Shutdown::Both);
    answers.join().unwrap();
}

fn receive(stream: &UnixStream, bytes: &mut [u8]) -> Result<(usize, Vec<File>), vmm_sys_util::errno::Error> {
    let mut numbers = [-1; MAX_FDS];
    let mut buffers = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    // SAFETY: the buffer is `bytes`, which may hold any bytes.
    let (len, count) = unsafe { stream.recv_with_fds(&mut buffers, &mut numbers) }?;
    // SAFETY: the descriptors were received by this process only.
    Ok((len, numbers[..count].iter().map(|fd| unsafe { File::from_raw_fd(*fd) }).collect()))
}

/// Received bytes of requests that are not complete.
#[derive(Default)]
struct Requests(VecDeque<u8>);

impl Requests {
    /// Adds bytes, and writes a file for each completed request.
    fn add(&mut self, bytes: &[u8], directory: &Path) {
        self.0.extend(bytes);
        while let Some(len) = self.first() {
            let request: Vec<u8> = self.0.drain(..len).collect();
            let number = fs::read_dir(directory).unwrap().count();
            // The file gets its final name when it contains the whole request.
            let unfinished = directory.with_file_name("unfinished");
            fs::write(&unfinished, request).unwrap();
            fs::rename(unfinished, directory.join(format!("{number:02}"))).unwrap();
        }
    }

    /// Returns the length of the first request in bytes, if it is complete.
    fn first(&mut self) -> Option<usize> {
        let text = String::from_utf8_lossy(self.0.make_contiguous()).into_owned();
        let head = text.find("\r\n\r\n")? + 4;
        let length = text[..head].to_ascii_lowercase();
        let length =
            length.split("\r\ncontent-length: ").nth(1).map_or(0, |rest| rest.lines().next().unwrap().parse().unwrap());
        (text.len() >= head + length).then_some(head + length)
    }
}
