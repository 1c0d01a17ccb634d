// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Measures the response times of the API, without KVM. The first measured server is a `carom` process without a guest. Two more servers
//! run one after the other in the benchmark's own process. Each has a control thread and a null guest: a VM without vCPUs, whose IOMMU has
//! a driver. The first driver is idle. The second driver maps and unmaps a page as fast as VM exits would allow. The mappings have no
//! effect on the host.
//!
//! For comparison, the server [`Echo`] sends a stored answer of the API's server to each request. The response times of `Echo` contain only
//! the host's share, without Carom's work.

#![expect(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use carom_api::VmConfig;
use carom_api::types::DeviceNode;
use devices::virtio::iommu::IommuStatus;
use iommu_bounce::test_utils::{NullMapper, TestRam, attach, map, unmap};
use iommu_bounce::{Engine, EngineConfig, Report};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use vmm::api::{ApiServer, SharedApi};
use vmm::control::{Control, Options};
use vmm::error::VmError;
use vmm::machine::Machine;
use vmm::mailbox::Mailbox;
use vmm::process::event_monitor::EventMonitor;
use vmm::process::time_slice::ShortSlice;
use vmm::vm_state::{StateSink, StateSource};

/// Number of timed starts of the `carom` process.
const STARTS: usize = 31;
/// Number of requests of one client.
const REQUESTS: usize = 5000;
/// Number of simultaneous clients.
const CLIENTS: usize = 64;

const CONFIG: &str =
    r#"{"payload": {"kernel": "/k"}, "devices": [{"path": "/d", "iommu": true, "id": "drive"}], "iommu_bounce": {}}"#;

fn main() {
    // Without `--bench`, for example under `cargo test`, nothing is measured.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    println!("A program without a guest:");
    let dir = tempfile::tempdir().unwrap();
    starts(dir.path());
    let program = Program::start(&dir.path().join("socket"));
    println!("  resident when idle      {:6.1} MiB", program.resident_mib());
    let put = program.request("PUT /api/v1/vm.create", CONFIG);
    assert!(put.starts_with("HTTP/1.1 204"), "{put}");
    several(&program.socket);
    drop(program);

    for load in [false, true] {
        println!("\nA null guest {}:", if load { "that maps and unmaps continuously" } else { "that does nothing" });
        let guest = Guest::start(&dir.path().join(if load { "loaded" } else { "idle" }), load);
        several(&guest.socket);
        let pairs = guest.end();
        if load {
            println!("  it mapped and unmapped  {pairs:6.0} times per second");
        }
    }
}

/// Runs all measurements on one server.
fn several(socket: &Path) {
    let back_to_back = Duration::ZERO;
    measure(socket, "GET /api/v1/vmm.ping", 1, REQUESTS, back_to_back);
    measure(socket, "GET /api/v1/vm.info", 1, REQUESTS, back_to_back);
    let echo = Echo::start(socket);
    for (requests, pause) in [(REQUESTS / 10, back_to_back), (50, Duration::from_millis(100))] {
        measure(socket, "GET /api/v1/vm.info", CLIENTS, requests, pause);
        measure(&echo.socket, "GET /echo", CLIENTS, requests, pause);
        measure_connections(socket, "GET /api/v1/vm.info", requests, pause);
        measure_connections(&echo.socket, "GET /echo", requests, pause);
    }
    measure(socket, "GET /metrics", 1, REQUESTS / 5, back_to_back);
}

/// Measures the time from the start of the process to the first answer.
fn starts(dir: &Path) {
    let mut times: Vec<_> = (0..STARTS)
        .map(|number| {
            let start = Instant::now();
            let program = Program::start(&dir.join(format!("start{number}")));
            program.request("GET /api/v1/vmm.ping", "");
            start.elapsed()
        })
        .collect();
    times.sort();
    println!(
        "  start to first answer   {} (median of {STARTS}), {} at most",
        ms(times[STARTS / 2]),
        ms(times[STARTS - 1])
    );
}

fn ms(time: Duration) -> String {
    format!("{:6.3} ms", time.as_secs_f64() * 1e3)
}

/// `carom` process.
struct Program {
    child: Child,
    socket: PathBuf,
}

impl Program {
    fn start(socket: &Path) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_carom"))
            .args(["--api-socket", &format!("path={}", socket.display())])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        while UnixStream::connect(socket).is_err() {
            thread::sleep(Duration::from_micros(50));
        }
        Self { child, socket: socket.into() }
    }

    fn resident_mib(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<f64>().unwrap() / 1024.0
    }

    fn request(&self, head: &str, body: &str) -> String {
        let mut client = Client::new(&self.socket);
        client.request(&format!("{head} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
        String::from_utf8_lossy(&client.answer).into_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Minimal server: one thread that sends the same answer to every request.
struct Echo {
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    /// Asks the API server at `api` for `vm.info`, and starts a server that answers every request with the API server's answer. The new
    /// server's socket is in the same directory as `api`.
    fn start(api: &Path) -> Self {
        let mut client = Client::new(api);
        client.request("GET /api/v1/vm.info HTTP/1.1\r\nHost: x\r\n\r\n");
        let answer = Arc::new(client.answer);
        let socket = api.with_extension("echo");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let entered = runtime.enter();
        let listener = UnixListener::bind(&socket).unwrap();
        drop(entered);
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || {
            // The API's server also uses a short time slice.
            let _ = ShortSlice::take();
            runtime.block_on(async {
                tokio::select! {
                    () = echo(&listener, &answer) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { socket, stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Answers all clients, and never returns.
async fn echo(listener: &UnixListener, answer: &Arc<Vec<u8>>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let answer = answer.clone();
        tokio::spawn(async move {
            let mut request = [0; 4096];
            while stream.readable().await.is_ok() {
                match stream.try_read(&mut request) {
                    Ok(0) => break,
                    // The socket has room for the answer, because the client has read all earlier answers.
                    Ok(_) => assert_eq!(stream.try_write(&answer).unwrap(), answer.len()),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                }
            }
        });
    }
}

/// Threads of a null guest: its control thread, and the thread of its driver.
struct Guest {
    socket: PathBuf,
    control: JoinHandle<()>,
    load: JoinHandle<f64>,
    done: Arc<AtomicBool>,
}

/// Engine of the null guest that is built next.
static ENGINE: Mutex<Option<Arc<Mutex<Engine>>>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Guest {
    fn start(socket: &Path, loaded: bool) -> Self {
        let ram = Arc::new(TestRam::new(&[(0, 0x10_0000)]));
        let mut engine = Engine::new(EngineConfig::default(), ram, None).unwrap();
        engine.add_endpoint(16, Box::new(NullMapper)).unwrap();
        engine.accept_features(u64::MAX);
        assert_eq!(engine.handle(&attach(16, 1), &mut [0xff; 4]), 4);
        let engine = Arc::new(Mutex::new(engine));
        *lock(&ENGINE) = Some(engine.clone());
        let done = Arc::new(AtomicBool::new(false));
        let load = thread::spawn({
            let done = done.clone();
            move || drive(&engine, loaded, &done)
        });
        let api = devices::listening_socket::ListeningSocket::bind(socket).unwrap();
        let control = thread::spawn(move || {
            let mut control =
                Control::<Null>::new(EventMonitor::none(), Options { no_shutdown: true, ..Options::default() });
            let config: VmConfig = serde_json::from_str(CONFIG).unwrap();
            let config = config.check().unwrap();
            control.create(config).unwrap();
            control.boot().unwrap();
            let _server =
                ApiServer::start(Some(api), None, SharedApi::new(control.handle(), carom_api::cli::Program::default()))
                    .unwrap();
            control.run().unwrap();
        });
        Self { socket: socket.into(), control, load, done }
    }

    /// Ends the guest. Returns how often per second the guest's driver mapped and unmapped a page.
    fn end(self) -> f64 {
        Client::new(&self.socket).request("PUT /api/v1/vmm.shutdown HTTP/1.1\r\nHost: x\r\n\r\n");
        self.control.join().unwrap();
        self.done.store(true, Ordering::Relaxed);
        self.load.join().unwrap()
    }
}

/// Minimum time between two requests of a guest: the time of an exit to the VMM and back.
const EXIT: Duration = Duration::from_micros(2);

/// If `loaded` is set, maps and unmaps a page repeatedly until `done` is set. Returns how often per second the page was mapped and
/// unmapped.
fn drive(engine: &Mutex<Engine>, loaded: bool, done: &AtomicBool) -> f64 {
    let (start, page) = (Instant::now(), 1_u64 << 32);
    let mut pairs = 0.0;
    while loaded && !done.load(Ordering::Relaxed) {
        for request in [map(1, page, page + 0xfff, 0x1000, 3), unmap(1, page, page + 0xfff)] {
            let mut reply = [0xff; 4];
            assert_eq!((lock(engine).handle(&request, &mut reply), reply[0]), (4, 0));
            let exit = Instant::now();
            while exit.elapsed() < EXIT {
                std::hint::spin_loop();
            }
        }
        pairs += 1.0;
    }
    pairs / start.elapsed().as_secs_f64()
}

fn status(engine: &Engine) -> IommuStatus {
    IommuStatus { counters: engine.counters(), windows: engine.domain_windows(), ..IommuStatus::default() }
}

/// VM without vCPUs, but with an IOMMU.
struct Null(Arc<Mutex<Engine>>);

impl Machine for Null {
    fn build(_: &VmConfig, _: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        Ok(Self(lock(&ENGINE).take().unwrap()))
    }
    fn restore(_: &dyn StateSource, _: bool, _: Arc<Mailbox>, _: &EventMonitor) -> Result<Self, VmError> {
        Err(VmError::Guest("this machine cannot be restored".into()))
    }
    fn save(&mut self, _: &VmConfig, _: &mut dyn StateSink) -> Result<(), VmError> {
        Ok(())
    }
    fn start(&mut self, _: bool) -> Result<(), VmError> {
        Ok(())
    }
    fn pause(&mut self) -> Result<(), VmError> {
        Ok(())
    }
    fn resume(&mut self) -> Result<(), VmError> {
        Ok(())
    }
    fn press_power_button(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn raise_nmi(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn reset(&mut self) -> Result<(), VmError> {
        Ok(())
    }
    fn devices(&self) -> Vec<DeviceNode> {
        let node = |id: &str, pci_bdf: &str| DeviceNode {
            id: id.into(),
            resources: Vec::new(),
            children: Vec::new(),
            pci_bdf: pci_bdf.into(),
        };
        vec![node("_iommu", "0000:00:01.0"), node("drive", "0000:00:02.0")]
    }
    fn iommu(&self) -> Option<IommuStatus> {
        Some(status(&lock(&self.0)))
    }
    fn iommu_soon(&self) -> Option<Option<IommuStatus>> {
        // Like the handle of the real virtio-iommu, try up to 100 times to take the lock.
        let engine = (0..100).find_map(|_| {
            std::hint::spin_loop();
            self.0.try_lock().ok()
        })?;
        Some(Some(status(&engine)))
    }
    fn engine_report(&self) -> Option<Report> {
        Some(lock(&self.0).report())
    }
}

/// Times the requests of `clients` simultaneous clients. Each client waits for `pause` between two requests. Each client is a thread
/// that sleeps until it has its answer, as clients on a real machine do.
fn measure(socket: &Path, head: &str, clients: usize, requests: usize, pause: Duration) {
    let request = format!("{head} HTTP/1.1\r\nHost: x\r\n\r\n");
    let ready = Barrier::new(clients);
    let start = Instant::now();
    let times: Vec<Duration> = thread::scope(|scope| {
        let client = || {
            scope.spawn(|| {
                let client = Client::new(socket);
                ready.wait();
                run(client, &request, requests, pause)
            })
        };
        let clients: Vec<_> = (0..clients).map(|_| client()).collect();
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
    });
    show(head, &format!("{clients} clients"), pause, times, start.elapsed());
}

/// Prints the percentiles of `times`, and the rate of the requests. `whole` is the time that all requests took together.
fn show(head: &str, who: &str, pause: Duration, mut times: Vec<Duration>, whole: Duration) {
    let rate = times.len() as f64 / whole.as_secs_f64();
    times.sort();
    let at = |per_mille: usize| ms(times[(times.len() - 1) * per_mille / 1000]);
    let name = head.split('/').next_back().unwrap();
    let pace = if pause.is_zero() { "back to back".into() } else { format!("every {} ms", pause.as_millis()) };
    println!("  {name:9} {who:14} {pace:13} p50 {}  p99 {}  p99.9 {}  {rate:7.0}/s", at(500), at(990), at(999));
}

/// Like [`measure`], but a single client thread has [`CLIENTS`] connections, as a load generator has. So the server does not compete with
/// many client threads for the cores.
fn measure_connections(socket: &Path, head: &str, requests: usize, pause: Duration) {
    let request = format!("{head} HTTP/1.1\r\nHost: x\r\n\r\n");
    let start = Instant::now();
    let client = || {
        let (socket, request) = (socket.to_owned(), request.clone());
        async move {
            let mut stream = tokio::net::UnixStream::connect(socket).await.unwrap();
            let (mut times, mut buffer, mut answer) = (Vec::with_capacity(requests), vec![0; 1 << 16], Vec::new());
            for _ in 0..requests {
                let start = Instant::now();
                stream.write_all(request.as_bytes()).await.unwrap();
                answer.clear();
                while !is_whole(&answer) {
                    let len = stream.read(&mut buffer).await.unwrap();
                    assert_ne!(len, 0, "the server hung up: {}", String::from_utf8_lossy(&answer));
                    answer.extend(&buffer[..len]);
                }
                times.push(start.elapsed());
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
            }
            times
        }
    };
    let generate = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // Only this temporary thread takes a short time slice. The main thread does not, because the driver of the next guest would inherit
        // the slice.
        let _ = ShortSlice::take();
        runtime.block_on(async { (0..CLIENTS).map(|_| client()).collect::<JoinSet<_>>().join_all().await })
    };
    let times = thread::scope(|scope| scope.spawn(generate).join().unwrap());
    show(head, &format!("{CLIENTS} connections"), pause, times.concat(), start.elapsed());
}

/// Returns the time of each request of a client.
fn run(mut client: Client, request: &str, requests: usize, pause: Duration) -> Vec<Duration> {
    let mut times = Vec::with_capacity(requests);
    for _ in 0..requests {
        let start = Instant::now();
        client.request(request);
        times.push(start.elapsed());
        thread::sleep(pause);
    }
    times
}

/// Persistent connection.
struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
    answer: Vec<u8>,
}

impl Client {
    fn new(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        Self { stream, buffer: vec![0; 1 << 16], answer: Vec::new() }
    }

    /// Sends a request and reads the whole answer.
    fn request(&mut self, request: &str) {
        self.stream.write_all(request.as_bytes()).unwrap();
        self.answer.clear();
        while !is_whole(&self.answer) {
            let len = self.stream.read(&mut self.buffer).unwrap();
            assert_ne!(len, 0, "the server hung up: {}", String::from_utf8_lossy(&self.answer));
            self.answer.extend(&self.buffer[..len]);
        }
        assert!(self.answer.starts_with(b"HTTP/1.1 20"), "{}", String::from_utf8_lossy(&self.answer));
    }
}

/// True if an answer is complete according to its head.
fn is_whole(answer: &[u8]) -> bool {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else { return false };
    let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
    let len = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
    answer.len() >= end + 4 + len.unwrap_or(0)
}
