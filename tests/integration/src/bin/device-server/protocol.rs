// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of vhost-user that this server needs (QEMU, docs/interop/vhost-user.rst).
//!
//! The numbers are copied from the specification and not shared with the front end's code. With shared numbers, a wrong number
//! would be wrong on both sides, and no test would notice.

use std::io::Write;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use carom_integration::messages;

/// Requests of the front end.
pub(crate) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const IOTLB_MSG: u32 = 22;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
}

/// Request that asks the front end for a translation.
pub(crate) const BACKEND_IOTLB_MSG: u32 = 1;

const HEADER: usize = 12;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Maximum length of a received message, in bytes. All expected messages are shorter.
const LONGEST: usize = 4096;

/// Header of a message.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) request: u32,
    pub(crate) needs_reply: bool,
}

pub(crate) type Message = messages::Message<Head>;

/// Receives a message. Returns `None` if the front end has closed the socket.
pub(crate) fn receive(socket: &UnixStream) -> Result<Option<Message>> {
    let mut files = Vec::new();
    let Some(header) = messages::receive(socket, HEADER, &mut files)? else { return Ok(None) };
    let size = usize::try_from(messages::long(&header, 8)?)?;
    if size > LONGEST {
        bail!("the front end sent a message of {size} bytes; at most {LONGEST} are allowed");
    }
    let payload = messages::receive(socket, size, &mut files)?
        .context("the front end closed the socket in the middle of a message")?;
    Ok(Some(Message {
        head: Head { request: messages::long(&header, 0)?, needs_reply: messages::long(&header, 4)? & NEED_REPLY != 0 },
        payload,
        files,
    }))
}

fn send(mut socket: &UnixStream, request: u32, flags: u32, payload: &[u8]) -> Result<()> {
    let size = u32::try_from(payload.len())?;
    let header = [request, VERSION | flags, size].map(u32::to_ne_bytes);
    Ok(socket.write_all(&[header.as_flattened(), payload].concat())?)
}

/// Answers a request.
pub(crate) fn answer(socket: &UnixStream, request: u32, payload: &[u8]) -> Result<()> {
    send(socket, request, REPLY, payload).context("cannot send an answer to the front end")
}

/// Sends a request to the front end, and requests a confirmation.
pub(crate) fn ask(channel: &UnixStream, request: u32, payload: &[u8]) -> Result<()> {
    send(channel, request, NEED_REPLY, payload).context("cannot send a request to the front end")
}
