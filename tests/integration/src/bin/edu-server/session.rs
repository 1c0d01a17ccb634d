// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connection to a client: its messages, its memory, and the device's transfers.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use rustix::fs::{OFlags, fcntl_getfl, ftruncate};
use rustix::io::Errno;

use crate::device::{BAR_SIZE, CONFIG_SIZE, Edu, Transfer};
use crate::protocol::{self, Message, answer, refuse};

const CONFIG_REGION: u32 = 7;
const MSI: u32 = 1;
/// ID of this server's requests. At most one request is pending.
const QUESTION: u16 = 1;

/// Settings of the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Mask of the DMA address bits that the device uses.
    pub(crate) mask: u64,
    /// Number of the transfer that the server interrupts by closing the connection.
    pub(crate) die_at: Option<u64>,
}

/// Memory that the client has mapped.
struct Mapping {
    size: u64,
    /// File of the memory, and the offset of the memory in this file. `None` if the client passed no file.
    file: Option<(File, u64)>,
}

/// Connection to a client.
pub(crate) struct Session {
    socket: UnixStream,
    log: File,
    settings: Settings,
    edu: Edu,
    memory: BTreeMap<u64, Mapping>,
    interrupt: Option<File>,
    /// Messages that arrived while this server waited for an answer.
    waiting: VecDeque<Message>,
    transfers: u64,
}

impl Session {
    pub(crate) fn new(socket: UnixStream, log: File, settings: Settings) -> Self {
        let (edu, memory, waiting) = (Edu::new(settings.mask), BTreeMap::new(), VecDeque::new());
        Self { socket, log, settings, edu, memory, interrupt: None, waiting, transfers: 0 }
    }

    /// Serves the client until it closes the connection.
    pub(crate) fn serve(mut self) -> Result<()> {
        loop {
            let message = match self.waiting.pop_front() {
                Some(message) => message,
                None => match protocol::receive(&self.socket)? {
                    Some(message) => message,
                    None => return Ok(()),
                },
            };
            self.handle(message)?;
            if let Some(transfer) = self.edu.started() {
                self.transfer(transfer)?;
                if self.edu.finish() {
                    self.raise()?;
                }
            }
        }
    }

    fn note(&mut self, line: &str) -> Result<()> {
        writeln!(self.log, "{line}").context("cannot write to the log (--log, or standard output)")
    }

    fn raise(&mut self) -> Result<()> {
        self.interrupt
            .as_mut()
            .map_or(Ok(()), |event| event.write_all(&1u64.to_ne_bytes()))
            .context("cannot write the eventfd of the interrupt")
    }

    fn handle(&mut self, mut message: Message) -> Result<()> {
        let numbers = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
        let payload = match message.head.command {
            protocol::VERSION => {
                let mut payload = numbers(&[1 << 16]);
                payload.extend(b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576}}\0");
                payload
            }
            // Flags: the device is a PCI device, and can be reset.
            protocol::GET_INFO => numbers(&[16, 3, 9, 5]),
            protocol::GET_REGION_INFO => {
                let index = message.long(8)?;
                let size = match index {
                    0 => u32::try_from(BAR_SIZE)?,
                    CONFIG_REGION => u32::try_from(CONFIG_SIZE)?,
                    _ => 0,
                };
                numbers(&[32, 3, index, 0, size, 0, 0, 0])
            }
            protocol::GET_IRQ_INFO => numbers(&[16, 1, message.long(8)?, u32::from(message.long(8)? == MSI)]),
            protocol::SET_IRQS => {
                if message.long(8)? == MSI {
                    self.interrupt = message.files.pop();
                }
                Vec::new()
            }
            protocol::REGION_READ | protocol::REGION_WRITE => match self.access(&message)? {
                Some(payload) => payload,
                None => return refuse(&self.socket, &message, Errno::INVAL),
            },
            protocol::DMA_MAP => {
                if !self.map(&mut message)? {
                    return refuse(&self.socket, &message, Errno::EXIST);
                }
                Vec::new()
            }
            protocol::DMA_UNMAP => {
                let (address, size) = (message.quad(8)?, message.quad(16)?);
                if self.memory.get(&address).is_none_or(|mapping| mapping.size != size) {
                    return refuse(&self.socket, &message, Errno::NOENT);
                }
                self.memory.remove(&address);
                self.note(&format!("unmap iova={address:#x} size={size:#x}"))?;
                message.payload.clone()
            }
            protocol::RESET => {
                self.edu = Edu::new(self.settings.mask);
                self.note("reset")?;
                Vec::new()
            }
            _ => return refuse(&self.socket, &message, Errno::OPNOTSUPP),
        };
        answer(&self.socket, &message, &payload)
    }

    /// Handles an access to a region. Returns the payload of the answer, or `None` if the access is invalid.
    fn access(&mut self, message: &Message) -> Result<Option<Vec<u8>>> {
        let (offset, region, count) = (message.quad(0)?, message.long(8)?, usize::try_from(message.long(12)?)?);
        let mut reply = message.payload[..16].to_vec();
        let size = if region == 0 { BAR_SIZE } else { CONFIG_SIZE as u64 };
        let fits = offset.checked_add(count as u64).is_some_and(|end| end <= size);
        if !matches!(region, 0 | CONFIG_REGION) || count > 8 || !fits {
            return Ok(None);
        }
        let mut data = vec![0; count];
        let at = usize::try_from(offset)?;
        match (region, message.head.command) {
            (0, protocol::REGION_READ) => self.edu.read(offset, &mut data),
            (_, protocol::REGION_READ) => data.copy_from_slice(&self.edu.config[at..at + count]),
            (0, _) => {
                if self.edu.write(offset, &message.payload[16..]) {
                    self.raise()?;
                }
                data.clear();
            }
            _ => {
                self.edu.config[at..at + count].copy_from_slice(&message.payload[16..]);
                data.clear();
            }
        }
        reply.append(&mut data);
        Ok(Some(reply))
    }

    /// Adds memory that the client maps. Returns false if the memory overlaps memory that is already mapped. Logs the
    /// operations that the client's descriptor would permit to a malicious server.
    fn map(&mut self, message: &mut Message) -> Result<bool> {
        let (flags, offset, address, size) = (message.long(4)?, message.quad(8)?, message.quad(16)?, message.quad(24)?);
        let last = address
            .checked_add(size.checked_sub(1).context("the client sent DMA_MAP with a size of 0")?)
            .context("the client sent DMA_MAP with a range that exceeds the address space")?;
        let before = self.memory.range(..=last).next_back();
        if before.is_some_and(|(start, mapping)| start + (mapping.size - 1) >= address) {
            return Ok(false);
        }
        let access = ["none", "r", "w", "rw"][usize::try_from(flags & 3)?];
        let file = message.files.pop();
        let descriptor = file.as_ref().map_or(Ok("descriptor=none".into()), examine)?;
        self.note(&format!("map iova={address:#x} size={size:#x} access={access} {descriptor}"))?;
        self.memory.insert(address, Mapping { size, file: file.map(|file| (file, offset)) });
        Ok(true)
    }

    fn transfer(&mut self, transfer: Transfer) -> Result<()> {
        let Transfer { to_memory, address, len, .. } = transfer;
        self.transfers += 1;
        if self.settings.die_at == Some(self.transfers) {
            bail!("the connection is closed in transfer {}, as requested by --die-at", self.transfers);
        }
        let done = self.by_descriptor(transfer)?;
        let outcome = if done {
            "descriptor"
        } else if self.by_message(transfer)? {
            "message"
        } else {
            "refused"
        };
        let what = if to_memory { "write" } else { "read" };
        self.note(&format!("dma {what} iova={address:#x} len={len} {outcome}"))
    }

    /// Does the transfer through the descriptor of the client's memory. Returns false if the memory is not mapped or has no
    /// descriptor, or if the descriptor does not permit the transfer.
    fn by_descriptor(&mut self, transfer: Transfer) -> Result<bool> {
        let Transfer { to_memory, address, offset, len } = transfer;
        let Some((start, mapping)) = self.memory.range(..=address).next_back() else { return Ok(false) };
        let (Some((file, base)), at) = (&mapping.file, address - start) else { return Ok(false) };
        if at.checked_add(len as u64).is_none_or(|end| end > mapping.size) {
            return Ok(false);
        }
        let data = &mut self.edu.buffer[offset..offset + len];
        let outcome = if to_memory { file.write_all_at(data, base + at) } else { file.read_exact_at(data, base + at) };
        Ok(outcome.is_ok())
    }

    /// Does the transfer by a message to the client, even if the client has not mapped the memory. Returns false if the client
    /// refuses the transfer.
    fn by_message(&mut self, transfer: Transfer) -> Result<bool> {
        let Transfer { to_memory, address, offset, len } = transfer;
        let mut payload = [address.to_ne_bytes(), (len as u64).to_ne_bytes()].concat();
        let command = if to_memory { protocol::DMA_WRITE } else { protocol::DMA_READ };
        if to_memory {
            payload.extend(&self.edu.buffer[offset..offset + len]);
        }
        protocol::ask(&self.socket, QUESTION, command, &payload)?;
        let reply = loop {
            let message =
                protocol::receive(&self.socket)?.context("the client closed the socket in the middle of a transfer")?;
            if message.head.is_reply && message.head.id == QUESTION {
                break message;
            }
            self.waiting.push_back(message);
        };
        if reply.head.refused {
            return Ok(false);
        }
        if !to_memory {
            let data = reply.payload.get(16..).filter(|data| data.len() == len);
            self.edu.buffer[offset..offset + len]
                .copy_from_slice(data.context("the client's answer to DMA_READ has the wrong length")?);
        }
        Ok(true)
    }
}

/// Describes a file descriptor, and the operations that the descriptor would permit to a malicious server.
fn examine(file: &File) -> Result<String> {
    let size = file.metadata()?.len();
    let writable = fcntl_getfl(file)?.intersection(OFlags::ACCMODE) == OFlags::RDWR;
    let resizable = ftruncate(file, size + 4096).is_ok() || ftruncate(file, 0).is_ok();
    let mode = if writable { "rw" } else { "r" };
    // Try to reopen a read-only descriptor for writing. If this works, write back the first byte.
    let mut first = [0];
    let again = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    file.read_exact_at(&mut first, 0)?;
    let forced = !writable && again.is_ok_and(|again| again.write_all_at(&first, 0).is_ok());
    let yes_no = |yes| if yes { "yes" } else { "no" };
    Ok(format!("descriptor={mode} bytes={size:#x} resizable={} forced={}", yes_no(resizable), yes_no(forced)))
}
