// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processes that serve devices to a VMM.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use std::{fs, thread};

use carom_tools::children::KilledOnDrop;

/// Starts a server and waits until it listens at `socket`.
pub(crate) fn serve(command: &mut Command, socket: &Path) -> KilledOnDrop {
    let _ = fs::remove_file(socket);
    let server = KilledOnDrop(command.spawn().expect("the server starts"));
    let start = Instant::now();
    while !socket.exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "the server does not listen");
        thread::sleep(Duration::from_millis(20));
    }
    server
}
