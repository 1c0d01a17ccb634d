// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of a server's device, with the accesses that a guest makes.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vm_memory::{Bytes, FileOffset, GuestAddress};

use super::*;
use crate::pci::{PciDevice, regs};
use crate::platform::MsiMessage;
use crate::ram::Ram;
use crate::vfio::error::VfioPciError;
use crate::vfio::function::fake::{FakeAllocator, FakeSlots};
use crate::vfio::user::UserServer;
use crate::vfio::user::scripted_server::{Instead, MSI, Server};
use crate::vfio::user::wire::{self, ACCESS, Command, Header};

struct Machine {
    server: Server,
    device: crate::vfio::VfioPciDevice,
    msi: FakeAllocator,
}

fn machine(server: (Server, UnixStream)) -> Result<Machine, VfioPciError> {
    let (server, socket) = server;
    let host = UserServer::start("/run/x", socket, ram(), None)?;
    let (msi, slots) = (FakeAllocator::default(), Arc::new(FakeSlots::default()));
    let device = host.function("user0", &msi, slots)?;
    server.received();
    Ok(Machine { server, device, msi })
}

#[test]
fn vfio_front_end_serves_a_vfio_user_device() {
    let Machine { server, device, msi } = machine(Server::good()).unwrap();
    let mut data = [0; 4];
    device.read_config(0, &mut data);
    assert_eq!(data, 0x11e8_1234u32.to_le_bytes());
    assert_eq!(device.bars().iter().map(|bar| (bar.index, bar.size)).collect::<Vec<_>>(), [(0, 1 << 20)]);
    device.read_bar(0, 0x40, &mut data);
    assert_eq!(data, [0x40, 0x41, 0x42, 0x43]);
    server.received();
    // A driver enables MSI in this order.
    device.write_config(MSI + 4, &0xfee0_0000u32.to_le_bytes());
    device.write_config(MSI + 12, &[0x31, 0]);
    device.write_config(MSI + 2, &[1, 0]);
    let received = server.received();
    let irqs: Vec<_> = received.iter().filter(|received| received.command == 8).collect();
    assert_eq!((irqs.len(), irqs[0].descriptors.len()), (1, 1));
    assert_eq!(irqs[0].payload, wire::enable_irqs(wire::MSI_IRQS, 0, 1));
    let vectors = msi.0.lock().unwrap()[0].clone();
    assert_eq!(vectors.routes.lock().unwrap()[0], Some(MsiMessage { address: 0xfee0_0000, data: 0x31 }));
    // The descriptor that the server got is an event, so a written value can be read back.
    let event = File::from(irqs[0].descriptors[0].try_clone().unwrap());
    event
        .write_at(&1u64.to_ne_bytes(), 0)
        .or_else(|_| std::io::Write::write(&mut &event, &1u64.to_ne_bytes()))
        .unwrap();
    let mut count = [0; 8];
    (&event).read_exact(&mut count).unwrap();
    assert_eq!(u64::from_ne_bytes(count), 1);
    device.write_config(regs::COMMAND, &[6, 0]);
    device.reset().unwrap();
    let received = server.received();
    assert!(
        commands(&received).ends_with(&[8, 13, 10]),
        "interrupts off, reset, bus mastering off: {:?}",
        commands(&received)
    );
}

#[test]
fn device_whose_server_dies_reads_as_all_ones() {
    let reads = Arc::new(AtomicUsize::new(0));
    let seen = reads.clone();
    let dies = move |header: &Header, payload: &[u8]| {
        let bar = header.command == Command::RegionRead.number() && payload[8] == 0;
        (bar && seen.fetch_add(1, Ordering::Relaxed) == 2).then_some(Instead::Close)
    };
    let Machine { server: _server, device, .. } = machine(Server::start(Box::new(dies))).unwrap();
    let mut data = [0; 8];
    for _ in 0..2 {
        device.read_bar(0, 0, &mut data);
        assert_eq!(data, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
    device.read_bar(0, 0, &mut data);
    assert_eq!(data, [0xff; 8]);
    let mut id = [0; 4];
    device.read_config(0, &mut id);
    assert_eq!(id, [0xff; 4]);
    device.write_bar(0, 0, &[1; 8]);
    device.write_config(MSI + 2, &[1, 0]);
    device.write_config(regs::COMMAND, &[6, 0]);
    device.reset().unwrap();
    device.read_bar(0, 0, &mut data);
    assert_eq!(data, [0xff; 8]);
    assert_eq!(reads.load(Ordering::Relaxed), 3);
}

#[test]
fn refused_accesses_read_as_all_ones_and_device_stays_usable() {
    let refuses = |header: &Header, payload: &[u8]| {
        let read = header.command == Command::RegionRead.number() || header.command == Command::RegionWrite.number();
        (read && payload[8] == 0 && payload[0] == 0x80).then_some(Instead::Refuse(5))
    };
    let Machine { server: _server, device, .. } = machine(Server::start(Box::new(refuses))).unwrap();
    let mut data = [0; 4];
    device.read_bar(0, 0x80, &mut data);
    assert_eq!(data, [0xff; 4]);
    device.write_bar(0, 0x80, &data);
    device.read_bar(0, 0x40, &mut data);
    assert_eq!(data, [0x40, 0x41, 0x42, 0x43]);
}

#[test]
fn impossible_devices_are_refused() {
    let region = |index: u32, size: u64| {
        move |header: &Header, payload: &[u8]| {
            let hit = header.command == Command::RegionInfo.number() && payload[8] == index.to_le_bytes()[0];
            let mut answer: Vec<u8> = [32u32, 3, index, 0].iter().flat_map(|field| field.to_ne_bytes()).collect();
            answer.extend(size.to_ne_bytes());
            answer.extend([0; 8]);
            hit.then_some(Instead::Answer(answer))
        }
    };
    for rule in [region(7, 64), region(7, 0), region(0, 0x1001), region(5, u64::MAX)] {
        let error = machine(Server::start(Box::new(rule))).err().unwrap();
        assert!(!error.is_user_error(), "{error}");
    }
    // A size of configuration space beyond the maximum is reduced to the maximum.
    assert!(machine(Server::start(Box::new(region(7, u64::MAX)))).is_ok());
    let error = machine(Server::that(Command::Reset, || Instead::Refuse(1))).err().unwrap().to_string();
    assert!(error.contains("did not reset the device"), "{error}");
}

/// Creates RAM of two regions that are backed by one file.
fn shared_ram() -> (Arc<Ram>, File) {
    let file = tempfile::tempfile().unwrap();
    file.set_len(0x8000).unwrap();
    let place = |offset| Some(FileOffset::new(file.try_clone().unwrap(), offset));
    let ranges = [(GuestAddress(0), 0x4000, place(0)), (GuestAddress(0x10_0000), 0x4000, place(0x4000))];
    (Arc::new(Ram::from_ranges_with_files(ranges).unwrap()), file)
}

#[test]
fn server_reaches_memory_only_while_the_device_is_a_bus_master() {
    let (ram, _file) = shared_ram();
    let (server, socket) = Server::good();
    let host = UserServer::start("/run/x", socket, ram.clone(), None).unwrap();
    host.share_ram().unwrap();
    let device = host.function("user0", &FakeAllocator::default(), Arc::new(FakeSlots::default())).unwrap();
    server.received();
    let mut write = wire::dma_access(0x1000, 4);
    write.extend([0x5a; 4]);
    let reaches = || {
        let reads = server.ask(Command::DmaRead, &wire::dma_access(0x1000, 4)).0.kind;
        let writes = server.ask(Command::DmaWrite, &write).0.kind;
        assert_eq!(reads, writes);
        reads == Kind::Reply { refused: None }
    };
    assert!(!reaches(), "at power-on");
    assert_eq!(ram.read_obj::<u32>(GuestAddress(0x1000)).unwrap(), 0);
    device.write_config(regs::COMMAND, &[6, 0]);
    assert!(reaches());
    device.write_config(regs::COMMAND, &[2]);
    assert!(!reaches(), "a one-byte write turned bus mastering off");
    device.write_config(0, &[0, 0, 0, 0, 6, 0, 0, 0]);
    assert!(reaches(), "a wide write turned bus mastering on");
    device.write_config(regs::COMMAND + 1, &[0]);
    assert!(reaches(), "a write to another byte changed nothing");
    device.reset().unwrap();
    assert!(!reaches(), "after a reset");
}

#[test]
fn all_ram_goes_to_a_server_without_an_iommu() {
    let (ram, _file) = shared_ram();
    let (server, socket) = Server::good();
    let host = UserServer::start("/run/x", socket, ram.clone(), None).unwrap();
    server.received();
    host.share_ram().unwrap();
    let received = server.received();
    let flags = wire::DmaFlags { read: true, write: true };
    let wanted = [wire::dma_map(flags, 0, 0, 0x4000), wire::dma_map(flags, 0x4000, 0x10_0000, 0x4000)];
    assert_eq!(received.iter().map(|received| received.payload.clone()).collect::<Vec<_>>(), wanted);
    assert!(received.iter().all(|received| received.descriptors.len() == 1));
    // The server may also use messages, once the device is a bus master.
    let slots = Arc::new(FakeSlots::default());
    let device = host.function("user0", &FakeAllocator::default(), slots).unwrap();
    device.write_config(regs::COMMAND, &[6, 0]);
    ram.write_slice(&[6; 4], GuestAddress(0x10_0000)).unwrap();
    let (_, answer) = server.ask(Command::DmaRead, &wire::dma_access(0x10_0000, 4));
    assert_eq!(answer[ACCESS..], [6; 4]);
    // Private memory cannot be shared with another process.
    let (_server, socket) = Server::good();
    let host = UserServer::start("/run/x", socket, super::ram(), None).unwrap();
    assert!(host.share_ram().is_err());
}
