// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pools of nodes of one kind, identified by numbers. Free nodes are kept for reuse.

/// Number that stands for no node.
pub(super) const NIL: u32 = u32::MAX;

/// Number of nodes in each of the first blocks. The number is small, so that a small domain takes little memory.
const SMALLEST: usize = 8;
/// A new block has 1/`GROWTH` times as many nodes as all earlier blocks together. Large blocks cause fewer cache misses, but a block that
/// is too large wastes memory.
const GROWTH: usize = 16;
/// The low `PLACE_BITS` bits of a node's number are the index of the node in its block. The higher bits are the index of the block.
const PLACE_BITS: u32 = 20;

/// Node that a pool can hold.
pub(super) trait Node: Copy {
    /// A node without content.
    const EMPTY: Self;
    /// Field that refers to another node. In a free node, the field refers to the next free node.
    fn link(&mut self) -> &mut u32;
}

/// Pool of nodes, which grows and never shrinks.
#[derive(Clone)]
pub(super) struct Pool<N> {
    blocks: Vec<Box<[N]>>,
    /// Number of nodes in all blocks.
    count: usize,
    /// First free node.
    free: u32,
}

impl<N> Default for Pool<N> {
    fn default() -> Self {
        Self { blocks: Vec::new(), count: 0, free: NIL }
    }
}

/// Returns the block of a node, and its place in the block.
fn place(id: u32) -> (usize, usize) {
    ((id >> PLACE_BITS) as usize, (id & ((1 << PLACE_BITS) - 1)) as usize)
}

impl<N: Node> Pool<N> {
    /// Allocates an empty node.
    pub(super) fn take(&mut self) -> u32 {
        if self.free == NIL {
            self.grow();
        }
        let id = self.free;
        let node = self.get_mut(id);
        let next = *node.link();
        *node = N::EMPTY;
        self.free = next;
        id
    }

    fn grow(&mut self) {
        let size = (self.count / GROWTH).clamp(SMALLEST, 1 << PLACE_BITS);
        let block = u32::try_from(self.blocks.len()).ok().filter(|block| *block < NIL >> PLACE_BITS);
        let block = block.expect("the limit on mappings needs fewer blocks") << PLACE_BITS;
        self.blocks.push(vec![N::EMPTY; size].into_boxed_slice());
        self.count += size;
        // Free the nodes in reverse order, so that the first node is used first.
        let last = block + u32::try_from(size - 1).expect("a block has a maximum size");
        (block..=last).rev().for_each(|id| self.give_back(id));
    }

    /// Frees a node that no other node refers to.
    pub(super) fn give_back(&mut self, id: u32) {
        let next = std::mem::replace(&mut self.free, id);
        *self.get_mut(id).link() = next;
    }

    /// Returns the number of allocated blocks.
    #[cfg(test)]
    pub(super) fn block_count(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn get(&self, id: u32) -> &N {
        let (block, place) = place(id);
        &self.blocks[block][place]
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut N {
        let (block, place) = place(id);
        &mut self.blocks[block][place]
    }

    /// Returns two different nodes.
    pub(super) fn pair_mut(&mut self, a: u32, b: u32) -> (&mut N, &mut N) {
        let ((block_a, a), (block_b, b)) = (place(a), place(b));
        if block_a == block_b {
            let [a, b] = self.blocks[block_a].get_disjoint_mut([a, b]).expect("the nodes are different");
            return (a, b);
        }
        let [block_a, block_b] = self.blocks.get_disjoint_mut([block_a, block_b]).expect("the blocks are different");
        (&mut block_a[a], &mut block_b[b])
    }
}
