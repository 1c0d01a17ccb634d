// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs for guests whose DMA is left alone or bounced, with devices that are found by their driver: drives, of which all that is
//! written is verified, and network cards, whose bytes come back from a server. They print how long it took, and what the device's
//! pool counted.

use std::fmt;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use anyhow::{Context, Result, ensure};

use crate::Outcome;
use crate::workload::fio_verify_on;

/// Functions that look at the clock, wait for a device, choose whether its DMA bounces, and print what its pool counted.
const FUNCTIONS: &str = r#"
started() { START=$(cut -d' ' -f1 /proc/uptime); }
took() { echo "CAROM-SECONDS $(awk -v start="$START" '{ print $1 - start }' /proc/uptime)"; }
# find_device CLASS DRIVER: waits until a PCI device of that driver has a block device or an interface (CLASS is block or net). NAME
# is what that is called, and DEVICE the PCI device's address.
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

/// Functions that take the interface `CARD` up, send random bytes to the server, which sends them back, and compare them: over one
/// connection in large packets, over another in small ones, over several at the same time.
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

/// A server that sends back what it gets, as a guest reaches it.
#[derive(Debug, Clone, Copy)]
pub struct Peer<'a> {
    /// The guest's own address.
    pub own: &'a str,
    /// The server's.
    pub server: &'a str,
    /// The server's port.
    pub port: u16,
    /// Bytes that are sent over one connection in large packets.
    pub bytes: u64,
}

impl Peer<'_> {
    /// The server in the network of a card that the rig has.
    #[must_use]
    pub const fn of_the_rig(bytes: u64) -> Self {
        Peer { own: "10.0.2.15", server: "10.0.2.100", port: 7, bytes }
    }

    /// Functions for a job that uses the card `eth0`: `wait_for_card` first, then `large`, `small` and `several`, which print
    /// `CAROM-SAME` where all bytes came back as they were.
    #[must_use]
    pub fn functions(&self) -> String {
        let Self { own, server, port, bytes } = self;
        format!("OWN={own} SERVER={server} PORT={port} BYTES={bytes}\n{CARD_FUNCTIONS}")
    }
}

/// Starts such a server, on all addresses, that runs until this process ends; returns its port.
///
/// # Errors
/// There is no port.
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

/// Sends back what comes. A guest may go in the midst of it.
fn echo(stream: &TcpStream) {
    let _ = io::copy(&mut { stream }, &mut { stream });
    let _ = stream.shutdown(Shutdown::Write);
}

/// Verified I/O on the drive whose controller `driver` has, of `mib` MiB with `depth` requests in flight. `choice` goes to the
/// controller's `iommu_bounce/mode` first. [`workload::check_verified`](crate::workload::check_verified) and [`figures`] read what it prints.
#[must_use]
pub fn drive_job(driver: &str, choice: &str, mib: u32, depth: u32) -> String {
    let verify = fio_verify_on("/dev/$NAME", mib, depth);
    format!("{FUNCTIONS}find_device block {driver}\nchoose {choice}\nstarted\n{verify}took\nprint_pool\n")
}

/// Bytes that go to `peer` and come back over the card that `driver` has, in large packets, whose time is taken, and in small ones.
/// `choice` goes to the card's `iommu_bounce/mode` first. The card is down afterwards. [`check_same`] and [`figures`] read what it prints.
#[must_use]
pub fn card_job(driver: &str, choice: &str, peer: &Peer<'_>) -> String {
    let functions = peer.functions();
    format!(
        "{FUNCTIONS}{functions}find_device net {driver}\nchoose {choice}\nCARD=$NAME\nwait_for_card\nstarted\nlarge\ntook\nsmall\n\
         print_pool\nip link set $CARD down\nip addr flush dev $CARD\n"
    )
}

/// Checks that all bytes of so many cards came back as they were.
///
/// # Errors
/// They did not.
pub fn check_same(outcome: &Outcome, cards: usize) -> Result<()> {
    let same: Vec<&str> = outcome.values("CAROM-SAME").collect();
    ensure!(same == ["large", "small"].repeat(cards), "what came back: {same:?}; console:\n{}", outcome.console);
    Ok(())
}

/// What a job says of one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Time that its I/O took.
    pub seconds: f64,
    /// Mappings that its pool served: buffers, lists and requests.
    pub bounced: u64,
    /// Bytes that were copied to slots.
    pub copied_in: u64,
    /// Bytes that were copied from slots.
    pub copied_out: u64,
    /// Mappings that did not bounce because of their attributes.
    pub refused_by_attributes: u64,
    /// Sync calls that concerned slots.
    pub syncs: u64,
    /// Chunks that were asked for.
    pub chunk_adds: u64,
    /// How often sync calls stopped to be free.
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

/// What the jobs of [`drive_job`] and [`card_job`] say, in the order in which they ran.
///
/// # Errors
/// One of them printed less than all.
pub fn figures(outcome: &Outcome) -> Result<Vec<Figures>> {
    let seconds: Vec<&str> = outcome.values("CAROM-SECONDS").collect();
    seconds.iter().enumerate().map(|(number, text)| one(outcome, number, text)).collect()
}

/// The figures of the device with this number.
fn one(outcome: &Outcome, number: usize, seconds: &str) -> Result<Figures> {
    let count = |name: &str| -> Result<u64> {
        let key = format!("CAROM-STAT-{name}");
        let text = outcome.values(&key).nth(number);
        let text = text.with_context(|| format!("no {name} of device {number}; console:\n{}", outcome.console))?;
        text.parse().with_context(|| format!("{name}: {text:?}"))
    };
    Ok(Figures {
        seconds: seconds.parse().with_context(|| format!("CAROM-SECONDS {seconds:?}"))?,
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

    /// What two devices' jobs print, the second of which had twice as much of everything.
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
    fn figures_are_told_apart_by_device() {
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
    fn bytes_of_each_card_must_have_come_back() {
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
