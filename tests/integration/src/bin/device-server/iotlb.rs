// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! IOTLB: address translations that the front end has sent.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};

use crate::protocol::Message;

/// Access flag: the device reads memory.
pub(crate) const READ: u8 = 1;
/// Access flag: the device writes memory.
pub(crate) const WRITE: u8 = 2;

/// Type of a message to the front end: a translation is missing.
pub(crate) const MISS: u8 = 1;
/// Type of a message from the front end: a new translation.
const UPDATE: u8 = 2;
/// Type of a message from the front end: translations are removed.
const INVALIDATE: u8 = 3;

/// Translation of a range of IOVAs. The first IOVA is the key in [`Iotlb`].
struct Entry {
    last: u64,
    user: u64,
    access: u8,
}

/// Translations that the front end has sent, and denied accesses.
#[derive(Default)]
pub(crate) struct Iotlb {
    entries: BTreeMap<u64, Entry>,
    /// Pages and accesses that the front end has denied.
    denied: BTreeSet<(u64, u8)>,
}

/// Kind of a handled message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Applied {
    Update,
    Invalidate,
}

impl Iotlb {
    /// Translates an access to `iova`. Returns the address in the front end's address space, and the number of bytes up to the end
    /// of the translated range. Returns `None` if the translation is missing or does not permit the access.
    pub(crate) fn find(&self, iova: u64, access: u8) -> Option<(u64, u64)> {
        let (start, entry) = self.entries.range(..=iova).next_back()?;
        let fits = entry.last >= iova && entry.access & access == access;
        fits.then(|| (entry.user + (iova - start), (entry.last - iova).saturating_add(1)))
    }

    /// True if the front end has denied this access.
    pub(crate) fn is_denied(&self, iova: u64, access: u8) -> bool {
        self.denied.contains(&(iova >> 12, access))
    }

    /// Records that the front end denies this access.
    pub(crate) fn deny(&mut self, iova: u64, access: u8) {
        self.denied.insert((iova >> 12, access));
    }

    /// Handles a message of the front end.
    pub(crate) fn take(&mut self, message: &Message) -> Result<Applied> {
        let (iova, size, user) = (message.quad(0)?, message.quad(8)?, message.quad(16)?);
        let Some(last) = size.checked_sub(1).and_then(|more| iova.checked_add(more)) else {
            bail!("the front end sent a translation of 0 bytes, or of a range beyond the end of the address space")
        };
        match message.payload.get(24..26) {
            Some(&[access @ 1..=3, UPDATE]) => {
                self.denied.clear();
                self.entries.insert(iova, Entry { last, user, access });
                Ok(Applied::Update)
            }
            Some(&[_, INVALIDATE]) => {
                self.entries.retain(|start, entry| *start > last || entry.last < iova);
                Ok(Applied::Invalidate)
            }
            other => bail!("the front end sent an IOTLB message with invalid access and type bytes: {other:?}"),
        }
    }
}

/// Creates an IOTLB message to the front end.
pub(crate) fn message(iova: u64, access: u8, kind: u8) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&iova.to_ne_bytes());
    (bytes[24], bytes[25]) = (access, kind);
    bytes
}
