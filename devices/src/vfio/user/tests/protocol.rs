// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the client, with servers that follow the protocol and servers that break it.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Instant;

use super::*;
use crate::vfio::user::client::open_socket;
use crate::vfio::user::connection::{CallError, Connection};
use crate::vfio::user::scripted_server::{Instead, Server};
use crate::vfio::user::wire::{self, ACCESS, Command, Header, Kind, MOST_DATA};

#[test]
fn device_of_a_good_server_is_described() {
    let (_server, socket) = Server::good();
    let client = client(socket).unwrap();
    let description = client.describe().unwrap();
    assert_eq!((description.resets, description.irqs, description.bars[0].size), (true, (1, 0), 1 << 20));
    assert_eq!((description.config.size, description.bars[1].size), (256, 0));
    let mut data = [0; 4];
    client.read_region(0, 0x10, &mut data).unwrap();
    assert_eq!(data, [0x10, 0x11, 0x12, 0x13]);
    client.write_region(wire::CONFIG_REGION, 4, &[6, 0]).unwrap();
    client.read_region(wire::CONFIG_REGION, 4, &mut data[..2]).unwrap();
    assert_eq!(data[..2], [6, 0]);
    assert_eq!(client.abilities().descriptors, 8);
}

#[test]
fn crash_report_has_last_messages_with_their_outcomes() {
    let (_server, socket) = Server::that(Command::RegionWrite, || Instead::Refuse(13));
    let table = Arc::new(DmaTable::new("/run/kept", ram(), None));
    let client = Client::with_limit("/run/kept", socket, table, AMPLE).unwrap();
    client.read_region(0, 0x10, &mut [0; 4]).unwrap();
    client.write_region(0, 0x10, &[0x5a; 4]).unwrap_err();
    let text = crate::crash::last_requests();
    let (_, text) = text.split_once("last messages to the vfio-user server of /run/kept, oldest first:\n").unwrap();
    assert!(text.starts_with("1 id=0 command=1 bytes="), "{text}");
    // The payloads of REGION_READ and REGION_WRITE start with offset, region and count.
    let expected = [" command=9 bytes=16 answer=20", " command=10 bytes=20 refused=13"];
    let last: Vec<_> = text.lines().filter(|line| expected.iter().any(|end| line.ends_with(end))).collect();
    assert_eq!(last.len(), 2, "{text}");
}

#[test]
fn missing_server_is_a_user_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none");
    let error = open_socket(&path).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("start the vfio-user server first"), "{error}");
    // This listener accepts no connection, so its clients wait in a queue and get no answer. If the queue is full, a new client gets an
    // error immediately.
    let path = dir.path().join("full");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut waiting = Vec::new();
    let full = loop {
        match open_socket(&path) {
            Ok(socket) => waiting.push(socket),
            Err(error) => break error,
        }
    };
    assert!(full.is_user_error());
    let error = Client::with_limit("/run/x", waiting.remove(0), Arc::new(Nothing), LIMIT).err().unwrap().to_string();
    assert!(error.contains("did not answer VERSION"), "{error}");
}

#[test]
fn handshake_errors_have_one_line() {
    let answer = |payload: &'static [u8]| Server::that(Command::Version, move || Instead::Answer(payload.to_vec()));
    assert!(refusal(answer(&[1, 0, 0, 0])).contains("version 1.0"));
    assert!(refusal(answer(&[])).contains("sent an invalid answer to VERSION"));
    assert!(refusal(answer(&[0, 0, 1, 0, b'{', 0])).contains("that Carom cannot parse"));
    assert!(refusal(answer(&[0; 5000])).contains("answered VERSION with 5000 bytes"));
    assert!(refusal(Server::that(Command::Version, || Instead::Refuse(22))).contains("Invalid argument"));
    assert!(refusal(Server::that(Command::Version, || Instead::Close)).contains("closed the connection"));
    assert!(refusal(Server::that(Command::DeviceInfo, || Instead::Answer(vec![0; 16]))).contains("not a PCI function"));
    assert!(refusal(Server::that(Command::DeviceInfo, || Instead::Answer(vec![0; 8]))).contains("GET_INFO"));
    assert!(refusal(Server::that(Command::RegionInfo, || Instead::Answer(vec![9; 32]))).contains("REGION_INFO"));
    assert!(refusal(Server::that(Command::IrqInfo, || Instead::Answer(Vec::new()))).contains("IRQ_INFO"));
}

#[test]
fn server_that_breaks_the_protocol_is_gone() {
    let header = |id, command, kind, payload| Header { id, command, kind, payload }.encode().to_vec();
    let reply = Kind::Reply { refused: None };
    let read = Command::RegionRead.number();
    for (bytes, part) in [
        // The messages are an answer to no request, an answer to another request, an answer that is too long, two
        // impossible sizes, and an impossible type.
        (header(999, read, reply, 0), "a request that is not pending"),
        (header(1, 77, reply, 0), "with an answer to another command (number 77)"),
        (header(1, read, reply, 5000), "with 5000 bytes"),
        (vec![1, 0, 9, 0, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "message of 3 bytes"),
        (vec![1, 0, 9, 0, 255, 255, 255, 255, 1, 0, 0, 0, 0, 0, 0, 0], "message of 4294967295 bytes"),
        (vec![1, 0, 9, 0, 16, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0], "type 9"),
        // These answers have the right size, but do not match the request.
        (header(1, read, reply, 20).into_iter().chain([0x55; 20]).collect(), "sent an invalid answer to REGION_READ"),
        (
            header(1, read, reply, 17).into_iter().chain(wire::region_access(0, 0, 4)).chain([1]).collect(),
            "an invalid answer",
        ),
    ] {
        let (_server, socket) = Server::that(Command::RegionRead, move || Instead::Bytes(bytes.clone()));
        let client = client(socket).unwrap();
        let mut data = [0xff; 4];
        assert!(matches!(client.read_region(0, 0, &mut data), Err(CallError::Gone)), "{part}");
        let reason = client.gone().unwrap();
        assert!(reason.contains(part), "{reason}");
        assert_eq!(data, [0xff; 4]);
        let start = Instant::now();
        assert!(matches!(client.reset(), Err(CallError::Gone)));
        assert!(start.elapsed() < AMPLE, "no call waits for a server that is gone");
    }
}

#[test]
fn silence_and_death_end_every_wait() {
    for (instead, threads, part) in [
        ((|| Instead::Silence) as fn() -> Instead, 4, "did not answer REGION_READ in time (limit: 1 s)"),
        (|| Instead::Close, 4, "closed the connection"),
        // The server sends only a part of an answer.
        (|| Instead::Bytes(vec![1, 0, 9, 0, 36]), 1, "did not answer"),
    ] {
        let is_noticed = || {
            let (_server, client) = impatient_client(Server::that(Command::RegionRead, instead))?;
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| assert!(matches!(client.read_region(0, 0, &mut [0; 4]), Err(CallError::Gone))));
                }
            });
            Some(is_gone(&client, part))
        };
        assert!(in_some_try(is_noticed), "{part}");
    }
}

#[test]
fn server_that_reads_nothing_blocks_no_thread() {
    // The server reads nothing, so its socket becomes full.
    let (socket, _other) = UnixStream::pair().unwrap();
    let connection = Connection::new("/run/x", socket, Arc::new(Nothing), LIMIT);
    let connection = connection.unwrap();
    let start = Instant::now();
    let big = vec![0; MOST_DATA];
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert!(connection.call(Command::RegionWrite, &big, &[], 0).is_err()));
        }
    });
    assert!(start.elapsed() < AMPLE);
}

#[test]
fn each_thread_gets_its_own_answer() {
    let (_server, socket) = Server::good();
    let client = client(socket).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let client = &client;
            scope.spawn(move || {
                for round in 0..100 {
                    let at = thread * 16 + round % 16;
                    let mut data = [0];
                    client.read_region(0, at, &mut data).unwrap();
                    assert_eq!(u64::from(data[0]), at);
                }
            });
        }
    });
}

#[test]
fn unwanted_descriptors_are_not_taken() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (server, socket) = Server::that(Command::RegionRead, || Instead::Silence);
    let _client = client(socket).unwrap();
    let before = open();
    let file = tempfile::tempfile().unwrap();
    let mut message =
        Header { id: 9, command: 99, kind: Kind::Command { no_reply: true }, payload: 0 }.encode().to_vec();
    message.extend(Header::request(5, Command::DmaRead, 0).encode());
    server.send_with(&message, &file);
    // The second message is answered, so the client has read both messages.
    let (header, _) = server.answer();
    assert_eq!((header.id, header.kind), (5, Kind::Reply { refused: Some(libc::EINVAL.unsigned_abs()) }));
    drop(file);
    // The margin of 64 is for other tests, which open and close descriptors at the same time.
    assert!(open() < before + 64);
}

#[test]
fn invalid_commands_are_refused() {
    let rig = rig(Server::good());
    let too_many = wire::dma_access(0, MOST_DATA + 1);
    for (command, payload, error) in [
        (Command::DmaRead, &[][..], libc::EINVAL),
        (Command::DmaRead, &too_many, libc::EINVAL),
        (Command::DmaRead, &[0; ACCESS + 1], libc::EINVAL),
        (Command::DmaWrite, &wire::dma_access(0, 8), libc::EINVAL),
        (Command::Reset, &[], libc::EOPNOTSUPP),
        (Command::Version, &[0; 40], libc::EOPNOTSUPP),
    ] {
        let (header, answer) = rig.server.ask(command, payload);
        let kind = Kind::Reply { refused: Some(error.unsigned_abs()) };
        assert_eq!((header.kind, header.command, answer.len()), (kind, command.number(), 0), "{command:?}");
    }
    assert!(rig.client.gone().is_none());
}
