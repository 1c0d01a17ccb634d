// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of vfio-user that this server needs (QEMU, docs/interop/vfio-user.rst).
//!
//! The numbers are copied from the specification and not shared with the client's code. With shared numbers, a wrong number would
//! be wrong on both sides, and no test would notice.

use std::io::Write;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use carom_integration::messages;

pub(crate) const VERSION: u16 = 1;
pub(crate) const DMA_MAP: u16 = 2;
pub(crate) const DMA_UNMAP: u16 = 3;
pub(crate) const GET_INFO: u16 = 4;
pub(crate) const GET_REGION_INFO: u16 = 5;
pub(crate) const GET_IRQ_INFO: u16 = 7;
pub(crate) const SET_IRQS: u16 = 8;
pub(crate) const REGION_READ: u16 = 9;
pub(crate) const REGION_WRITE: u16 = 10;
pub(crate) const DMA_READ: u16 = 11;
pub(crate) const DMA_WRITE: u16 = 12;
pub(crate) const RESET: u16 = 13;

const HEADER: usize = 16;
const REPLY: u32 = 1;
const ERROR: u32 = 0x20;
/// Maximum length of a received message, in bytes. All expected messages are shorter.
const LONGEST: usize = 2 << 20;

/// Header of a message.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) id: u16,
    pub(crate) command: u16,
    pub(crate) is_reply: bool,
    pub(crate) refused: bool,
}

pub(crate) type Message = messages::Message<Head>;

/// Receives a message. Returns `None` if the client has closed the socket.
pub(crate) fn receive(socket: &UnixStream) -> Result<Option<Message>> {
    let mut files = Vec::new();
    let Some(header) = messages::receive(socket, HEADER, &mut files)? else { return Ok(None) };
    let short = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let size = usize::try_from(messages::long(&header, 4)?)?;
    if !(HEADER..=LONGEST).contains(&size) {
        bail!("the client sent a message of {size} bytes; {HEADER} to {LONGEST} are allowed");
    }
    let payload = messages::receive(socket, size - HEADER, &mut files)?
        .context("the client closed the socket in the middle of a message")?;
    let (is_reply, refused) = (messages::long(&header, 8)? & 0xf == REPLY, messages::long(&header, 8)? & ERROR != 0);
    Ok(Some(Message { head: Head { id: short(0), command: short(2), is_reply, refused }, payload, files }))
}

/// Sends a message.
fn send(mut socket: &UnixStream, id: u16, command: u16, flags: u32, error: u32, payload: &[u8]) -> Result<()> {
    let size = u32::try_from(HEADER + payload.len())?;
    let mut message = [id.to_ne_bytes(), command.to_ne_bytes()].concat();
    message.extend([size, flags, error].into_iter().flat_map(u32::to_ne_bytes));
    message.extend(payload);
    socket.write_all(&message).context("cannot send a message to the client")
}

/// Sends a request to the client.
pub(crate) fn ask(socket: &UnixStream, id: u16, command: u16, payload: &[u8]) -> Result<()> {
    send(socket, id, command, 0, 0, payload)
}

/// Answers a request of the client.
pub(crate) fn answer(socket: &UnixStream, message: &Message, payload: &[u8]) -> Result<()> {
    send(socket, message.head.id, message.head.command, REPLY, 0, payload)
}

/// Answers a request of the client with an error.
pub(crate) fn refuse(socket: &UnixStream, message: &Message, error: rustix::io::Errno) -> Result<()> {
    let error = u32::try_from(error.raw_os_error())?;
    send(socket, message.head.id, message.head.command, REPLY | ERROR, error, &[])
}
