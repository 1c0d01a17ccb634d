// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Nodes of one kind, named by numbers. Free nodes are kept for later.

/// The number of no node.
pub(super) const NIL: u32 = u32::MAX;

/// Nodes in the first blocks: so few that a small domain stays small.
const SMALLEST: usize = 8;
/// A new block has this part of the nodes that there are already. Large blocks cost fewer cache misses; too large a
/// block leaves memory unused.
const GROWTH: usize = 16;
/// Bits of a node's number that say its place in its block; those above say which block.
const PLACE_BITS: u32 = 20;

/// What a pool can hold.
pub(super) trait Node: Copy {
    /// A node without content.
    const EMPTY: Self;
    /// A field that names another node. In free nodes it links the list of free ones.
    fn link(&mut self) -> &mut u32;
}

/// A pool of nodes. It grows and never shrinks.
#[derive(Clone)]
pub(super) struct Pool<N> {
    blocks: Vec<Box<[N]>>,
    /// The nodes of all blocks.
    count: usize,
    /// The first of the free ones.
    free: u32,
}

impl<N> Default for Pool<N> {
    fn default() -> Self {
        Self { blocks: Vec::new(), count: 0, free: NIL }
    }
}

/// Block and place of a node.
fn place(id: u32) -> (usize, usize) {
    ((id >> PLACE_BITS) as usize, (id & ((1 << PLACE_BITS) - 1)) as usize)
}

impl<N: Node> Pool<N> {
    /// A node without content.
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
        let block = block.expect("mappings have a limit far below") << PLACE_BITS;
        self.blocks.push(vec![N::EMPTY; size].into_boxed_slice());
        self.count += size;
        // So that the first one is used first.
        let last = block + u32::try_from(size - 1).expect("the size has an upper limit");
        (block..=last).rev().for_each(|id| self.give_back(id));
    }

    /// Takes a node back that nothing names any more.
    pub(super) fn give_back(&mut self, id: u32) {
        let next = std::mem::replace(&mut self.free, id);
        *self.get_mut(id).link() = next;
    }

    /// Blocks allocated so far.
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

    /// Two different nodes.
    pub(super) fn pair_mut(&mut self, a: u32, b: u32) -> (&mut N, &mut N) {
        let ((block_a, a), (block_b, b)) = (place(a), place(b));
        if block_a == block_b {
            let [a, b] = self.blocks[block_a].get_disjoint_mut([a, b]).expect("they are different");
            return (a, b);
        }
        let [block_a, block_b] = self.blocks.get_disjoint_mut([block_a, block_b]).expect("they are different");
        (&mut block_a[a], &mut block_b[b])
    }
}
