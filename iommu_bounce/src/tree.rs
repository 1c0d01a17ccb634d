// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mappings of a domain in order of their IOVAs: a B+ tree whose nodes are in pools.
//!
//! The standard library's tree lacks two properties. First, a request must not allocate memory if the tree had as many nodes before. So
//! free nodes are kept. Second, a mapping must take few bytes even if a guest leaves every node half full. The tree does not check for
//! overlaps, so the caller must make sure that mappings do not overlap.

mod node;
mod pool;

use node::{FAN, Inner, LEAF, Leaf};
use pool::{NIL, Pool};

use crate::mapping::Mapping;

/// Maximum levels above the leaves. Each node except those on the edges has at least 16 children, so 2^32 mappings fit.
const MAX_HEIGHT: usize = 8;

/// Path from the root to a leaf: each inner node, and the index of the child on the path.
#[derive(Clone, Copy)]
struct Path {
    steps: [(u32, usize); MAX_HEIGHT],
    leaf: u32,
}

/// Mappings by their first IOVA.
#[derive(Clone)]
pub(crate) struct MappingTree {
    leaves: Pool<Leaf>,
    inners: Pool<Inner>,
    /// Root node, which is a leaf if `height` is 0. `NIL` before the first mapping.
    root: u32,
    /// Levels above the leaves.
    height: usize,
    len: usize,
}

impl Default for MappingTree {
    fn default() -> Self {
        Self { leaves: Pool::default(), inners: Pool::default(), root: NIL, height: 0, len: 0 }
    }
}

impl std::fmt::Debug for MappingTree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl MappingTree {
    /// Returns the number of mappings.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the last mapping that starts at or below `iova`.
    pub(crate) fn floor(&self, iova: u64) -> Option<(u64, Mapping)> {
        if self.len == 0 {
            return None;
        }
        let mut leaf = self.leaves.get(self.descend(iova).leaf);
        let mut place = leaf.starts().partition_point(|start| *start <= iova);
        if place == 0 {
            // The separator of the leaf is at most `iova`, but all mappings of the leaf start above `iova`. So the mapping is in the
            // previous leaf.
            if leaf.prev == NIL {
                return None;
            }
            leaf = self.leaves.get(leaf.prev);
            place = leaf.len();
        }
        leaf.entry(place.checked_sub(1)?)
    }

    /// Returns the mappings that start at or above `iova`, in order.
    pub(crate) fn from(&self, iova: u64) -> impl Iterator<Item = (u64, Mapping)> {
        let mut at = if self.len == 0 { NIL } else { self.descend(iova).leaf };
        let mut place = if at == NIL { 0 } else { self.leaves.get(at).starts().partition_point(|start| *start < iova) };
        std::iter::from_fn(move || {
            loop {
                if at == NIL {
                    return None;
                }
                let leaf = self.leaves.get(at);
                if let Some(entry) = leaf.entry(place) {
                    place += 1;
                    return Some(entry);
                }
                (at, place) = (leaf.next, 0);
            }
        })
    }

    /// Returns all mappings, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Mapping)> {
        self.from(0)
    }

    /// Adds a mapping at `start`, where no mapping starts yet.
    pub(crate) fn insert(&mut self, start: u64, mapping: Mapping) {
        if self.root == NIL {
            self.root = self.leaves.take();
        }
        let path = self.descend(start);
        let leaf = self.leaves.get_mut(path.leaf);
        let place = leaf.starts().partition_point(|other| *other < start);
        self.len += 1;
        if leaf.len() < LEAF {
            leaf.insert(place, start, mapping);
            return;
        }
        let at_end = place == LEAF && leaf.next == NIL;
        let at_front = place == 0 && leaf.prev == NIL;
        // Drivers often fill the tree from one end. In this case, the split keeps all entries in one leaf, so that the tree consists of
        // full leaves.
        let keep = if at_end {
            LEAF
        } else if at_front {
            0
        } else {
            LEAF / 2
        };
        let (right, separator) = self.split_leaf(path.leaf, keep, start);
        let into_right = start >= separator;
        let target = self.leaves.get_mut(if into_right { right } else { path.leaf });
        target.insert(if into_right { place - keep } else { place }, start, mapping);
        self.insert_child(&path, separator, right);
    }

    /// Removes the mappings that start in `[start, last]`. Returns the number of removed mappings, and the total number of bytes that they
    /// mapped.
    pub(crate) fn remove_range(&mut self, start: u64, last: u64) -> (usize, u64) {
        let (before, mut bytes) = (self.len, 0u64);
        while self.len != 0 {
            let mut path = self.descend(start);
            let leaf = self.leaves.get(path.leaf);
            if leaf.next != NIL && leaf.starts().last().is_none_or(|highest| *highest < start) {
                // If a mapping starts in the range, the first such mapping is in the next leaf.
                path = self.descend(self.leaves.get(leaf.next).first());
            }
            let leaf = self.leaves.get_mut(path.leaf);
            let from = leaf.starts().partition_point(|other| *other < start);
            let to = leaf.starts().partition_point(|other| *other <= last);
            if from >= to {
                break;
            }
            let goes_on = to == leaf.len() && leaf.next != NIL;
            bytes = bytes.wrapping_add(leaf.bytes(from, to));
            leaf.remove(from, to);
            self.len -= to - from;
            self.rebalance_leaf(&path);
            if !goes_on {
                break;
            }
        }
        (before - self.len, bytes)
    }

    fn descend(&self, iova: u64) -> Path {
        let mut path = Path { steps: [(NIL, 0); MAX_HEIGHT], leaf: self.root };
        for step in &mut path.steps[..self.height] {
            let inner = self.inners.get(path.leaf);
            let place = inner.place(iova);
            *step = (path.leaf, place);
            path.leaf = inner.child(place);
        }
        path
    }

    /// Makes room for a mapping at `start` in a full leaf. The first `keep` entries stay in the leaf, and the other entries move to a new
    /// leaf that follows it. Returns the new leaf and its separator.
    fn split_leaf(&mut self, left: u32, keep: usize, start: u64) -> (u32, u64) {
        let right = self.leaves.take();
        let (leaf, new) = self.leaves.pair_mut(left, right);
        leaf.move_tail(keep, new);
        new.prev = left;
        new.next = leaf.next;
        let separator = if keep == LEAF { start } else { new.first() };
        leaf.next = right;
        let after = new.next;
        if after != NIL {
            self.leaves.get_mut(after).prev = right;
        }
        (right, separator)
    }

    /// Adds a new node after the last node of the path. Splits full inner nodes on the way up.
    fn insert_child(&mut self, path: &Path, separator: u64, child: u32) {
        let (mut separator, mut child) = (separator, child);
        for &(id, place) in path.steps[..self.height].iter().rev() {
            let inner = self.inners.get_mut(id);
            if inner.len() < FAN {
                inner.insert(place + 1, separator, child);
                return;
            }
            let right = self.inners.take();
            let (inner, new) = self.inners.pair_mut(id, right);
            let between = inner.move_tail(FAN / 2, new);
            if place < FAN / 2 {
                inner.insert(place + 1, separator, child);
            } else {
                new.insert(place + 1 - FAN / 2, separator, child);
            }
            (separator, child) = (between, right);
        }
        let root = self.inners.take();
        self.inners.get_mut(root).start(self.root, separator, child);
        self.root = root;
        self.height += 1;
        assert!(self.height < MAX_HEIGHT, "the tree has room for 2^32 mappings, and the engine allows fewer");
    }

    /// Handles a leaf that is less than half full. Refills the leaf from a neighbour, or merges the leaf with the neighbour.
    fn rebalance_leaf(&mut self, path: &Path) {
        let Some(&(parent, place)) = path.steps[..self.height].last() else { return };
        if self.leaves.get(path.leaf).len() >= LEAF / 2 {
            return;
        }
        let (left_place, left, right) = self.neighbours(parent, place);
        let (a, b) = self.leaves.pair_mut(left, right);
        if a.len() + b.len() > LEAF {
            let separator = a.share(b);
            self.inners.get_mut(parent).set_key(left_place + 1, separator);
            return;
        }
        b.move_all_behind(a);
        a.next = b.next;
        let after = b.next;
        if after != NIL {
            self.leaves.get_mut(after).prev = left;
        }
        self.leaves.give_back(right);
        self.remove_child(path, left_place + 1);
    }

    /// Returns two adjacent children of `parent`, one of which is at `place`. The result consists of the index of the left child in
    /// `parent`, the left child, and the right child.
    fn neighbours(&self, parent: u32, place: usize) -> (usize, u32, u32) {
        let inner = self.inners.get(parent);
        let left = if place + 1 < inner.len() { place } else { place - 1 };
        (left, inner.child(left), inner.child(left + 1))
    }

    /// Removes a child of the lowest inner node of the path, after the child was merged into its left neighbour. Rebalances on
    /// the way up.
    fn remove_child(&mut self, path: &Path, place: usize) {
        let mut place = place;
        for level in (0..self.height).rev() {
            let (id, _) = path.steps[level];
            let inner = self.inners.get_mut(id);
            inner.remove(place);
            let len = inner.len();
            let Some(&(parent, at)) = level.checked_sub(1).and_then(|above| path.steps.get(above)) else {
                if len == 1 {
                    // The root has only one child left, which becomes the new root.
                    self.root = inner.child(0);
                    self.inners.give_back(id);
                    self.height -= 1;
                }
                return;
            };
            if len >= FAN / 2 {
                return;
            }
            let (left_place, left, right) = self.neighbours(parent, at);
            let separator = self.inners.get(parent).key(left_place + 1);
            let (a, b) = self.inners.pair_mut(left, right);
            if a.len() + b.len() > FAN {
                let separator = a.share(b, separator);
                self.inners.get_mut(parent).set_key(left_place + 1, separator);
                return;
            }
            b.move_all_behind(a, separator);
            self.inners.give_back(right);
            place = left_place + 1;
        }
    }
}

#[cfg(test)]
mod tests;
