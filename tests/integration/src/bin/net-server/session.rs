// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A connection to a front end, and the packets that pass meanwhile.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};

use crate::iotlb::{self, Iotlb, READ, Told};
use crate::memory::{Fault, Memory};
use crate::protocol::{self, BACKEND_IOTLB_MSG, Message, request};
use crate::ring::Ring;

/// `VIRTIO_F_VERSION_1`, `VHOST_USER_F_PROTOCOL_FEATURES`, and `VIRTIO_NET_F_CSUM`: the interface finishes checksums.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1;
/// `MQ`, `REPLY_ACK`, `CONFIGURE_MEM_SLOTS`.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 15;
/// `VIRTIO_F_ACCESS_PLATFORM`, where addresses are translated, and `BACKEND_REQ`, by which it asks for them.
const ACCESS_PLATFORM: u64 = 1 << 33;
const BACKEND_REQ: u64 = 1 << 5;
/// Most regions of memory.
const REGIONS: u64 = 64;
/// Bytes before each packet of the guest, the number of buffers last.
const HEADER: usize = 12;
/// Bytes before each packet of the interface: the same without that number.
const TAP_HEADER: usize = 10;
/// Most bytes of a packet.
const PACKET: usize = 65536;
/// Packets of a queue at a time.
const AT_ONCE: usize = 64;

/// What the server does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// It translates addresses.
    pub(crate) iommu: bool,
    /// What it asks for beside those that it needs.
    pub(crate) probe: Option<u64>,
    /// It confirms that translations are forgotten.
    pub(crate) confirms: bool,
}

/// See the module.
pub(crate) struct Session {
    manner: Manner,
    socket: UnixStream,
    /// Where it asks for translations.
    channel: Option<UnixStream>,
    /// What it has asked for, an address and an access. Until the answer comes, no packet moves.
    asked: Option<(u64, u8)>,
    tap: File,
    memory: Memory,
    rings: Vec<Ring>,
    /// A packet of the interface that has no buffer yet, with the guest's header.
    waiting: Option<Vec<u8>>,
}

impl Session {
    /// With so many queues.
    pub(crate) fn new(socket: UnixStream, tap: File, queues: u16, manner: Manner) -> Self {
        let rings = (0..queues).map(|_| Ring::default()).collect();
        Self { manner, socket, channel: None, asked: None, tap, memory: Memory::default(), rings, waiting: None }
    }

    /// Serves the front end until it goes.
    pub(crate) fn serve(mut self) -> Result<()> {
        loop {
            let wants_packets =
                self.waiting.is_none() && self.asked.is_none() && self.rings.first().is_some_and(Ring::runs);
            let (tap, socket) = (self.tap.as_fd(), self.socket.as_fd());
            let mut files = vec![PollFd::new(&socket, PollFlags::IN)];
            files.push(PollFd::new(&tap, if wants_packets { PollFlags::IN } else { PollFlags::empty() }));
            files.extend(self.channel.iter().map(|channel| PollFd::new(channel, PollFlags::IN)));
            let answered = files.len() - 1;
            files.extend(
                self.rings.iter().filter_map(|ring| ring.kick.as_ref()).map(|kick| PollFd::new(kick, PollFlags::IN)),
            );
            poll(&mut files, None)?;
            let came = !files[0].revents().is_empty();
            let answered = answered == 2 && !files[answered].revents().is_empty();
            if came {
                let Some(message) = protocol::receive(&self.socket)? else { return Ok(()) };
                self.answer(message)?;
            }
            if answered {
                self.take_answer()?;
            }
            for kick in self.rings.iter_mut().filter_map(|ring| ring.kick.as_mut()) {
                // Nothing is there where nobody kicked.
                let _ = kick.read(&mut [0; 8]);
            }
            if self.asked.is_none() {
                self.move_packets()?;
            }
        }
    }

    /// Asks the front end for a translation.
    fn ask(&mut self, address: u64, access: u8) -> Result<()> {
        let channel = self.channel.as_ref().context("there is no channel to ask for translations")?;
        protocol::ask(channel, BACKEND_IOTLB_MSG, &iotlb::message(address, access, iotlb::MISS))?;
        self.asked = Some((address, access));
        Ok(())
    }

    /// The front end has told the translation, or says that there is none.
    fn take_answer(&mut self) -> Result<()> {
        let channel = self.channel.as_ref().context("there is no channel")?;
        let answer = protocol::receive(channel)?.context("the front end closes the channel")?;
        if let (Some((address, access)), Some(iotlb), true) =
            (self.asked.take(), &mut self.memory.iotlb, answer.quad(0)? != 0)
        {
            iotlb.deny(address, access);
            println!("denied {address:#x}");
        }
        Ok(())
    }

    fn move_packets(&mut self) -> Result<()> {
        let Self { memory, rings, tap, waiting, .. } = self;
        let moved = (|| {
            for ring in rings.iter_mut().skip(1).step_by(2) {
                transmit(ring, memory, tap)?;
            }
            rings.first_mut().map_or(Ok(()), |ring| receive(ring, memory, tap, waiting))
        })();
        match moved {
            Ok(()) => Ok(()),
            Err(Fault::Unknown(address, access)) => self.ask(address, access),
            Err(Fault::Denied(address)) => bail!("the driver names {address:#x}, where no memory is"),
        }
    }

    fn answer(&mut self, message: Message) -> Result<()> {
        let number = |value: u64| Some(value.to_ne_bytes().to_vec());
        let (request, needs_reply) = (message.request, message.needs_reply);
        let payload = match request {
            request::GET_FEATURES => number(FEATURES | if self.manner.iommu { ACCESS_PLATFORM } else { 0 }),
            request::GET_PROTOCOL_FEATURES => {
                number(PROTOCOL_FEATURES | if self.manner.iommu { BACKEND_REQ } else { 0 })
            }
            request::IOTLB_MSG => {
                let iotlb = self.memory.iotlb.as_mut().context("there are no translations")?;
                let told = iotlb.take(&message)?;
                (needs_reply && (told == Told::Update || self.manner.confirms)).then(|| vec![0; 8])
            }
            request::GET_QUEUE_NUM => number(self.rings.len() as u64),
            request::GET_MAX_MEM_SLOTS => number(REGIONS),
            request::GET_VRING_BASE => {
                let index = message.long(0)?;
                let ring = self.ring(index)?;
                ring.kick = None;
                Some([index, ring.next.into()].map(u32::to_ne_bytes).concat())
            }
            _ => {
                self.set(message).with_context(|| format!("request {request}"))?;
                needs_reply.then(|| vec![0; 8])
            }
        };
        payload.map_or(Ok(()), |payload| protocol::answer(&self.socket, request, &payload))
    }

    /// Does what wants no answer but that it is done.
    fn set(&mut self, mut message: Message) -> Result<()> {
        match message.request {
            request::SET_OWNER | request::SET_PROTOCOL_FEATURES => {}
            request::SET_FEATURES => {
                self.memory.iotlb = (message.quad(0)? & ACCESS_PLATFORM != 0).then(Iotlb::default);
            }
            request::SET_BACKEND_REQ_FD => self.channel = message.files.pop().map(|file| OwnedFd::from(file).into()),
            request::SET_MEM_TABLE => {
                self.memory.clear();
                if message.files.len() != usize::try_from(message.long(0)?)? {
                    bail!("there are {} files for {} regions", message.files.len(), message.long(0)?);
                }
                for (index, file) in std::mem::take(&mut message.files).into_iter().enumerate() {
                    self.memory.add(region(&message, 8 + 32 * index)?, file)?;
                }
            }
            request::ADD_MEM_REG => {
                let file = message.files.pop().context("a region has no file")?;
                self.memory.add(region(&message, 8)?, file)?;
            }
            request::REM_MEM_REG => self.memory.remove(message.quad(8)?, message.quad(16)?)?,
            request::SET_VRING_NUM => self.ring(message.long(0)?)?.size = u16::try_from(message.long(4)?)?,
            request::SET_VRING_BASE => self.ring(message.long(0)?)?.next = u16::try_from(message.long(4)?)?,
            request::SET_VRING_ADDR => {
                let address = |place| self.memory.ring_address(message.quad(place)?);
                let (descriptors, used, available) = (address(8)?, address(16)?, address(24)?);
                let ring = self.ring(message.long(0)?)?;
                (ring.descriptors, ring.used, ring.available) = (descriptors, used, available);
            }
            request::SET_VRING_KICK => {
                self.ring(message.long(0)?)?.kick = message.files.pop();
                if let Some(address) = self.manner.probe.take() {
                    self.ask(address, READ)?;
                }
            }
            request::SET_VRING_CALL => self.ring(message.long(0)?)?.call = message.files.pop(),
            request::SET_VRING_ERR => drop(message.files),
            request::SET_VRING_ENABLE => self.ring(message.long(0)?)?.is_enabled = message.long(4)? != 0,
            _ => bail!("is not known"),
        }
        Ok(())
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings.get_mut(usize::try_from(index)?).context("there is no such queue")
    }
}

/// A region in a message.
fn region(message: &Message, place: usize) -> Result<[u64; 4]> {
    let mut fields = [0; 4];
    for (index, field) in fields.iter_mut().enumerate() {
        *field = message.quad(place + 8 * index)?;
    }
    Ok(fields)
}

/// Takes packets of the guest to the interface.
fn transmit(ring: &mut Ring, memory: &Memory, mut tap: &File) -> Result<(), Fault> {
    for _ in 0..AT_ONCE {
        let Some(chain) = ring.runs().then(|| ring.chain(memory)).transpose()?.flatten() else { return Ok(()) };
        let mut packet = Vec::new();
        for part in chain.parts.iter().filter(|part| !part.is_writable) {
            let from = packet.len();
            packet.resize((from + part.len as usize).min(HEADER + PACKET), 0);
            memory.read(part.address, &mut packet[from..])?;
        }
        ring.put_used(memory, &chain, 0)?;
        if let (Some(header), Some(data)) = (packet.get(..TAP_HEADER), packet.get(HEADER..)) {
            // What the interface does not take is lost, as on a wire.
            let _ = tap.write(&[header, data].concat());
        }
    }
    // The rest as soon as messages had their turn.
    ring.kick.iter_mut().for_each(|kick| _ = kick.write(&1u64.to_ne_bytes()));
    Ok(())
}

/// Takes packets of the interface to the guest. One that finds no buffer waits, and others in the interface.
fn receive(ring: &mut Ring, memory: &Memory, mut tap: &File, waiting: &mut Option<Vec<u8>>) -> Result<(), Fault> {
    for _ in 0..AT_ONCE {
        if !ring.runs() {
            return Ok(());
        }
        if waiting.is_none() {
            let mut packet = vec![0; HEADER + PACKET];
            let len = match tap.read(&mut packet[HEADER - TAP_HEADER..]) {
                Ok(len) if len >= TAP_HEADER => len,
                Err(error) if error.kind() != ErrorKind::WouldBlock => continue,
                _ => return Ok(()),
            };
            packet.truncate(HEADER - TAP_HEADER + len);
            // The header first, then one buffer.
            packet.copy_within(HEADER - TAP_HEADER..HEADER, 0);
            packet[TAP_HEADER..HEADER].copy_from_slice(&1u16.to_le_bytes());
            *waiting = Some(packet);
        }
        let Some(packet) = waiting else { return Ok(()) };
        let Some(chain) = ring.chain(memory)? else { return Ok(()) };
        let mut done = 0;
        for part in chain.parts.iter().filter(|part| part.is_writable) {
            let len = (packet.len() - done).min(part.len as usize);
            memory.write(part.address, &packet[done..done + len])?;
            done += len;
        }
        ring.put_used(memory, &chain, u32::try_from(done).unwrap_or(u32::MAX))?;
        *waiting = None;
    }
    Ok(())
}
