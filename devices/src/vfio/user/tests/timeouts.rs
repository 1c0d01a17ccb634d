// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of servers that answer each request in time, but delay the VM too much in total.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::event_fd::borrow;
use crate::peer_timeouts::Operation;
use crate::vfio::user::connection::{CallError, Connection};
use crate::vfio::user::scripted_server::{Instead, Server};
use crate::vfio::user::wire::{self, Command, Header, MOST_DATA};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Starts a server that takes `time` for each request of this kind, and accepts one descriptor per
/// message.
fn slow(command: Command, time: Duration) -> (Server, UnixStream) {
    Server::start(Box::new(move |header: &Header, _: &[u8]| {
        if header.command == command.number() {
            thread::sleep(time);
        }
        let version = b"\0\0\x01\0{\"capabilities\":{\"max_msg_fds\":1,\"max_dma_maps\":6}}\0";
        (header.command == Command::Version.number()).then(|| Instead::Answer(version.to_vec()))
    }))
}

/// Returns the number of requests of this kind that the server got since the last call of `received`.
fn count(server: &Server, command: Command) -> usize {
    server.received().iter().filter(|received| received.command == command.number()).count()
}

#[test]
fn vectors_sent_one_by_one_share_a_time_limit() {
    assert!(in_some_try(|| {
        let (server, client) = impatient_client(slow(Command::SetIrqs, LIMIT / 4))?;
        let events: Vec<_> = (0..16).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect();
        let events: Vec<_> = events.iter().map(borrow).collect();
        assert!(matches!(client.enable_irqs(wire::MSIX_IRQS, &events), Err(CallError::Gone)));
        Some(
            count(&server, Command::SetIrqs) <= 5
                && is_gone(&client, "did not answer DEVICE_SET_IRQS in time (limit: 1 s)"),
        )
    }));
}

#[test]
fn parts_of_an_unmap_share_a_time_limit() {
    assert!(in_some_try(|| {
        let mut rig = rig_with_limit(slow(Command::DmaUnmap, LIMIT / 2), LIMIT).ok()?;
        for page in 0..6 {
            rig.map(page << 12, page << 12, 0x1000, RW).ok()?;
        }
        rig.mapper.unmap(0, 0x6000).unwrap();
        assert!(!rig.table.read(0x5000, &mut [0]));
        Some(
            count(&rig.server, Command::DmaUnmap) <= 3
                && is_gone(&rig.client, "did not answer DMA_UNMAP in time (limit: 1 s)"),
        )
    }));
}

#[test]
fn requests_of_one_exit_share_a_time_limit() {
    assert!(in_some_try(|| {
        let (_server, client) = impatient_client(slow(Command::RegionRead, LIMIT * 2 / 5))?;
        let _exit = Operation::begin();
        let answered = (0..3).take_while(|_| client.read_region(0, 0, &mut [0; 4]).is_ok()).count();
        Some(answered == 2 && is_gone(&client, "did not answer REGION_READ in time (limit: 1 s)"))
    }));
}

#[test]
fn repeatedly_slow_server_is_given_up() {
    assert!(in_some_try(|| {
        let (_server, client) = impatient_client(slow(Command::RegionRead, LIMIT * 7 / 10))?;
        let answered = (0..20).take_while(|_| client.read_region(0, 0, &mut [0; 4]).is_ok()).count();
        Some((1..4).contains(&answered) && is_gone(&client, "delayed other threads for too long"))
    }));
}

/// Starts a server that answers each access to a region byte by byte.
fn dribbling(pause: Duration) -> (Server, UnixStream) {
    Server::that(Command::RegionRead, move || Instead::Dribble(pause))
}

#[test]
fn answer_sent_byte_by_byte_is_accepted() {
    let (_server, socket) = dribbling(Duration::ZERO);
    let client = client(socket).unwrap();
    let mut bytes = [0; 8];
    client.read_region(0, 0x40, &mut bytes).unwrap();
    assert_eq!(bytes, [0x40, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47]);
    assert_eq!(client.gone(), None);
}

#[test]
fn server_with_trickling_bytes_is_dropped_within_limit() {
    // Each byte arrives in time, but all 36 bytes take three times the limit.
    assert!(in_some_try(|| {
        let (_server, client) = impatient_client(dribbling(LIMIT / 12))?;
        assert!(client.read_region(0, 0x40, &mut [0; 4]).is_err());
        Some(is_gone(&client, "did not answer REGION_READ in time (limit: 1 s)"))
    }));
}

#[test]
fn slowly_read_answer_does_not_block_other_threads() {
    /// Memory that may be read.
    struct Everything;
    impl DmaTarget for Everything {
        fn read(&self, _: u64, _: &mut [u8]) -> bool {
            true
        }
        fn write(&self, _: u64, _: &[u8]) -> bool {
            false
        }
    }
    assert!(in_some_try(|| {
        let (socket, mut other) = UnixStream::pair().unwrap();
        let connection = Connection::new("/run/x", socket, Arc::new(Everything), LIMIT).unwrap();
        let mut question = Header::request(1, Command::DmaRead, ACCESS).encode().to_vec();
        question.extend(wire::dma_access(0, MOST_DATA));
        other.write_all(&question).unwrap();
        let drain = thread::spawn(move || {
            let mut some = vec![0; 8192];
            while other.read(&mut some).is_ok_and(|got| got != 0) {
                thread::sleep(LIMIT / 10);
            }
        });
        // By now, the client has sent only a part of its answer.
        thread::sleep(LIMIT / 5);
        let start = Instant::now();
        assert!(connection.call(Command::Reset, &[], &[], 0).is_err());
        let time = start.elapsed();
        drop(connection);
        drain.join().unwrap();
        // The server needs more than twelve times the limit to read the whole answer.
        Some(time < LIMIT * 8)
    }));
}
