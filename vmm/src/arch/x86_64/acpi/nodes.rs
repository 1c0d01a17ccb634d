// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! NUMA nodes of vCPUs, RAM and PCI segments: the system resource affinity table and the system locality distance information
//! table (ACPI 6.5, sections 5.2.16 and 5.2.17).
//!
//! The crate `acpi_tables` also builds these two tables, but without processors in the affinity table (SRAT). The crate's distance table
//! (SLIT) allows only symmetric distances.

use std::collections::BTreeMap;

use acpi_tables::Aml;
use acpi_tables::sdt::Sdt;
use acpi_tables::srat::MemoryAffinity;
use carom_api::VmConfig;
use carom_api::config::NumaConfig;

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::arch::layout::zone_ranges;

/// Type of the affinity structure that names a processor by its local APIC.
const LOCAL_APIC: u8 = 0;
/// Length of the local APIC affinity structure in bytes.
const LOCAL_APIC_LEN: u8 = 16;
/// Flag: the entry is enabled.
const ENABLED: u32 = 1;

/// NUMA nodes of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes {
    /// Node of each vCPU that is in a node. The key is the vCPU's number, which is also its APIC ID.
    processors: BTreeMap<u32, u32>,
    /// Node, guest-physical address and length of each region of RAM.
    memory: Vec<(u32, u64, u64)>,
    /// Distance from each node to each node, by node number.
    distances: Vec<Vec<u8>>,
    /// Node of each PCI segment that is in a node.
    segments: BTreeMap<u16, u32>,
}

impl Nodes {
    /// Returns the nodes of a VM, if the configuration has any.
    pub fn of(config: &VmConfig) -> Option<Self> {
        let nodes = &config.numa;
        let last = nodes.iter().map(|node| node.guest_numa_id).max()?;
        let node_of = |name: &str| nodes.iter().find(|node| node.memory_zones.iter().any(|zone| zone == name));
        let zones = zone_ranges(&config.memory);
        let memory = zones.iter().filter_map(|(zone, ranges)| Some((node_of(&zone.id)?.guest_numa_id, ranges)));
        Some(Self {
            processors: of_all(nodes, |node| &node.cpus),
            memory: memory.flat_map(|(node, ranges)| ranges.iter().map(move |(gpa, len)| (node, *gpa, *len))).collect(),
            distances: (0..=last)
                .map(|from| (0..=last).map(|to| NumaConfig::distance(nodes, from, to)).collect())
                .collect(),
            segments: of_all(nodes, |node| &node.pci_segments),
        })
    }

    /// Returns the node of a PCI segment, if the configuration names one.
    pub(super) fn of_segment(&self, segment: u16) -> Option<u32> {
        self.segments.get(&segment).copied()
    }

    /// Builds the affinity table.
    pub(super) fn srat(&self) -> Sdt {
        // 36 bytes: the common table header. Reserved fields follow: a 1 and zeros.
        let mut table = Sdt::new(*b"SRAT", 36, 3, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
        let mut body = Vec::new();
        body.extend(1u32.to_le_bytes());
        body.extend(0u64.to_le_bytes());
        for (processor, node) in &self.processors {
            let [low, high @ ..] = node.to_le_bytes();
            let apic_id = u8::try_from(*processor).expect("at most 254 vCPUs");
            body.extend([LOCAL_APIC, LOCAL_APIC_LEN, low, apic_id]);
            body.extend(ENABLED.to_le_bytes());
            body.push(0);
            body.extend(high);
            body.extend(0u32.to_le_bytes());
        }
        for (node, gpa, len) in &self.memory {
            MemoryAffinity::new(*node, *gpa, *len).enabled().to_aml_bytes(&mut body);
        }
        table.append_slice(&body);
        table
    }

    /// Builds the table of distances.
    pub(super) fn slit(&self) -> Sdt {
        let mut table = Sdt::new(*b"SLIT", 36, 1, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
        table.append_slice(&(self.distances.len() as u64).to_le_bytes());
        table.append_slice(&self.distances.concat());
        table
    }
}

/// Returns the node of each vCPU or PCI segment that `things` lists for a node.
fn of_all<T: Copy + Ord>(nodes: &[NumaConfig], things: impl Fn(&NumaConfig) -> &Vec<T>) -> BTreeMap<T, u32> {
    nodes.iter().flat_map(|node| things(node).iter().map(|thing| (*thing, node.guest_numa_id))).collect()
}

#[cfg(test)]
mod tests {
    use carom_api::config::MemoryConfig;

    use super::*;

    fn nodes() -> Nodes {
        let zones = ["id=a,size=2G", "id=b,size=2G"].map(|zone| zone.parse().unwrap());
        let memory = MemoryConfig { size: 0, zones: zones.into(), ..MemoryConfig::default() };
        let numa = [
            "guest_numa_id=0,cpus=[0,2],memory_zones=a,distances=[2@15]",
            "guest_numa_id=2,cpus=1,memory_zones=b,pci_segments=1",
        ];
        let numa = numa.map(|node| node.parse().unwrap()).into();
        Nodes::of(&VmConfig { memory, numa, ..VmConfig::default() }).unwrap()
    }

    fn bytes(table: &Sdt) -> Vec<u8> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        assert_eq!(bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!(u32::from_le_bytes(bytes[4..8].try_into().unwrap()) as usize, bytes.len());
        bytes
    }

    #[test]
    fn each_vcpu_and_each_part_of_a_zone_is_in_its_node() {
        let table = bytes(&nodes().srat());
        let (processors, memory) = table[48..].split_at(3 * 16);
        let of = |entry: &[u8]| (entry[0], entry[1], entry[2], entry[3], entry[4]);
        let wanted = [(0, 16, 0, 0, 1), (0, 16, 2, 1, 1), (0, 16, 0, 2, 1)];
        assert_eq!(processors.chunks(16).map(of).collect::<Vec<_>>(), wanted);
        let word = |entry: &[u8], at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap()) >> 30;
        // Fields of an entry: type, length of the entry, node, then address and size of the RAM in GiB, flags.
        let of = |entry: &[u8]| (entry[0], entry[1], entry[2], word(entry, 8), word(entry, 16), entry[28]);
        let wanted = [(1, 40, 0, 0, 2, 1), (1, 40, 2, 2, 1, 1), (1, 40, 2, 4, 1, 1)];
        assert_eq!(memory.chunks(40).map(of).collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn distances_form_a_square_with_defaults_for_unset_ones() {
        let table = bytes(&nodes().slit());
        assert_eq!(u64::from_le_bytes(table[36..44].try_into().unwrap()), 3);
        assert_eq!(table[44..], [10, 20, 15, 20, 10, 20, 15, 20, 10]);
    }

    #[test]
    fn segment_has_its_node_and_no_nodes_mean_no_tables() {
        assert_eq!((nodes().of_segment(0), nodes().of_segment(1)), (None, Some(2)));
        assert_eq!(Nodes::of(&VmConfig::default()), None);
    }
}
