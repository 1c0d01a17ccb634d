// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Many clients that poll `vm.info`. The test measures the latency without a guest, with an idle guest, and with a guest that
//! does I/O.

use carom_integration::harness::guest_test;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, thread};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::workload::WAIT_FOR_NVME;
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::runtime::Builder;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::api::{BOOT_TIME, command_line};
use crate::hotplug::{end, put};
use crate::scraping::rounds;
use crate::support::{MIB, SITE};

/// Number of simultaneous clients.
const CLIENTS: usize = 64;

/// Duration of one measurement.
const TIME: Duration = Duration::from_secs(1);

/// Pauses of a client between two requests: no pause, and the usual pause of a monitoring client.
const PACES: [Duration; 2] = [Duration::ZERO, Duration::from_secs(1)];

/// Time from the start of a phase to the measurement. fio needs this time to start.
const LEAD: Duration = Duration::from_secs(2);

/// Duration of a phase of the guest in seconds: [`LEAD`], one measurement at each of [`PACES`], and a reserve.
const PHASE: u64 = 6;

/// Returns a job that alternates between idling and reading 4k blocks.
fn job(rounds: usize) -> String {
    format!(
        "{WAIT_FOR_NVME}
for i in $(seq {rounds}); do
    echo \"CAROM-PHASE idle $i\"
    sleep {PHASE}
    echo \"CAROM-PHASE io $i\"
    fio --name=read --filename=/dev/nvme0n1 --direct=1 --rw=read --ioengine=libaio --iodepth=64 --bs=4k --size=256M \\
        --time_based --runtime={PHASE} --output-format=terse --terse-version=3 >/tmp/fio || exit 91
    awk -F';' '/^3;/ {{ print \"CAROM-IOPS\", $8 }}' /tmp/fio
done
echo \"CAROM-PHASE end\"
while :; do sleep 1; done
"
    )
}

/// Client with a persistent connection.
struct Client {
    stream: UnixStream,
    answer: Vec<u8>,
}

impl Client {
    async fn new(socket: &Path) -> Self {
        Self { stream: UnixStream::connect(socket).await.unwrap(), answer: Vec::new() }
    }

    /// Requests `vm.info` and returns the body of the answer.
    async fn info(&mut self) -> &[u8] {
        const REQUEST: &[u8] = b"GET /api/v1/vm.info HTTP/1.1\r\nHost: localhost\r\n\r\n";
        self.stream.writable().await.unwrap();
        assert_eq!(self.stream.try_write(REQUEST).unwrap(), REQUEST.len());
        self.answer.clear();
        loop {
            self.stream.ready(Interest::READABLE).await.unwrap();
            match self.stream.try_read_buf(&mut self.answer) {
                Ok(0) => panic!("the server hung up: {}", String::from_utf8_lossy(&self.answer)),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                Err(error) => panic!("{error}"),
            }
            if let Some(start) = body(&self.answer) {
                return &self.answer[start..];
            }
        }
    }
}

/// Returns the offset of an answer's body, or `None` if the answer has not completely arrived.
fn body(answer: &[u8]) -> Option<usize> {
    let start = answer.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&answer[..start]).to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 200"), "{}", String::from_utf8_lossy(answer));
    let len: usize = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok()).unwrap();
    (answer.len() >= start + len).then_some(start)
}

/// Returns the latencies of one client, which pauses for `pace` after each request.
async fn ask(socket: PathBuf, pace: Duration, state: &'static str) -> Vec<Duration> {
    let (begin, mut client, mut times) = (Instant::now(), Client::new(&socket).await, Vec::new());
    while begin.elapsed() < TIME {
        let start = Instant::now();
        let body = client.info().await;
        times.push(start.elapsed());
        if times.len() == 1 {
            let info: Value = serde_json::from_slice(body).unwrap();
            assert_eq!(info["state"], state, "{info}");
        }
        if !pace.is_zero() {
            sleep(pace).await;
        }
    }
    times
}

/// Measures at each of [`PACES`], and returns the latencies of all clients. `state` is the expected state of the VM.
fn poll(vmm: &ApiVmm, state: &'static str) -> [Vec<Duration>; 2] {
    PACES.map(|pace| {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let clients = (0..CLIENTS).map(|_| ask(vmm.socket(), pace, state));
            clients.collect::<JoinSet<_>>().join_all().await.concat()
        })
    })
}

/// Like [`poll`], in the phase `phase` of the guest. Fails if the phase `next` begins before the measurements have ended.
fn poll_in_phase(vmm: &ApiVmm, phase: &str, next: &str) -> [Vec<Duration>; 2] {
    vmm.wait_for(&format!("CAROM-PHASE {phase}\n"), 1, BOOT_TIME).unwrap();
    thread::sleep(LEAD);
    let times = poll(vmm, "Running");
    assert!(!vmm.console().contains(&format!("CAROM-PHASE {next}\n")), "{phase} was too short");
    times
}

/// Returns a line of text with the median and the 99th percentile at each pace.
fn line(what: &str, times: &mut [Vec<Duration>; 2]) -> String {
    let of = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_secs_f64() * 1e3;
        format!("p50 {:.2} p99 {:.2} ms of {}", at(50), at(99), times.len())
    };
    let [busy, calm] = times;
    format!("{what}: back to back {}; once a second {}\n", of(busy), of(calm))
}

#[guest_test(slow = "scraping:: and the API's own tests cover requests while guests work")]
fn many_clients_are_answered_while_the_guest_works() {
    let count = rounds(1);
    let vmm = ApiVmm::start(&SITE, &job(count)).unwrap();
    let config = json!({
        "payload": {"kernel": vmm.kernel(), "initramfs": vmm.initramfs(), "cmdline": command_line()},
        "platform": {"iommufd": SITE.iommufd},
        "serial": {"mode": "File", "file": vmm.console_file()},
        "devices": [{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "drive"}],
        "iommu_bounce": {"size": 64 * MIB},
    });
    put(&vmm, "vm.create", &config);
    let mut none = poll(&vmm, "Created");
    put(&vmm, "vm.boot", &Value::Null);

    let (mut idle, mut working) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 1..=count {
        let next = if round == count { "end".to_string() } else { format!("idle {}", round + 1) };
        let phases =
            [(&mut idle, format!("idle {round}"), format!("io {round}")), (&mut working, format!("io {round}"), next)];
        for (all, phase, next) in phases {
            for (all, times) in all.iter_mut().zip(poll_in_phase(&vmm, &phase, &next)) {
                all.extend(times);
            }
        }
    }
    vmm.wait_for("CAROM-PHASE end\n", 1, BOOT_TIME).unwrap();

    // `scripts/test --keep DIR` keeps these figures for the documentation.
    let console = vmm.console();
    let iops: Vec<&str> = console.lines().filter_map(|line| line.strip_prefix("CAROM-IOPS ")).collect();
    let lines = [("no guest", &mut none), ("idle guest", &mut idle), ("guest with I/O", &mut working)]
        .map(|(what, times)| line(what, times));
    let figures = format!("{}IOPS while asked {}\n", lines.concat(), iops.join(" "));
    fs::write(SITE.out.join("polling"), &figures).unwrap();
    println!("{figures}");
    assert_eq!(iops.len(), count);
    let [_, calm] = &working;
    assert!(calm.len() >= CLIENTS && calm.last().unwrap() < &Duration::from_secs(2), "{figures}");

    end(vmm);
}
