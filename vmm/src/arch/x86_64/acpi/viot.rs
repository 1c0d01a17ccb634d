// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtual I/O translation table (ACPI 6.5, section 5.2.31): the virtio-iommu, and the ranges of functions behind it.
//!
//! The crate `acpi_tables` also builds this table, but numbers the endpoints of every segment as if they were on segment 0.

use std::ops::RangeInclusive;

use acpi_tables::sdt::Sdt;
use devices::pci::PciAddress;

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};

/// Bytes before the nodes: the common header, the number of nodes, their offset, and a reserved field.
const HEADER: u16 = 48;
/// Type of a node that describes a range of PCI functions.
const PCI_RANGE: u8 = 1;
/// Length of a [`PCI_RANGE`] node in bytes.
const PCI_RANGE_LEN: u16 = 24;
/// Type of a node that describes a virtio-iommu on PCI.
const VIRTIO_PCI_IOMMU: u8 = 3;
/// Length of a [`VIRTIO_PCI_IOMMU`] node in bytes.
const VIRTIO_PCI_IOMMU_LEN: u16 = 16;

/// Builds the table. The virtio-iommu is its first node.
pub(super) fn build(iommu: PciAddress, endpoints: &[RangeInclusive<PciAddress>]) -> Sdt {
    let count = u16::try_from(endpoints.len() + 1).expect("at most 16 segments have a range of endpoints");
    let mut body = Vec::new();
    body.extend(count.to_le_bytes());
    body.extend(HEADER.to_le_bytes());
    body.extend([0; 8]);

    body.extend([VIRTIO_PCI_IOMMU, 0]);
    body.extend(VIRTIO_PCI_IOMMU_LEN.to_le_bytes());
    body.extend(iommu.segment.to_le_bytes());
    body.extend(iommu.requester_id().to_le_bytes());
    body.extend([0; 8]);

    for range in endpoints {
        let (first, last) = (range.start(), range.end());
        body.extend([PCI_RANGE, 0]);
        body.extend(PCI_RANGE_LEN.to_le_bytes());
        body.extend(first.endpoint_id().to_le_bytes());
        for word in [first.segment, last.segment, first.requester_id(), last.requester_id(), HEADER] {
            body.extend(word.to_le_bytes());
        }
        body.extend([0; 6]);
    }
    // 36 bytes: the common table header.
    let mut table = Sdt::new(*b"VIOT", 36, 1, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.append_slice(&body);
    table
}

#[cfg(test)]
mod tests {
    use acpi_tables::Aml;
    use acpi_tables::viot;

    use super::*;

    fn bytes(table: &dyn Aml) -> Vec<u8> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        bytes
    }

    /// Returns the table as the crate `acpi_tables` builds it. The crate's table is correct for segment 0.
    fn of_the_crate(iommu: PciAddress, range: &RangeInclusive<PciAddress>) -> Vec<u8> {
        let device = |a: PciAddress| viot::PciDevice::new(a.segment, a.bus, a.device, a.function);
        let mut table = viot::VIOT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
        let handle = table.add_virtio_pci_iommu(viot::VirtIoPciIommu::new(device(iommu)));
        table.add_pci_range(viot::PciRange::new(device(*range.start()), device(*range.end()), &handle));
        bytes(&table)
    }

    #[test]
    fn table_of_one_segment_matches_the_crates() {
        let at = PciAddress::on_root_bus;
        // The two tables differ in the creator ID and the creator revision, so their checksums differ too.
        let range = at(2)..=at(17);
        let (ours, theirs) = (bytes(&build(at(1), std::slice::from_ref(&range))), of_the_crate(at(1), &range));
        assert_eq!((&ours[..9], &ours[36..]), (&theirs[..9], &theirs[36..]));
    }

    #[test]
    fn each_range_of_endpoints_is_numbered_with_its_segment() {
        let at = PciAddress::on_segment;
        let table = bytes(&build(at(0, 1), &[at(0, 2)..=at(0, 17), at(1, 1)..=at(1, 31)]));
        let word = |at: usize| u16::from_le_bytes([table[at], table[at + 1]]);
        assert_eq!((word(36), word(4)), (3, 48 + 16 + 2 * 24));
        // Fields of a range after its type and length: first endpoint, segments, requester IDs, offset of the IOMMU's node.
        let range = |node: usize| [4, 6, 8, 10, 12, 14, 16].map(|field| word(64 + 24 * node + field));
        assert_eq!(range(0), [0x10, 0, 0, 0, 0x10, 0x88, 48]);
        assert_eq!(range(1), [0x08, 1, 1, 1, 0x08, 0xf8, 48]);
    }
}
