// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connection to a front end. The device works while the connection exists.

use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, poll};

use crate::device::Device;
use crate::iotlb::{self, Applied, Iotlb, READ};
use crate::memory::{Fault, Memory};
use crate::protocol::{self, BACKEND_IOTLB_MSG, Message, request};
use crate::ring::Ring;

/// `VIRTIO_F_VERSION_1`, `VHOST_USER_F_PROTOCOL_FEATURES`.
const FEATURES: u64 = 1 << 32 | 1 << 30;
/// `MQ`, `REPLY_ACK`, `CONFIGURE_MEM_SLOTS`.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 15;
/// `VIRTIO_F_ACCESS_PLATFORM`: addresses are translated. `BACKEND_REQ`: the server requests translations over a separate channel.
const ACCESS_PLATFORM: u64 = 1 << 33;
const BACKEND_REQ: u64 = 1 << 5;
/// Maximum number of memory regions.
const REGIONS: u64 = 64;

/// Behaviour of the server, from its options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// True if addresses are translated.
    pub(crate) iommu: bool,
    /// Address whose translation the server also requests. The server does not use this translation.
    pub(crate) probe: Option<u64>,
    /// True if the server confirms that translations were removed.
    pub(crate) confirms: bool,
}

/// Connection to a front end.
pub(crate) struct Session {
    manner: Manner,
    socket: UnixStream,
    /// Channel for translation requests.
    channel: Option<UnixStream>,
    /// Pending translation request: address and access. The device pauses until the answer arrives.
    asked: Option<(u64, u8)>,
    device: Device,
    memory: Memory,
    rings: Vec<Ring>,
}

impl Session {
    /// Creates a session with this number of queues.
    pub(crate) fn new(socket: UnixStream, device: Device, queues: u16, manner: Manner) -> Self {
        let rings = (0..queues).map(|_| Ring::default()).collect();
        Self { manner, socket, channel: None, asked: None, device, memory: Memory::default(), rings }
    }

    /// Serves the front end until it closes the connection.
    pub(crate) fn serve(mut self) -> Result<()> {
        loop {
            let socket = self.socket.as_fd();
            let mut files = vec![PollFd::new(&socket, PollFlags::IN)];
            files.extend(self.channel.iter().map(|channel| PollFd::new(channel, PollFlags::IN)));
            let source = self.device.source(&self.rings).filter(|_| self.asked.is_none());
            files.extend(source.iter().map(|source| PollFd::new(source, PollFlags::IN)));
            files.extend(
                self.rings.iter().filter_map(|ring| ring.kick.as_ref()).map(|kick| PollFd::new(kick, PollFlags::IN)),
            );
            poll(&mut files, None)?;
            let came = !files[0].revents().is_empty();
            let answered = self.channel.is_some() && !files[1].revents().is_empty();
            if came {
                let Some(message) = protocol::receive(&self.socket)? else { return Ok(()) };
                self.answer(message)?;
            }
            if answered {
                self.take_answer()?;
            }
            for kick in self.rings.iter_mut().filter_map(|ring| ring.kick.as_mut()) {
                // The read fails if the driver has sent no notification for this queue.
                let _ = kick.read(&mut [0; 8]);
            }
            if self.asked.is_none() {
                self.work()?;
            }
        }
    }

    /// Asks the front end for a translation.
    fn ask(&mut self, address: u64, access: u8) -> Result<()> {
        let channel = self.channel.as_ref().context(
            "cannot ask for a translation: the front end has set up no channel for requests (SET_BACKEND_REQ_FD)",
        )?;
        protocol::ask(channel, BACKEND_IOTLB_MSG, &iotlb::message(address, access, iotlb::MISS))?;
        self.asked = Some((address, access));
        Ok(())
    }

    /// Handles the front end's answer to a translation request. The front end has sent the translation before this answer, or
    /// denies the access.
    fn take_answer(&mut self) -> Result<()> {
        let channel = self.channel.as_ref().context(
            "cannot receive a translation: the front end has set up no channel for requests (SET_BACKEND_REQ_FD)",
        )?;
        let answer = protocol::receive(channel)?
            .context("the front end closed the channel for requests (SET_BACKEND_REQ_FD)")?;
        if let (Some((address, access)), Some(iotlb), true) =
            (self.asked.take(), &mut self.memory.iotlb, answer.quad(0)? != 0)
        {
            iotlb.deny(address, access);
            println!("denied {address:#x}");
        }
        Ok(())
    }

    fn work(&mut self) -> Result<()> {
        match self.device.work(&mut self.rings, &self.memory) {
            Ok(()) => Ok(()),
            Err(Fault::Unknown(address, access)) => self.ask(address, access),
            Err(Fault::Denied(address)) => bail!(
                "the driver uses address {address:#x}, but no memory is at this address, or the front end denies the access"
            ),
        }
    }

    fn answer(&mut self, message: Message) -> Result<()> {
        let number = |value: u64| Some(value.to_ne_bytes().to_vec());
        let (request, needs_reply) = (message.head.request, message.head.needs_reply);
        let payload = match request {
            request::GET_FEATURES => {
                let translates = if self.manner.iommu { ACCESS_PLATFORM } else { 0 };
                number(FEATURES | self.device.features() | translates)
            }
            request::GET_PROTOCOL_FEATURES => {
                let channel = if self.manner.iommu { BACKEND_REQ } else { 0 };
                number(PROTOCOL_FEATURES | self.device.protocol_features() | channel)
            }
            request::GET_CONFIG => Some(config(&message, &self.device.config(self.rings.len())?)?),
            request::IOTLB_MSG => {
                let iotlb = self
                    .memory
                    .iotlb
                    .as_mut()
                    .context("the front end sent a translation, but has not accepted VIRTIO_F_ACCESS_PLATFORM")?;
                let applied = iotlb.take(&message)?;
                (needs_reply && (applied == Applied::Update || self.manner.confirms)).then(|| vec![0; 8])
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
                self.set(message)
                    .with_context(|| format!("cannot handle the front end's vhost-user request {request}"))?;
                needs_reply.then(|| vec![0; 8])
            }
        };
        payload.map_or(Ok(()), |payload| protocol::answer(&self.socket, request, &payload))
    }

    /// Handles requests that need no answer except a confirmation.
    fn set(&mut self, mut message: Message) -> Result<()> {
        match message.head.request {
            request::SET_OWNER | request::SET_PROTOCOL_FEATURES => {}
            request::SET_FEATURES => {
                self.memory.iotlb = (message.quad(0)? & ACCESS_PLATFORM != 0).then(Iotlb::default);
            }
            request::SET_BACKEND_REQ_FD => self.channel = message.files.pop().map(|file| OwnedFd::from(file).into()),
            request::SET_MEM_TABLE => {
                self.memory.clear();
                if message.files.len() != usize::try_from(message.long(0)?)? {
                    bail!("the front end sent {} files for {} memory regions", message.files.len(), message.long(0)?);
                }
                for (index, file) in std::mem::take(&mut message.files).into_iter().enumerate() {
                    self.memory.add(region(&message, 8 + 32 * index)?, file)?;
                }
            }
            request::ADD_MEM_REG => {
                let file = message.files.pop().context("the front end sent a memory region without a file")?;
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
            _ => bail!("this server does not support the request"),
        }
        Ok(())
    }

    fn ring(&mut self, index: u32) -> Result<&mut Ring> {
        self.rings
            .get_mut(usize::try_from(index)?)
            .context("the queue of the request does not exist; --queues sets the number of queues")
    }
}

/// Parses a memory region in a message.
fn region(message: &Message, place: usize) -> Result<[u64; 4]> {
    let mut fields = [0; 4];
    for (index, field) in fields.iter_mut().enumerate() {
        *field = message.quad(place + 8 * index)?;
    }
    Ok(fields)
}

/// Returns the answer to a request for the device's configuration. The answer repeats the request's offset, length and flags before
/// the bytes.
fn config(message: &Message, all: &[u8]) -> Result<Vec<u8>> {
    let (from, len) = (usize::try_from(message.long(0)?)?, usize::try_from(message.long(4)?)?);
    let bytes = (from..from + len).map(|place| all.get(place).copied().unwrap_or_default());
    Ok(message.payload.iter().take(12).copied().chain(bytes).collect())
}
