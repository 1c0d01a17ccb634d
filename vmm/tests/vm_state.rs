// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a VM that is saved to memory of this process and restored from this memory.
//!
//! Without access to `/dev/kvm`, this test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod tiny_guest;

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use carom_api::{CheckedConfig, VmConfig};
use serde_json::json;
use vmm::machine::Machine;
use vmm::mailbox::Mailbox;
use vmm::process::event_monitor::EventMonitor;
use vmm::vm::Vm;
use vmm::vm_state::in_memory::InMemorySink;

/// Code that repeatedly adds 1 to a byte of RAM. After each addition, it writes the byte's low six bits to the serial port, as a character
/// from `0` to `o`. Between two characters, the code reads a port 1000 times, so that the writer of the serial port keeps up.
const COUNTER: &[u8] = &[
    0x66, 0xba, 0xf8, 0x03, // mov $0x3f8, %dx
    0xfe, 0x05, 0x00, 0x00, 0x30, 0x00, // 1: incb 0x300000
    0xa0, 0x00, 0x00, 0x30, 0x00, // mov 0x300000, %al
    0x24, 0x3f, // and $0x3f, %al
    0x04, 0x30, // add $'0', %al
    0xee, // out %al, %dx
    0xb9, 0xe8, 0x03, 0x00, 0x00, // mov $1000, %ecx
    0xe4, 0x61, // 2: in $0x61, %al
    0xe2, 0xfc, // loop 2b
    0xeb, 0xe5, // jmp 1b
];

fn config(dir: &Path) -> CheckedConfig {
    let config: VmConfig = serde_json::from_value(json!({
        "payload": {"kernel": dir.join("kernel")},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "File", "file": dir.join("serial")},
        "console": {"mode": "Off"},
        "rng": {"src": "/dev/urandom", "iommu": true},
        "iommu_bounce": {},
    }))
    .unwrap();
    config.check().unwrap()
}

fn mailbox() -> Arc<Mailbox> {
    Arc::new(Mailbox::new(Box::new(|| {})))
}

/// Waits until the guest has written 20 characters.
fn wait_for_serial(dir: &Path) {
    let start = Instant::now();
    while fs::read(dir.join("serial")).unwrap_or_default().len() < 20 {
        assert!(start.elapsed() < Duration::from_secs(60), "the guest writes nothing");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Pauses the VM and ends it. Returns the guest's output.
fn end(mut vm: Vm, dir: &Path) -> Vec<u8> {
    vm.pause().unwrap();
    drop(vm);
    fs::read(dir.join("serial")).unwrap()
}

#[test]
fn vm_saved_in_memory_continues_where_it_stopped() {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return eprintln!("not tested: /dev/kvm: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("kernel"), tiny_guest::elf(COUNTER)).unwrap();
    let (config, monitor) = (config(dir.path()), EventMonitor::none());
    for prefault in [false, true] {
        let mut vm = Vm::build(&config, mailbox(), &monitor).unwrap();
        vm.start(true).unwrap();
        wait_for_serial(dir.path());
        vm.pause().unwrap();
        let mut sink = InMemorySink::default();
        vm.save(&config, &mut sink).unwrap();
        let before = end(vm, dir.path());

        let source = sink.into_source().unwrap();
        let mut vm = Vm::restore(&source, prefault, mailbox(), &monitor).unwrap();
        vm.resume().unwrap();
        wait_for_serial(dir.path());
        let after = end(vm, dir.path());

        let all = [before, after].concat();
        let follow = |pair: &[u8]| pair[1] == b'0' + (pair[0] - b'0' + 1) % 64;
        assert!(all.windows(2).all(follow), "prefault {prefault}: {}", String::from_utf8_lossy(&all));
    }
}

#[test]
fn unfinished_state_is_refused() {
    let error = InMemorySink::default().into_source().unwrap_err();
    assert_eq!(error.to_string(), "state: was not saved completely");
}
