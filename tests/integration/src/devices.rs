// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs for guests that use a device with and without bouncing. A job finds the device by the driver's name. Jobs of drives
//! verify all written data. Jobs of network cards send bytes to a server, and compare the bytes that the server returns. All jobs
//! print the time of the I/O and the counters of the device's pool.

use std::fmt;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use anyhow::{Context, Result, ensure};

use crate::Outcome;
use crate::workload::fio_verify_on;

/// Shell functions that read the clock, wait for a device, choose whether the device's DMA bounces, and print the counters of the
/// device's pool.
const FUNCTIONS: &str = r#"
started() { START=$(cut -d' ' -f1 /proc/uptime); }
took() { echo "CAROM-SECONDS $(awk -v start="$START" '{ print $1 - start }' /proc/uptime)"; }
# find_device CLASS DRIVER: waits until a PCI device of that driver has a block device or an interface (CLASS is block or net). Sets NAME
# to the name of the block device or interface, and DEVICE to the PCI device's address.
find_device() {
    i=0
    while [ $i -lt 300 ]; do
        for path in /sys/class/$1/*; do
            NAME=${path##*/}
            DEVICE=$(readlink -f "$path" | cut -d/ -f5)
            driver=$(readlink "/sys/bus/pci/devices/$DEVICE/driver")
            [ "${driver##*/}" != "$2" ] || return 0
        done
        i=$((i + 1))
        sleep 0.1
    done
    echo "CAROM-NO-DEVICE $1 $2"
    exit 94
}
choose() { echo "$1" >"/sys/bus/pci/devices/$DEVICE/iommu_bounce/mode" || exit 94; }
print_pool() { sed 's/^/CAROM-STAT-/' $(grep -lx "device $DEVICE" /sys/kernel/debug/iommu_bounce/*/stats); }
"#;

/// Shell functions that set the interface `CARD` up, send random bytes to the server and compare the returned bytes. `large`
/// uses one connection with large packets. `small` uses one connection with small packets. `several` uses four connections at
/// the same time.
const CARD_FUNCTIONS: &str = r#"
CARD=eth0
wait_for_card() {
    i=0
    while [ ! -e /sys/class/net/$CARD/device ] && [ $i -lt 100 ]; do i=$((i + 1)); sleep 0.1; done
    ip addr add $OWN/24 dev $CARD
    ip link set $CARD up
    i=0
    while [ "$(cat /sys/class/net/$CARD/carrier 2>/dev/null)" != 1 ] && [ $i -lt 200 ]; do i=$((i + 1)); sleep 0.1; done
}
large() {
    head -c $BYTES /dev/urandom >/tmp/sent
    nc -w 60 $SERVER $PORT </tmp/sent >/tmp/back
    cmp /tmp/sent /tmp/back && echo CAROM-SAME large
}
small() {
    ip link set $CARD mtu 128
    head -c 65536 /dev/urandom >/tmp/part
    dd if=/tmp/part bs=64 2>/dev/null | nc -w 60 $SERVER $PORT >/tmp/back
    cmp /tmp/part /tmp/back && echo CAROM-SAME small
    ip link set $CARD mtu 1500
}
several() {
    head -c 2097152 /dev/urandom >/tmp/sent
    for one in 1 2 3 4; do
        (nc -w 60 $SERVER $PORT </tmp/sent >/tmp/back$one
        cmp /tmp/sent /tmp/back$one && echo CAROM-SAME one of several) &
    done
    wait
}
"#;

/// Addresses of an echo server and of the guest that connects to it, and the number of bytes to send.
#[derive(Debug, Clone, Copy)]
pub struct Peer<'a> {
    /// The guest's own address.
    pub own: &'a str,
    /// The server's address.
    pub server: &'a str,
    /// The server's port.
    pub port: u16,
    /// Number of bytes that the shell function `large` sends.
    pub bytes: u64,
}

impl Peer<'_> {
    /// Returns the addresses in the network of the rig's cards, with the rig's echo server.
    #[must_use]
    pub const fn of_the_rig(bytes: u64) -> Self {
        Peer { own: "10.0.2.15", server: "10.0.2.100", port: 7, bytes }
    }

    /// Returns shell functions for a job that uses the card `eth0`. The job must call `wait_for_card` first. Then it can call
    /// `large`, `small` and `several`, which print `CAROM-SAME` if all bytes came back unchanged.
    #[must_use]
    pub fn functions(&self) -> String {
        let Self { own, server, port, bytes } = self;
        format!("OWN={own} SERVER={server} PORT={port} BYTES={bytes}\n{CARD_FUNCTIONS}")
    }
}

/// Starts an echo server on all addresses of this host, and returns the server's port. The server runs until this process ends.
///
/// # Errors
/// Fails if no port is available.
pub fn echo_server() -> io::Result<u16> {
    let listener = TcpListener::bind("0.0.0.0:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || echo(&stream));
        }
    });
    Ok(port)
}

/// Sends received bytes back. Ignores errors, because a guest may end at any time.
fn echo(stream: &TcpStream) {
    let _ = io::copy(&mut { stream }, &mut { stream });
    let _ = stream.shutdown(Shutdown::Write);
}

/// Returns a job with verified I/O on `mib` MiB of the drive whose controller has the driver `driver`, with `depth` requests in
/// flight. Before the I/O, the job writes `choice` to the controller's `iommu_bounce/mode`.
/// [`workload::check_verified`](crate::workload::check_verified) and [`figures`] read the output.
#[must_use]
pub fn drive_job(driver: &str, choice: &str, mib: u32, depth: u32) -> String {
    let verify = fio_verify_on("/dev/$NAME", mib, depth);
    format!("{FUNCTIONS}find_device block {driver}\nchoose {choice}\nstarted\n{verify}took\nprint_pool\n")
}

/// Returns a job that sends bytes to `peer` and back over the card with the driver `driver`, first in large packets and then in
/// small packets. The job measures the time of the large packets. Before the I/O, it writes `choice` to the card's
/// `iommu_bounce/mode`. At the end, it sets the card down. [`check_same`] and [`figures`] read the output.
#[must_use]
pub fn card_job(driver: &str, choice: &str, peer: &Peer<'_>) -> String {
    let functions = peer.functions();
    format!(
        "{FUNCTIONS}{functions}find_device net {driver}\nchoose {choice}\nCARD=$NAME\nwait_for_card\nstarted\nlarge\ntook\nsmall\n\
         print_pool\nip link set $CARD down\nip addr flush dev $CARD\n"
    )
}

/// Checks that all bytes of `cards` cards came back unchanged.
///
/// # Errors
/// Fails if a card lost or changed bytes.
pub fn check_same(outcome: &Outcome, cards: usize) -> Result<()> {
    let same: Vec<&str> = outcome.values("CAROM-SAME").collect();
    ensure!(
        same == ["large", "small"].repeat(cards),
        "CAROM-SAME {same:?}: results are missing; console:\n{}",
        outcome.console
    );
    Ok(())
}

/// Figures that a job prints for one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Duration of the I/O.
    pub seconds: f64,
    /// Number of mappings that bounced. A mapping is a single buffer, a scatter-gather list or a whole block request.
    pub bounced: u64,
    /// Bytes copied to slots.
    pub copied_in: u64,
    /// Bytes copied from slots.
    pub copied_out: u64,
    /// Number of mappings that did not bounce because of their DMA attributes.
    pub refused_by_attributes: u64,
    /// Number of sync calls for memory in slots.
    pub syncs: u64,
    /// Number of chunks that the pool requested (WINDOW_ADD).
    pub chunk_adds: u64,
    /// Number of times that the kernel stopped skipping the device's sync calls because a mapping bounced.
    pub elision_lost: u64,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, bounced, copied_in, copied_out, syncs, .. } = self;
        write!(
            f,
            "{seconds} s, {bounced} bounced, {copied_in} bytes copied in and {copied_out} back, {syncs} syncs of slots"
        )
    }
}

/// Parses the output of jobs of [`drive_job`] and [`card_job`]. Returns the figures in the order of the jobs.
///
/// # Errors
/// Fails if a job printed an incomplete result.
pub fn figures(outcome: &Outcome) -> Result<Vec<Figures>> {
    let seconds: Vec<&str> = outcome.values("CAROM-SECONDS").collect();
    seconds.iter().enumerate().map(|(number, text)| one(outcome, number, text)).collect()
}

/// Parses the figures of one device. `number` counts the devices from 0 in the order of the jobs.
fn one(outcome: &Outcome, number: usize, seconds: &str) -> Result<Figures> {
    let count = |name: &str| -> Result<u64> {
        let key = format!("CAROM-STAT-{name}");
        let text = outcome.values(&key).nth(number);
        let text = text.with_context(|| format!("no {name} of device {number}; console:\n{}", outcome.console))?;
        text.parse().with_context(|| format!("{key}: {text:?} is not a number"))
    };
    Ok(Figures {
        seconds: seconds.parse().with_context(|| format!("CAROM-SECONDS: {seconds:?} is not a number"))?,
        bounced: count("bounced_pages")? + count("bounced_lists")? + count("bounced_requests")?,
        copied_in: count("bytes_in")?,
        copied_out: count("bytes_out")?,
        refused_by_attributes: count("fallback_attrs")?,
        syncs: count("syncs")?,
        chunk_adds: count("chunk_adds")?,
        elision_lost: count("sync_elision_lost")?,
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    /// Returns the output of two devices' jobs. Each figure of the second device is twice the figure of the first device.
    fn outcome() -> Outcome {
        let names = [
            "bounced_pages",
            "bounced_lists",
            "bounced_requests",
            "bytes_in",
            "bytes_out",
            "fallback_attrs",
            "syncs",
            "chunk_adds",
            "sync_elision_lost",
        ];
        let of = |factor: usize| {
            let lines = names.iter().enumerate();
            let lines = lines.map(|(number, name)| format!("CAROM-STAT-{name} {}\n", (number + 1) * factor));
            format!("CAROM-SECONDS {factor}.5\n{}", lines.collect::<String>())
        };
        Outcome { console: of(1) + &of(2), ..Outcome::default() }
    }

    #[test]
    fn figures_of_each_device_are_separate() {
        let first = Figures {
            seconds: 1.5,
            bounced: 1 + 2 + 3,
            copied_in: 4,
            copied_out: 5,
            refused_by_attributes: 6,
            syncs: 7,
            chunk_adds: 8,
            elision_lost: 9,
        };
        let all = figures(&outcome()).unwrap();
        assert_eq!((all.len(), all[0]), (2, first));
        assert_eq!((all[1].seconds, all[1].bounced, all[1].elision_lost), (2.5, 12, 18));
    }

    #[test]
    fn device_whose_pool_printed_nothing_is_an_error() {
        let mut outcome = outcome();
        outcome.console += "CAROM-SECONDS 3\n";
        figures(&outcome).unwrap_err();
    }

    #[test]
    fn bytes_of_each_card_must_come_back() {
        let of = |console: &str| Outcome { console: console.into(), ..Outcome::default() };
        let both = of("CAROM-SAME large\nCAROM-SAME small\n");
        check_same(&both, 1).unwrap();
        check_same(&both, 2).unwrap_err();
        check_same(&of("CAROM-SAME large\n"), 1).unwrap_err();
    }

    #[test]
    fn server_sends_back_what_it_gets() {
        let mut stream = TcpStream::connect(("127.0.0.1", echo_server().unwrap())).unwrap();
        stream.write_all(b"a few bytes").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut back = Vec::new();
        stream.read_to_end(&mut back).unwrap();
        assert_eq!(back, b"a few bytes");
    }
}
