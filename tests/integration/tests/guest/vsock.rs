// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-vsock: connections between programs of a real guest and of the host, from either side. Three cases are tested: the
//! device is not behind the virtio-iommu, is behind it without windows, or is behind it with a window. `guest/vsock.c` is the
//! guest's program.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Kernel;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, put, wait_gone};
use crate::support::{MIB, SITE};

/// Port of the guest's echo server.
const ECHO: u32 = 1024;
/// Port of the host that the guest connects to. The guest sends data, and reads a checksum of the data as the answer.
const CALLED: u32 = 5000;
/// Number of bytes that the guest sends in one connection to [`CALLED`].
const CALL_BYTES: usize = 3 << 20;
/// Maximum time until the guest must send or receive further bytes.
const SILENCE: Duration = Duration::from_secs(60);

/// Boots a guest that runs `guest/vsock.c`. `more` returns additional configuration of the VM.
fn start(more: fn(&ApiVmm) -> Value) -> ApiVmm {
    let program = fs::read(SITE.vsock.as_ref().expect("CAROM_VSOCK is set")).unwrap();
    let vmm = ApiVmm::start_with_program(&SITE, Kernel::Patched, "vsock", program, "vsock").unwrap();
    create_and_boot(&vmm, more(&vmm));
    vmm.wait_for("CAROM-VSOCK ", 1, BOOT_TIME).unwrap();
    vmm
}

fn socket(vmm: &ApiVmm) -> PathBuf {
    vmm.dir().join("vsock")
}

fn device(vmm: &ApiVmm, iommu: bool) -> Value {
    json!({"cid": 3, "socket": socket(vmm), "iommu": iommu})
}

fn pattern(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Returns the FNV-1a checksum, as the guest's program calculates it.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Connects to a port of the guest.
fn connect(vmm: &ApiVmm, port: u32) -> BufReader<UnixStream> {
    let mut stream = UnixStream::connect(socket(vmm)).unwrap();
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    stream.set_write_timeout(Some(SILENCE)).unwrap();
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).unwrap();
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    let named = line.strip_prefix("OK ").and_then(|port| port.trim_end().parse::<u32>().ok());
    assert!(named.is_some_and(|port| port >= 1 << 30), "{line:?}");
    stream
}

/// Sends `len` bytes to the guest's echo server. Checks that the server returns all bytes and then closes the stream.
fn echo(vmm: &ApiVmm, len: usize, seed: u32) {
    let mut stream = connect(vmm, ECHO);
    let sent = pattern(len, seed);
    let mut writer = stream.get_ref().try_clone().unwrap();
    let got = thread::scope(|scope| {
        scope.spawn(|| {
            writer.write_all(&sent).unwrap();
            // After this, the guest must still return the remaining bytes.
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        got
    });
    assert!(got == sent, "{} bytes came back of {}", got.len(), sent.len());
}

/// Accepts a connection from the guest to [`CALLED`], answers it, and checks that the guest verified the answer. The guest
/// prints a line for each verified answer.
fn take_call(vmm: &ApiVmm, listener: &UnixListener) {
    let before = vmm.console().matches("CAROM-CALLED ").count();
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(SILENCE)).unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), CALL_BYTES);
    stream.write_all(format!("{:016x}", checksum(&got)).as_bytes()).unwrap();
    drop(stream);
    vmm.wait_for("CAROM-CALLED ", before + 1, BOOT_TIME).unwrap();
    assert!(!vmm.console().contains("CAROM-CALL-WRONG"), "{}", vmm.console());
}

fn serve(vmm: &ApiVmm) -> UnixListener {
    let path = vmm.dir().join(format!("vsock_{CALLED}"));
    // Remove the socket file of an earlier server, if it exists.
    let _ = fs::remove_file(&path);
    UnixListener::bind(path).unwrap()
}

fn counters(vmm: &ApiVmm, device: &str) -> BTreeMap<String, u64> {
    let (status, counters) = vmm.call("GET", "/api/v1/vm.counters", None).unwrap();
    assert_eq!(status, 200, "{counters}");
    serde_json::from_value(counters[device].clone()).unwrap_or_else(|_| panic!("no {device}: {counters}"))
}

/// Checks connections from either side.
fn carry(vmm: &ApiVmm) {
    // 3 is the guest's CID. The newline ensures that the line is complete.
    vmm.wait_for("CAROM-VSOCK 3\n", 1, BOOT_TIME).unwrap();
    echo(vmm, 1, 1);
    echo(vmm, 4 << 20, 2);
    thread::scope(|scope| {
        for seed in 0..16 {
            scope.spawn(move || echo(vmm, 100_000, seed));
        }
    });
    let listener = serve(vmm);
    take_call(vmm, &listener);
    // No program listens at this port, so the connection must end without an answer.
    let mut nobody = UnixStream::connect(socket(vmm)).unwrap();
    nobody.set_read_timeout(Some(SILENCE)).unwrap();
    nobody.write_all(b"CONNECT 77\n").unwrap();
    assert_eq!(nobody.read(&mut [0; 8]).unwrap(), 0);
    let counters = counters(vmm, "_vsock");
    assert!(counters["connections"] >= 19 && counters["tx_bytes"] > 7 << 20, "{counters:?}");
    assert!(counters["rx_bytes"] > 5 << 20 && counters["resets"] == 0, "{counters:?}");
    let console = vmm.console();
    assert!(!console.contains("CAROM-LOST") && !console.contains("CAROM-VSOCK-FAILED"), "{console}");
}

fn end(vmm: &mut ApiVmm) {
    put(vmm, "vmm.shutdown", &Value::Null);
    assert!(vmm.wait(SILENCE).unwrap().success());
    assert!(!socket(vmm).exists(), "the socket still exists");
}

#[guest_test]
fn guest_and_host_connect_without_iommu() {
    let mut vmm = start(|vmm| json!({"vsock": device(vmm, false)}));
    carry(&vmm);
    end(&mut vmm);
}

#[guest_test(slow = "rng:: covers mappings, and the test with a window covers the sockets")]
fn guest_and_host_connect_through_mappings() {
    let mut vmm = start(|vmm| json!({"vsock": device(vmm, true)}));
    carry(&vmm);
    let iommu = counters(&vmm, "_iommu");
    assert!(iommu["requests_map"] > 8 && iommu["requests_unmap"] > 8 && iommu["faults"] == 0, "{iommu:?}");
    end(&mut vmm);
}

#[guest_test]
fn guest_and_host_connect_through_a_window() {
    let mut vmm = start(|vmm| json!({"vsock": device(vmm, true), "iommu_bounce": {"size": 64 * MIB}}));
    carry(&vmm);
    let iommu = counters(&vmm, "_iommu");
    assert!(iommu["window_bytes"] > 0 && iommu["faults"] == 0, "{iommu:?}");
    end(&mut vmm);
}

#[guest_test]
fn vsock_is_hotplugged_and_removed() {
    let mut vmm = start(|_| json!({"iommu_bounce": {"size": 16 * MIB}}));
    for iommu in [false, true] {
        let (status, answer) = vmm.call("PUT", "/api/v1/vm.add-vsock", Some(&device(&vmm, iommu))).unwrap();
        assert_eq!((status, answer["id"].as_str()), (200, Some("_vsock")), "{answer}");
        let other = json!({"cid": 4, "socket": vmm.dir().join("other"), "id": "other"});
        let (status, answer) = vmm.call("PUT", "/api/v1/vm.add-vsock", Some(&other)).unwrap();
        assert_eq!(
            (status, &answer),
            (400, &json!(["vsock: the VM already has such a device: remove the old device first"]))
        );
        // The connection waits until the guest's driver is ready.
        echo(&vmm, 1 << 20, 3);
        take_call(&vmm, &serve(&vmm));

        let mut held = connect(&vmm, ECHO);
        put(&vmm, "vm.remove-device", &json!({"id": "_vsock"}));
        wait_gone(&vmm, "_vsock");
        assert!(matches!(held.read(&mut [0; 8]), Ok(0) | Err(_)), "the device's connection did not end");
        assert!(!socket(&vmm).exists());
    }
    end(&mut vmm);
}

#[guest_test(slow = "unit tests cover the event that a restored device sends")]
fn restored_guest_loses_and_reopens_its_connections() {
    for more in [
        (|vmm| json!({"vsock": device(vmm, false)})) as fn(&ApiVmm) -> Value,
        |vmm| json!({"vsock": device(vmm, true), "iommu_bounce": {"size": 64 * MIB}}),
    ] {
        let mut vmm = start(more);
        let mut held = connect(&vmm, ECHO);
        held.get_mut().write_all(b"x").unwrap();
        held.read_exact(&mut [0]).unwrap();
        let directory = vmm.dir().join("snapshot");
        let url = format!("file://{}", directory.display());
        put(&vmm, "vm.pause", &Value::Null);
        put(&vmm, "vm.snapshot", &json!({"destination_url": url}));
        // After the snapshot, the guest continues here and keeps its connection.
        put(&vmm, "vm.resume", &Value::Null);
        held.get_mut().write_all(b"y").unwrap();
        held.read_exact(&mut [0]).unwrap();
        end(&mut vmm);
        assert!(matches!(held.read(&mut [0; 8]), Ok(0) | Err(_)));

        fs::remove_file(vmm.console_file()).unwrap();
        vmm.start_again(&SITE, &["--restore", &format!("source_url={url},resume=on")]).unwrap();
        // Linux sets an error of the socket and also changes the socket's state. The guest's call may fail for either reason.
        let lost = ["Connection reset by peer\n", "Transport endpoint is not connected\n"];
        let start = Instant::now();
        while !lost.iter().any(|lost| vmm.console().contains(&format!("CAROM-LOST {lost}"))) {
            assert!(start.elapsed() < BOOT_TIME, "{}", vmm.console());
            thread::sleep(Duration::from_millis(50));
        }
        echo(&vmm, 1 << 20, 4);
        take_call(&vmm, &serve(&vmm));
        // After a reset of the VM, the new driver knows no connections.
        put(&vmm, "vm.reboot", &Value::Null);
        vmm.wait_for("CAROM-VSOCK 3", 1, BOOT_TIME).unwrap();
        echo(&vmm, 1 << 20, 5);
        end(&mut vmm);
    }
}
