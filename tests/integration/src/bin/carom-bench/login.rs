// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Time from the VMM's start to the login prompt of a Debian guest. The guest's disk is a virtio disk that the VMM emulates.

use std::fs;
use std::io::Read;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use carom_integration::vmm::boot_command;
use carom_integration::{Site, Vmm};
use carom_tools::children::KilledOnDrop;
use carom_tools::distribution::Distribution;

use crate::table::{Measured, Row, Scope, Shown, Table, Work, ms};

const SHOWN: &[Shown] = &[Shown::new("login_ms", "from the VMM's start to Debian's login prompt, in ms", 0)];

pub(crate) const TABLE: Table = Table::new("login", "vmm", SHOWN, work);

const RAM_MIB: u32 = 768;
/// Estimated duration of a boot in the rig.
const ESTIMATE: Duration = Duration::from_secs(80);
const PROMPT: &str = "debian login: ";

fn work(_: Scope, site: &Site) -> Vec<Work> {
    let of = |vmm: Vmm| Work {
        name: vmm.name().into(),
        estimate: ESTIMATE,
        run: Box::new(move |site, _| {
            let figures = [("login_ms", ms(log_in(vmm, site)?))];
            let row = Row::new([("vmm", vmm.name().into()), ("ram_mib", RAM_MIB.into())], figures);
            Ok(Measured { rows: vec![row], ..Measured::default() })
        }),
    };
    [Vmm::Carom, Vmm::Qemu, Vmm::CloudHypervisor].into_iter().filter(|vmm| vmm.is_at(site)).map(of).collect()
}

/// Boots a guest from a copy of its disk in the host's RAM. Returns the time from the VMM's start to the login prompt. The guest
/// ends at the prompt.
fn log_in(vmm: Vmm, site: &Site) -> Result<Duration> {
    let files = Distribution::in_directory(
        site.distribution.as_ref().context("CAROM_DISTRIBUTION is not set; run scripts/bench, which sets it")?,
    );
    let dir = tempfile::tempdir_in("/dev/shm").context("cannot create a directory for the disk in /dev/shm")?;
    let disk = dir.path().join("disk.raw");
    fs::copy(&files.disk, &disk).with_context(|| format!("cannot copy {}", files.disk.display()))?;
    let cmdline = format!("console=ttyS0 {} quiet", Distribution::ROOT);
    let mut command = boot_command(site, vmm, [&files.kernel, &files.initrd], &cmdline, &disk, RAM_MIB)?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let start = Instant::now();
    let mut machine = KilledOnDrop(command.spawn().with_context(|| format!("cannot start {}", vmm.name()))?);
    wait_for_prompt(&console(&mut machine.0)?, start)
}

/// Returns a channel with the output of the guest's console.
fn console(vmm: &mut Child) -> Result<Receiver<Vec<u8>>> {
    let mut output = vmm.stdout.take().context("the console is not piped")?;
    let (send, receive) = channel();
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = output.read(&mut bytes) {
            if send.send(bytes[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    Ok(receive)
}

fn wait_for_prompt(console: &Receiver<Vec<u8>>, start: Instant) -> Result<Duration> {
    let (mut shown, limit) = (Vec::new(), ESTIMATE * 4);
    loop {
        match console.recv_timeout(limit.saturating_sub(start.elapsed())) {
            Ok(more) => shown.extend(more),
            Err(RecvTimeoutError::Timeout) => bail!("no login prompt within {limit:?}:\n{}", end(&shown)),
            Err(RecvTimeoutError::Disconnected) => bail!("the VMM ended before the login prompt:\n{}", end(&shown)),
        }
        if shown.windows(PROMPT.len()).any(|part| part == PROMPT.as_bytes()) {
            return Ok(start.elapsed());
        }
        // Keep the end of the output, because the prompt may arrive in two parts.
        let known = shown.len().saturating_sub(4096);
        shown.drain(..known);
    }
}

fn end(shown: &[u8]) -> String {
    String::from_utf8_lossy(&shown[shown.len().saturating_sub(2000)..]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_is_found_if_it_arrives_in_parts() {
        let (send, receive) = channel();
        for part in ["\r\nDebian GNU/Linux 12 debian ttyS0\r\n\r\ndebian lo", "gin: "] {
            send.send(part.as_bytes().to_vec()).unwrap();
        }
        assert!(wait_for_prompt(&receive, Instant::now()).is_ok());
        drop(send);
        let error = wait_for_prompt(&receive, Instant::now()).unwrap_err().to_string();
        assert!(error.starts_with("the VMM ended"), "{error}");
    }
}
