// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! iperf3 between a guest and its host, over a network card that the VMM emulates on a tap interface.

use std::fs;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::measure::mode::{EMULATED_MODES, Mode};
use carom_integration::{Outcome, Site};
use carom_tools::children::KilledOnDrop;
use serde_json::Value;

use crate::table::{self, LITTLE_RAM_MIB, Measured, Row, Scope, Shown, Table, Work};
use crate::throughput::AROUND;

const SHOWN: &[Shown] = &[
    Shown::new("mib_s", "MiB per second", 1),
    Shown::new("packets_s", "packets received per second, in thousands", 2),
];

pub(crate) const TABLE: Table = Table::new("network", "mode", SHOWN, work);

/// Tap interface of the host, and the IP addresses of the host and of the guest on the tap's network.
const TAP: &str = "carombench";
const HOST: &str = "10.78.1.1";
const GUEST: &str = "10.78.1.2";

/// Stream of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Traffic {
    /// `tcp`, or `udp` in packets of 64 bytes.
    kind: &'static str,
    /// `to-guest` or `from-guest`.
    direction: &'static str,
    /// Additional options for the guest's iperf3.
    words: &'static str,
}

const TRAFFIC: [Traffic; 3] = [
    Traffic { kind: "tcp", direction: "from-guest", words: "" },
    Traffic { kind: "tcp", direction: "to-guest", words: "--reverse" },
    Traffic { kind: "udp", direction: "from-guest", words: "--udp --bitrate 0 --length 64" },
];

fn work(scope: Scope, site: &Site) -> Vec<Work> {
    let seconds = if scope == Scope::Quick { 1 } else { 3 };
    let modes = EMULATED_MODES.iter().filter(|mode| mode.is_at(site));
    modes.map(|mode| in_a_guest(mode, seconds)).collect()
}

fn in_a_guest(mode: &'static Mode, seconds: u32) -> Work {
    let estimate = AROUND + Duration::from_secs(4 * u64::from(seconds + 2));
    let run = move |site: &Site, name: &str| {
        let program = site.iperf.as_deref().context("CAROM_IPERF3 is not set; run scripts/bench, which sets it")?;
        let _tap = Interface::make()?;
        let _server = serve(program)?;
        let mut guest = mode.bare_guest(name).memory_mib(LITTLE_RAM_MIB).virtio_net(TAP, mode.iommu);
        for file in with_libraries(program)? {
            let bytes = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            guest = guest.program(&file_name(&file), bytes);
        }
        let outcome = table::run(guest.job(&job(&file_name(program), seconds)), estimate, site)?;
        measured(&outcome, mode)
    };
    Work { name: mode.name.into(), estimate, run: Box::new(run) }
}

/// Returns the paths of a program and of the libraries that the program loads, including the dynamic linker. ldd(1) names the
/// libraries.
fn with_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
    ensure!(output.status.success(), "ldd {} failed: {}", program.display(), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(iter::once(program.into()).chain(libraries).collect())
}

fn file_name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns a job that runs the streams one after the other and prints iperf3's JSON for each stream. In the guest, the libraries
/// are in the program's directory.
fn job(program: &str, seconds: u32) -> String {
    let mut job = format!(
        r#"i=0
while [ ! -e /sys/class/net/eth0/device ] && [ $i -lt 300 ]; do i=$((i + 1)); sleep 0.1; done
ip addr add {GUEST}/24 dev eth0
ip link set eth0 up
iperf() {{ ld-linux-x86-64.so.2 --library-path /bin /bin/{program} "$@"; }}
echo "CAROM-KERNEL $(uname -r)"
echo "CAROM-IPERF-VERSION $(iperf --version | head -n 1)"
stream() {{
    number=$1
    shift
    iperf --client {HOST} --json --interval 0 --time {seconds} "$@" >/tmp/iperf 2>&1
    echo "CAROM-STREAM $number $(tr -d '\n\t' </tmp/iperf)"
}}
"#
    );
    for (number, traffic) in TRAFFIC.iter().enumerate() {
        job += &format!("stream {number} {}\n", traffic.words);
    }
    job
}

fn measured(outcome: &Outcome, mode: &Mode) -> Result<Measured> {
    let mut measured = Measured { retries: outcome.retries, ..Measured::default() };
    for (name, key) in [("guest_kernel", "CAROM-KERNEL"), ("iperf", "CAROM-IPERF-VERSION")] {
        measured.versions.insert(name.into(), outcome.value(key)?.into());
    }
    for (number, traffic) in TRAFFIC.iter().enumerate() {
        let line = outcome.values("CAROM-STREAM").find_map(|line| line.strip_prefix(&format!("{number} ")));
        let row = line
            .context("the console has no CAROM-STREAM line of this stream")
            .and_then(|line| row(mode, traffic, line));
        match row {
            Ok(row) => measured.rows.push(row),
            Err(error) => {
                measured.failures.push(format!("{}: {} {}: {error:#}", mode.name, traffic.kind, traffic.direction));
            }
        }
    }
    Ok(measured)
}

/// Parses iperf3's JSON. The figures contain only data that arrived at the receiver.
fn row(mode: &Mode, traffic: &Traffic, line: &str) -> Result<Row> {
    let report: Value = serde_json::from_str(line).with_context(|| format!("invalid report of iperf3: {line:?}"))?;
    ensure!(report["error"].is_null(), "iperf3: {}", report["error"]);
    let end = &report["end"];
    let number =
        |value: &Value, key: &str| value[key].as_f64().with_context(|| format!("iperf3's report has no {key}: {end}"));
    let mut row = Row::new(
        [("mode", mode.name.into()), ("traffic", traffic.kind.into()), ("direction", traffic.direction.into())],
        [],
    );
    let mib = f64::from(1 << 20);
    if traffic.kind == "tcp" {
        let arrived = number(&end["sum_received"], "bits_per_second")?;
        row.figures.insert("mib_s".into(), arrived / 8.0 / mib);
    } else {
        let sum = &end["sum"];
        let packets = number(sum, "packets")? - number(sum, "lost_packets")?;
        row.figures.insert("packets_s".into(), packets / number(sum, "seconds")? / 1e3);
        row.figures.insert("lost_percent".into(), number(sum, "lost_percent")?);
    }
    ensure!(row.figures.values().any(|figure| *figure > 0.0), "iperf3 received no data");
    Ok(row)
}

/// Tap interface that is removed when this value is dropped.
struct Interface;

impl Interface {
    fn make() -> Result<Self> {
        // Remove an interface that an earlier run left behind.
        drop(Self);
        ip(&format!("tuntap add dev {TAP} mode tap vnet_hdr"))?;
        let made = Self;
        ip(&format!("addr add {HOST}/24 dev {TAP}"))?;
        ip(&format!("link set dev {TAP} up"))?;
        Ok(made)
    }
}

impl Drop for Interface {
    fn drop(&mut self) {
        if Path::new("/sys/class/net").join(TAP).exists() {
            // The command prints its own errors.
            let _ = ip(&format!("link del dev {TAP}"));
        }
    }
}

fn ip(words: &str) -> Result<()> {
    let status = Command::new("ip").args(words.split(' ')).status().context("cannot start ip")?;
    ensure!(status.success(), "the command 'ip {words}' failed: {status}");
    Ok(())
}

/// Starts the iperf3 server on the host.
fn serve(program: &Path) -> Result<KilledOnDrop> {
    let mut command = Command::new(program);
    command.args(["--server", "--bind", HOST]).stdin(Stdio::null()).stdout(Stdio::null());
    let mut server = KilledOnDrop(command.spawn().with_context(|| format!("cannot start {}", program.display()))?);
    // If the server cannot start, it ends within this delay. The delay does not affect the measurement, because the guest has not
    // started yet.
    thread::sleep(Duration::from_millis(200));
    let ended = server.0.try_wait().context("cannot query iperf3's status")?;
    ensure!(ended.is_none(), "iperf3 ended immediately and does not serve at {HOST}: {ended:?}");
    Ok(server)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(number: usize, line: &str) -> Result<Row> {
        row(&EMULATED_MODES[0], &TRAFFIC[number], line)
    }

    #[test]
    fn received_data_counts() {
        let tcp = r#"{"end":{"sum_sent":{"bits_per_second":9e9},"sum_received":{"bits_per_second":83886080}}}"#;
        assert_eq!(of(0, tcp).unwrap().figures["mib_s"], 10.0);
        let udp = r#"{"end":{"sum":{"seconds":2,"packets":9000,"lost_packets":5000,"lost_percent":55.5}}}"#;
        let row = of(2, udp).unwrap();
        assert_eq!((row.figures["packets_s"], row.key("direction").unwrap()), (2.0, &Value::from("from-guest")));
    }

    #[test]
    fn failed_stream_is_reported() {
        for (line, reason) in [
            (r#"{"error":"unable to connect"}"#, "unable to connect"),
            ("iperf3: not found", "report"),
            (r#"{"end":{"sum_received":{"bits_per_second":0}}}"#, "iperf3 received no data"),
            (r#"{"end":{}}"#, "bits_per_second"),
        ] {
            let error = of(0, line).unwrap_err();
            assert!(format!("{error:#}").contains(reason), "{error:#}");
        }
    }
}
