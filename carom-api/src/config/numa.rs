// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! NUMA nodes of the guest: the vCPUs, RAM zones and PCI segments of each node, and the distances between nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{CpusConfig, MemoryConfig, PlatformConfig};
use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::{Field, keys};
use crate::left_out::or_default;
use crate::limits::MAX_NODE;
use crate::object;
use crate::option_list::from_option;

/// Distance of a node to itself (ACPI 6.5, section 5.2.17).
const LOCAL_DISTANCE: u8 = 10;
/// Default distance between two nodes.
const REMOTE_DISTANCE: u8 = 20;

/// NUMA node of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NumaConfig {
    /// Number of the node.
    #[schema(maximum = 15)]
    pub guest_numa_id: u32,
    /// Numbers of the node's vCPUs.
    #[serde(default, deserialize_with = "or_default")]
    pub cpus: Vec<u32>,
    /// Distances to other nodes, 11 to 255. If only one of two nodes lists a distance to the other node, the distance applies in both
    /// directions. The default distance is 20.
    #[serde(default, deserialize_with = "object::list_or_null")]
    pub distances: Vec<NumaDistance>,
    /// Names of the zones that hold the node's RAM.
    #[serde(default, deserialize_with = "or_default")]
    pub memory_zones: Vec<String>,
    /// PCI segments of the node.
    #[serde(default, deserialize_with = "or_default")]
    pub pci_segments: Vec<u16>,
}

/// Distance of a node to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NumaDistance {
    /// Number of the other node.
    pub destination: u32,
    /// Distance to the other node. 10 is the distance of a node to itself.
    #[schema(value_type = u32, minimum = 11, maximum = 255)]
    pub distance: u8,
}

/// vCPUs, zones or segments that already belong to a node, each with the number of its node.
struct Owners<T>(BTreeMap<T, u32>);

impl<T: Ord + Clone + Display> Owners<T> {
    fn take(&mut self, field: Field, what: &str, things: &[T], node: u32) -> Result<(), ConfigError> {
        things.iter().try_for_each(|thing| {
            let other = self.0.insert(thing.clone(), node);
            let other_node = other.unwrap_or_default();
            ensure(other.is_none(), field, || {
                if node == other_node {
                    return format!("node {node} lists {what} {thing} twice: list it once");
                }
                format!("node {node} lists {what} {thing}, which node {other_node} lists too: list it in one node only")
            })
        })
    }
}

impl NumaConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--numa", "numa");
    keys! {
        ID = "guest_numa_id", CPUS = "cpus", DISTANCES = "distances", MEMORY_ZONES = "memory_zones",
        PCI_SEGMENTS = "pci_segments",
    }

    /// Checks all nodes of a VM together, and that their vCPUs, zones and segments exist.
    ///
    /// # Errors
    /// A rule does not hold.
    pub(crate) fn check_all(
        nodes: &[Self],
        cpus: &CpusConfig,
        memory: &MemoryConfig,
        platform: &PlatformConfig,
    ) -> Result<(), ConfigError> {
        if nodes.is_empty() {
            return Ok(());
        }
        let mut ids = BTreeSet::new();
        let mut of_cpus = Owners(BTreeMap::new());
        let mut of_zones = Owners(BTreeMap::new());
        let mut of_segments = Owners(BTreeMap::new());
        for node in nodes {
            let id = node.guest_numa_id;
            ensure(id <= MAX_NODE, Self::ID, || format!("{id} is above the maximum of {MAX_NODE}"))?;
            ensure(ids.insert(id), Self::ID, || format!("{id} is given twice: every node needs its own number"))?;
            for cpu in &node.cpus {
                let last = cpus.max_vcpus.saturating_sub(1);
                ensure(*cpu <= last, Self::CPUS, || {
                    format!("node {id} lists vCPU {cpu}, but the last vCPU is {last}")
                })?;
            }
            of_cpus.take(Self::CPUS, "vCPU", &node.cpus, id)?;
            for name in &node.memory_zones {
                let exists = memory.zones.iter().any(|zone| zone.id == *name);
                ensure(exists, Self::MEMORY_ZONES, || {
                    format!("node {id} lists zone '{name}', which does not exist: define a memory zone with this id")
                })?;
            }
            of_zones.take(Self::MEMORY_ZONES, "zone", &node.memory_zones, id)?;
            for segment in &node.pci_segments {
                platform.check_segment(Self::PCI_SEGMENTS, *segment)?;
            }
            of_segments.take(Self::PCI_SEGMENTS, "segment", &node.pci_segments, id)?;
        }
        for node in nodes {
            node.check_distances(&ids)?;
        }
        // Linux ignores all nodes if they do not cover all RAM, so every zone must belong to a node.
        ensure_in_terms(!memory.zones.is_empty(), Self::MEMORY_ZONES, |terms| {
            format!(
                "nodes need memory zones for their RAM, but the VM has no zones: add {}",
                MemoryConfig::ZONES.name(terms)
            )
        })?;
        memory.zones.iter().try_for_each(|zone| {
            let has_node = of_zones.0.contains_key(&zone.id);
            ensure(has_node, Self::MEMORY_ZONES, || {
                format!("zone '{}' belongs to no node: list the zone in one node", zone.id)
            })
        })
    }

    fn check_distances(&self, ids: &BTreeSet<u32>) -> Result<(), ConfigError> {
        let id = self.guest_numa_id;
        let mut seen = BTreeSet::new();
        for NumaDistance { destination: to, distance } in &self.distances {
            let rule = if !ids.contains(to) {
                format!(
                    "node {id} has a distance to node {to}, which does not exist: define node {to}, or leave the distance out"
                )
            } else if *to == id {
                format!("node {id} has a distance to itself, which is always 10: leave the distance out")
            } else if !seen.insert(to) {
                format!("node {id} has two distances to node {to}: leave one out")
            } else if *distance <= LOCAL_DISTANCE {
                format!("the distance {distance} from node {id} to node {to} is not between 11 and 255")
            } else {
                continue;
            };
            return Err(ConfigError::new(Self::DISTANCES, rule));
        }
        Ok(())
    }

    /// Returns the distance from node `from` to node `to`.
    pub fn distance(nodes: &[Self], from: u32, to: u32) -> u8 {
        if from == to {
            return LOCAL_DISTANCE;
        }
        let said = |from: u32, to: u32| {
            let of = nodes.iter().find(|node| node.guest_numa_id == from)?;
            of.distances.iter().find(|distance| distance.destination == to).map(|distance| distance.distance)
        };
        said(from, to).or_else(|| said(to, from)).unwrap_or(REMOTE_DISTANCE)
    }
}

from_option!(NumaConfig);

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> NumaConfig {
        text.parse().unwrap()
    }

    #[test]
    fn nodes_with_wrong_or_shared_resources_are_refused() {
        let cpus = CpusConfig::with_count(4);
        let zones = ["id=a,size=512M", "id=b,size=512M"].map(|zone| zone.parse().unwrap());
        let memory = MemoryConfig { size: 0, zones: zones.into(), ..MemoryConfig::default() };
        let platform = PlatformConfig { num_pci_segments: 2, ..PlatformConfig::default() };
        let check = |texts: &[&str], memory: &MemoryConfig| {
            let nodes: Vec<_> = texts.iter().map(|text| node(text)).collect();
            NumaConfig::check_all(&nodes, &cpus, memory, &platform).map_err(|error| error.to_string())
        };
        let both = "guest_numa_id=0,memory_zones=[a,b]";
        for (texts, wanted) in [
            (&["guest_numa_id=16"][..], "--numa guest_numa_id: 16 is above the maximum of 15"),
            (&[both, "guest_numa_id=0"], "--numa guest_numa_id: 0 is given twice"),
            (&["guest_numa_id=0,cpus=4"], "--numa cpus: node 0 lists vCPU 4, but the last vCPU is 3"),
            (
                &["guest_numa_id=0,cpus=1", "guest_numa_id=1,cpus=[0-1]"],
                "--numa cpus: node 1 lists vCPU 1, which node 0 lists too",
            ),
            (&["guest_numa_id=0,cpus=[1,1]"], "--numa cpus: node 0 lists vCPU 1 twice: list it once"),
            (&["guest_numa_id=0,memory_zones=c"], "--numa memory_zones: node 0 lists zone 'c', which does not exist"),
            (
                &[both, "guest_numa_id=1,memory_zones=b"],
                "--numa memory_zones: node 1 lists zone b, which node 0 lists too",
            ),
            (&["guest_numa_id=0,memory_zones=a"], "--numa memory_zones: zone 'b' belongs to no node"),
            (&["guest_numa_id=0,pci_segments=2,memory_zones=[a,b]"], "--numa pci_segments: "),
            (
                &[both, "guest_numa_id=1,distances=[2@20]"],
                "--numa distances: node 1 has a distance to node 2, which does not exist: define node 2, or leave",
            ),
            (
                &[both, "guest_numa_id=1,distances=[1@10]"],
                "--numa distances: node 1 has a distance to itself, which is always 10: leave",
            ),
            (
                &[both, "guest_numa_id=1,distances=[0@10]"],
                "--numa distances: the distance 10 from node 1 to node 0 is not between 11 and 255",
            ),
            (
                &[both, "guest_numa_id=1,distances=[0@11,0@12]"],
                "--numa distances: node 1 has two distances to node 0: leave one out",
            ),
        ] {
            let refused = check(texts, &memory).unwrap_err();
            assert!(refused.starts_with(wanted), "{refused}");
        }
        let without = check(&["guest_numa_id=0,cpus=[0-3]"], &MemoryConfig::default()).unwrap_err();
        assert!(without.starts_with("--numa memory_zones: nodes need memory zones"), "{without}");
        assert_eq!(check(&[both, "guest_numa_id=7,cpus=3,pci_segments=[0,1],distances=[0@255]"], &memory), Ok(()));
        assert_eq!(check(&[], &MemoryConfig::default()), Ok(()));
    }

    #[test]
    fn distance_of_one_node_holds_in_both_directions() {
        let nodes = [
            node("guest_numa_id=0,distances=[1@15]"),
            node("guest_numa_id=1,distances=[2@30]"),
            node("guest_numa_id=2,distances=[1@40]"),
        ];
        let distance = |from, to| NumaConfig::distance(&nodes, from, to);
        assert_eq!((distance(0, 0), distance(0, 1), distance(1, 0), distance(0, 2)), (10, 15, 15, 20));
        assert_eq!((distance(1, 2), distance(2, 1)), (30, 40));
    }
}
