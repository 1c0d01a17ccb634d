// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests that compare the tree with the standard library's tree, and check the tree's shape.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::backend::Permissions;

fn mapping(start: u64) -> Mapping {
    Mapping { last: start + 7, gpa: start ^ 0xff00, permissions: Permissions::READ }
}

#[derive(Default)]
struct Pair {
    tree: MappingTree,
    model: BTreeMap<u64, Mapping>,
}

impl Pair {
    fn insert(&mut self, start: u64) {
        if self.model.insert(start, mapping(start)).is_none() {
            self.tree.insert(start, mapping(start));
        }
    }

    fn remove(&mut self, start: u64, last: u64) {
        let removed = self.model.extract_if(start..=last, |_, _| true).count();
        assert_eq!(self.tree.remove_range(start, last), (removed, 8 * removed as u64), "{start}..={last}");
    }

    fn check_at(&self, iova: u64) {
        let below = self.model.range(..=iova).next_back().map(|(start, mapping)| (*start, *mapping));
        assert_eq!(self.tree.floor(iova), below, "floor of {iova}");
        let above = self.model.range(iova..).take(70).map(|(start, mapping)| (*start, *mapping));
        assert!(self.tree.from(iova).take(70).eq(above), "from {iova}");
    }

    fn check(&self) {
        assert_eq!(self.tree.len(), self.model.len());
        assert!(self.tree.iter().eq(self.model.iter().map(|(start, mapping)| (*start, *mapping))));
        if self.tree.len() != 0 {
            let mut leaves = Vec::new();
            check_node(&self.tree, self.tree.root, self.tree.height, 0, u64::MAX, &mut leaves);
            for pair in leaves.windows(2) {
                assert_eq!(
                    (self.tree.leaves.get(pair[0]).next, self.tree.leaves.get(pair[1]).prev),
                    (pair[1], pair[0])
                );
            }
        }
    }
}

/// Checks a node and all nodes below it. The mappings of each leaf must start between the separators `low` and `high` of the leaf. A node
/// must be at least half full, except the first leaf, the last leaf and the root.
fn check_node(tree: &MappingTree, id: u32, height: usize, low: u64, high: u64, leaves: &mut Vec<u32>) {
    if height == 0 {
        let leaf = tree.leaves.get(id);
        assert!(leaf.starts().iter().all(|start| (low..=high).contains(start)), "{low}..={high}: {:?}", leaf.starts());
        assert!(leaf.starts().is_sorted());
        let edge = leaf.prev == NIL || leaf.next == NIL;
        assert!(edge || leaf.len() >= LEAF / 2, "a leaf of {}", leaf.len());
        leaves.push(id);
        return;
    }
    let inner = tree.inners.get(id);
    assert!(inner.len() >= 2);
    assert!(id == tree.root || inner.len() >= FAN / 2, "an inner node of {}", inner.len());
    for place in 0..inner.len() {
        let low = if place == 0 { low } else { inner.key(place) };
        let high = if place + 1 < inner.len() { inner.key(place + 1) - 1 } else { high };
        check_node(tree, inner.child(place), height - 1, low, high, leaves);
    }
}

#[test]
fn empty_tree_has_nothing() {
    let mut pair = Pair::default();
    pair.check_at(0);
    pair.check_at(u64::MAX);
    pair.remove(0, u64::MAX);
    pair.insert(5);
    pair.remove(0, u64::MAX);
    pair.check_at(9);
    pair.check();
}

#[test]
fn filling_from_either_end_leaves_full_leaves() {
    // Miri is a thousand times slower.
    const COUNT: u64 = if cfg!(miri) { 600 } else { 40_000 };
    for up in [true, false] {
        let mut pair = Pair::default();
        for n in 0..COUNT {
            pair.insert(0x1000 * if up { n } else { COUNT - n });
        }
        pair.check();
        let mut leaves = Vec::new();
        check_node(&pair.tree, pair.tree.root, pair.tree.height, 0, u64::MAX, &mut leaves);
        assert!(leaves.len() as u64 <= COUNT / LEAF as u64 + 2, "{} leaves", leaves.len());
        pair.remove(0x1000 * 100, 0x1000 * (COUNT - 100));
        pair.check();
        pair.remove(0, u64::MAX);
        pair.check();
    }
}

#[test]
fn freed_nodes_are_reused() {
    const NODES: u64 = if cfg!(miri) { 300 } else { 20_000 };
    let mut pair = Pair::default();
    let fill = |pair: &mut Pair| (0..NODES).for_each(|n| pair.insert(n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8));
    fill(&mut pair);
    let blocks = |pair: &Pair| (pair.tree.leaves.block_count(), pair.tree.inners.block_count());
    let first = blocks(&pair);
    for _ in 0..3 {
        let keys: Vec<u64> = pair.model.keys().copied().collect();
        keys.iter().for_each(|key| pair.remove(*key, *key));
        pair.check();
        fill(&mut pair);
        pair.check();
    }
    let last = blocks(&pair);
    assert!(last.0 <= first.0 + 1 && last.1 <= first.1 + 1, "{first:?} grew to {last:?}");
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u64),
    /// Inserts `count` mappings: the first mapping at `start`, and each next mapping `step` higher. The fields are `start`, `count` and
    /// `step`.
    Series(u64, u64, u64),
    Remove(u64, u64),
    Look(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let key = || prop_oneof![0u64..3000, Just(u64::MAX - 8)];
    prop_oneof![
        4 => key().prop_map(Op::Insert),
        2 => (0u64..3000, 1u64..200, prop_oneof![Just(1u64), Just(3), Just(20)])
            .prop_map(|(start, count, step)| Op::Series(start, count, step)),
        3 => (key(), 0u64..8).prop_map(|(start, len)| Op::Remove(start, start.saturating_add(len))),
        1 => (key(), 0u64..900).prop_map(|(start, len)| Op::Remove(start, start.saturating_add(len))),
        3 => key().prop_map(Op::Look),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 120 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tree_and_model_agree(ops in prop::collection::vec(op(), 1..120)) {
        let mut pair = Pair::default();
        for op in ops {
            match op {
                Op::Insert(start) => pair.insert(start),
                Op::Series(start, count, step) => (0..count).for_each(|n| pair.insert(start + n * step)),
                Op::Remove(start, last) => pair.remove(start, last),
                Op::Look(iova) => pair.check_at(iova),
            }
            pair.check();
        }
    }
}
