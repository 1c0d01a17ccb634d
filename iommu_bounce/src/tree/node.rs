// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Nodes of the tree: leaves with mappings, and inner nodes with children.

use super::pool::{NIL, Node};
use crate::backend::Permissions;
use crate::mapping::Mapping;

/// Maximum mappings in a leaf.
pub(super) const LEAF: usize = 16;
/// Maximum children of an inner node.
pub(super) const FAN: usize = 32;

/// Mappings in order. Each field has its own array, so that a search reads only first IOVAs.
#[derive(Clone, Copy)]
pub(super) struct Leaf {
    starts: [u64; LEAF],
    lasts: [u64; LEAF],
    gpas: [u64; LEAF],
    permissions: [u8; LEAF],
    len: u8,
    /// Previous leaf in order.
    pub(super) prev: u32,
    /// Next leaf in order.
    pub(super) next: u32,
}

impl Node for Leaf {
    const EMPTY: Self = Self {
        starts: [0; LEAF],
        lasts: [0; LEAF],
        gpas: [0; LEAF],
        permissions: [0; LEAF],
        len: 0,
        prev: NIL,
        next: NIL,
    };

    fn link(&mut self) -> &mut u32 {
        &mut self.next
    }
}

/// Converts a number of entries to the 8-bit form that a node stores.
fn small(len: usize) -> u8 {
    u8::try_from(len).expect("a node has at most 32 places")
}

/// Inserts one element at `place` in an array with `len` used elements.
fn open<T: Copy>(array: &mut [T], place: usize, len: usize, value: T) {
    array.copy_within(place..len, place + 1);
    array[place] = value;
}

impl Leaf {
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    pub(super) fn starts(&self) -> &[u64] {
        &self.starts[..self.len()]
    }

    /// Returns the first IOVA of the leaf's first mapping, or 0 for an empty leaf.
    pub(super) fn first(&self) -> u64 {
        self.starts[0]
    }

    pub(super) fn entry(&self, place: usize) -> Option<(u64, Mapping)> {
        let start = *self.starts().get(place)?;
        let permissions = Permissions::from_bits_truncate(self.permissions[place].into());
        Some((start, Mapping { last: self.lasts[place], gpa: self.gpas[place], permissions }))
    }

    /// Returns the bytes that the mappings at `[from, to)` map, modulo 2^64.
    pub(super) fn bytes(&self, from: usize, to: usize) -> u64 {
        let pairs = self.starts[from..to].iter().zip(&self.lasts[from..to]);
        pairs.fold(0, |sum, (start, last)| sum.wrapping_add((last - start).wrapping_add(1)))
    }

    /// Adds a mapping. The leaf must have room.
    pub(super) fn insert(&mut self, place: usize, start: u64, mapping: Mapping) {
        let len = self.len();
        open(&mut self.starts, place, len, start);
        open(&mut self.lasts, place, len, mapping.last);
        open(&mut self.gpas, place, len, mapping.gpa);
        let permissions = u8::try_from(mapping.permissions.bits()).expect("permissions fit in 8 bits");
        open(&mut self.permissions, place, len, permissions);
        self.len += 1;
    }

    /// Removes the mappings at `[from, to)`.
    pub(super) fn remove(&mut self, from: usize, to: usize) {
        let len = self.len();
        self.starts.copy_within(to..len, from);
        self.lasts.copy_within(to..len, from);
        self.gpas.copy_within(to..len, from);
        self.permissions.copy_within(to..len, from);
        self.len = small(len - (to - from));
    }

    /// Moves the entries from index `keep` on to the front of `right`, which must have room.
    pub(super) fn move_tail(&mut self, keep: usize, right: &mut Self) {
        let (len, count) = (self.len(), self.len() - keep);
        let end = right.len();
        macro_rules! shift {
            ($field:ident) => {
                right.$field.copy_within(0..end, count);
                right.$field[..count].copy_from_slice(&self.$field[keep..len]);
            };
        }
        shift!(starts);
        shift!(lasts);
        shift!(gpas);
        shift!(permissions);
        right.len = small(end + count);
        self.len = small(keep);
    }

    /// Moves the first `count` entries to the end of `left`.
    fn move_head(&mut self, count: usize, left: &mut Self) {
        let end = left.len();
        left.starts[end..end + count].copy_from_slice(&self.starts[..count]);
        left.lasts[end..end + count].copy_from_slice(&self.lasts[..count]);
        left.gpas[end..end + count].copy_from_slice(&self.gpas[..count]);
        left.permissions[end..end + count].copy_from_slice(&self.permissions[..count]);
        left.len = small(end + count);
        self.remove(0, count);
    }

    /// Moves all entries to the end of `left`.
    pub(super) fn move_all_behind(&mut self, left: &mut Self) {
        self.move_head(self.len(), left);
    }

    /// Divides the entries of this leaf and the next leaf `right` equally between the two leaves. Returns the new separator of the leaves.
    pub(super) fn share(&mut self, right: &mut Self) -> u64 {
        let half = (self.len() + right.len()) / 2;
        match self.len().checked_sub(half) {
            Some(0) => {}
            Some(_) => self.move_tail(half, right),
            None => right.move_head(half - self.len(), self),
        }
        right.first()
    }
}

/// Children in order. A child has the mappings that start at or above its key, and below the key of the next child. The first key
/// is unused: everything below the second key belongs to the first child.
#[derive(Clone, Copy)]
pub(super) struct Inner {
    keys: [u64; FAN],
    children: [u32; FAN],
    len: u8,
}

impl Node for Inner {
    const EMPTY: Self = Self { keys: [0; FAN], children: [NIL; FAN], len: 0 };

    fn link(&mut self) -> &mut u32 {
        &mut self.children[0]
    }
}

impl Inner {
    pub(super) fn len(&self) -> usize {
        self.len.into()
    }

    /// Initializes the node with two children.
    pub(super) fn start(&mut self, left: u32, separator: u64, right: u32) {
        self.keys[1] = separator;
        self.children[..2].copy_from_slice(&[left, right]);
        self.len = 2;
    }

    /// Returns the index of the child for a mapping that starts at `iova`.
    pub(super) fn place(&self, iova: u64) -> usize {
        self.keys[1..self.len()].partition_point(|key| *key <= iova)
    }

    pub(super) fn child(&self, place: usize) -> u32 {
        self.children[place]
    }

    pub(super) fn key(&self, place: usize) -> u64 {
        self.keys[place]
    }

    pub(super) fn set_key(&mut self, place: usize, key: u64) {
        self.keys[place] = key;
    }

    /// Adds a child. The node must have room.
    pub(super) fn insert(&mut self, place: usize, key: u64, child: u32) {
        let len = self.len();
        open(&mut self.keys, place, len, key);
        open(&mut self.children, place, len, child);
        self.len += 1;
    }

    /// Removes a child.
    pub(super) fn remove(&mut self, place: usize) {
        let len = self.len();
        self.keys.copy_within(place + 1..len, place);
        self.children.copy_within(place + 1..len, place);
        self.len -= 1;
    }

    /// Moves the children from index `keep` on to the front of `right`, which must have room. Returns the separator of the two
    /// nodes.
    pub(super) fn move_tail(&mut self, keep: usize, right: &mut Self) -> u64 {
        let (len, count) = (self.len(), self.len() - keep);
        let end = right.len();
        right.keys.copy_within(0..end, count);
        right.children.copy_within(0..end, count);
        right.keys[..count].copy_from_slice(&self.keys[keep..len]);
        right.children[..count].copy_from_slice(&self.children[keep..len]);
        right.len = small(end + count);
        self.len = small(keep);
        right.keys[0]
    }

    /// Moves the first `count` children to the end of `left`. `separator` becomes the key of the first moved child. Returns the new
    /// separator, if this node has children left.
    fn move_head(&mut self, count: usize, left: &mut Self, separator: u64) -> u64 {
        let end = left.len();
        self.keys[0] = separator;
        left.keys[end..end + count].copy_from_slice(&self.keys[..count]);
        left.children[end..end + count].copy_from_slice(&self.children[..count]);
        left.len = small(end + count);
        let len = self.len();
        self.keys.copy_within(count..len, 0);
        self.children.copy_within(count..len, 0);
        self.len = small(len - count);
        self.keys[0]
    }

    /// Moves all children to the end of `left`. `separator` is the separator of the two nodes.
    pub(super) fn move_all_behind(&mut self, left: &mut Self, separator: u64) {
        self.move_head(self.len(), left, separator);
    }

    /// Divides the children of this node and the next node `right` equally between the two nodes. `separator` is the old separator of the
    /// nodes. Returns the new separator.
    pub(super) fn share(&mut self, right: &mut Self, separator: u64) -> u64 {
        let half = (self.len() + right.len()) / 2;
        right.keys[0] = separator;
        match self.len().checked_sub(half) {
            Some(0) => separator,
            Some(_) => self.move_tail(half, right),
            None => right.move_head(half - self.len(), self, separator),
        }
    }
}
