// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory zones: parts of the guest's RAM, each with its own memory settings.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{ConfigError, ensure};
use crate::field::{Field, keys};
use crate::limits::{GIB, LOW_MEMORY, MAX_HOST_NODE, MAX_MEMORY, MAX_MEMORY_ZONES, MEMORY_GRANULE, MIB};
use crate::option_list::from_option;

/// Zone of the guest's RAM. Zones follow each other in guest-physical memory, in the order of the list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryZoneConfig {
    /// Name that NUMA nodes (`numa`) refer to.
    pub id: String,
    /// Size in bytes, a multiple of 2 MiB.
    #[schema(minimum = 2_097_152, maximum = 549_755_813_888_u64, multiple_of = 2_097_152)]
    pub size: u64,
    /// File that backs the zone, at least as long as the zone. If the path is a directory, the VMM creates an unnamed file in this
    /// directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// True if other processes can map the zone. If the zone has a file, the guest's writes then change the file. If `shared` is false, the
    /// guest's writes are private to the VMM.
    #[serde(default)]
    pub shared: bool,
    /// True if the zone consists of the host's reserved huge pages (hugetlb). The zone is then always a memfd.
    #[serde(default)]
    pub hugepages: bool,
    /// Huge page size in bytes: 2 MiB (default) or 1 GiB. Requires `hugepages`. `size` must be a multiple of this size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// Host NUMA node on which the memory is allocated. By default, any node.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 1023)]
    pub host_numa_node: Option<u32>,
    /// True if the host allocates the whole zone when the VM is built. Otherwise the host allocates each page on first access.
    #[serde(default)]
    pub prefault: bool,
    /// True if the host must reserve memory for the whole zone when the VM is built. If the host cannot, the boot fails. For a shared zone,
    /// the host also allocates all memory when the VM is built.
    #[serde(default)]
    pub reserve: bool,
    /// True if the host may merge identical pages of the zone (KSM). Must be off if other processes can map the zone.
    #[serde(default)]
    pub mergeable: bool,
}

impl MemoryZoneConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--memory-zone", "memory.zones");
    keys! {
        ID = "id", SIZE = "size", FILE = "file", HUGEPAGES = "hugepages", HUGEPAGE_SIZE = "hugepage_size",
        HOST_NUMA_NODE = "host_numa_node", MERGEABLE = "mergeable",
    }

    /// Size of a huge page in bytes.
    pub fn huge_page(&self) -> u64 {
        self.hugepage_size.unwrap_or(2 * MIB)
    }

    /// True if other processes can map the zone.
    pub fn can_be_shared(&self) -> bool {
        self.shared || self.hugepages
    }

    /// Returns the guest-physical address and length of each part of each zone. A zone that spans the hole for BARs has two
    /// parts.
    pub fn places(zones: &[Self], hole: std::ops::Range<u64>) -> Vec<Vec<(u64, u64)>> {
        let mut next = 0u64;
        let of = |zone: &Self| {
            let mut parts = Vec::new();
            let mut left = zone.size;
            if next < hole.start {
                let low = left.min(hole.start - next);
                parts.push((next, low));
                next += low;
                left -= low;
            }
            if next >= hole.start {
                next = next.max(hole.end);
            }
            if left > 0 {
                parts.push((next, left));
                next += left;
            }
            parts
        };
        zones.iter().map(of).collect()
    }

    /// Checks all zones of a VM together.
    pub(super) fn check_all(zones: &[Self]) -> Result<(), ConfigError> {
        let (count, most) = (zones.len(), MAX_MEMORY_ZONES);
        ensure(count <= most, Self::OPTION, || format!("the VM has {count} zones, but the maximum is {most}"))?;
        let mut seen = BTreeSet::new();
        let mut start = 0;
        for zone in zones {
            ensure(!zone.id.is_empty(), Self::ID, || "must not be empty")?;
            ensure(seen.insert(&zone.id), Self::ID, || {
                format!("'{}' is given twice: every zone needs its own id", zone.id)
            })?;
            zone.check(start)?;
            start += zone.size;
        }
        Ok(())
    }

    /// Checks a zone that follows `start` bytes of RAM.
    fn check(&self, start: u64) -> Result<(), ConfigError> {
        let Self { id, size, hugepages, host_numa_node: node, .. } = self;
        let check = |holds: bool, field: Field, rule: &str| ensure(holds, field, || format!("zone '{id}': {rule}"));
        let (page, has_file) = (self.huge_page(), self.file.is_some());
        // Bytes of the zone below the hole for BARs. If the zone is larger, its other bytes are above the hole.
        let low = (*size).min(LOW_MEMORY.saturating_sub(start));
        let fits = *size != 0 && size.is_multiple_of(MEMORY_GRANULE) && *size <= MAX_MEMORY;
        let (granule, most) = (MEMORY_GRANULE / MIB, MAX_MEMORY / GIB);
        check(
            fits,
            Self::SIZE,
            &format!("has {size} bytes, but must have a multiple of {granule}M from {granule}M to {most}G"),
        )?;
        let is_used = *hugepages || self.hugepage_size.is_none();
        check(is_used, Self::HUGEPAGE_SIZE, "needs hugepages to be on")?;
        check([2 * MIB, GIB].contains(&page), Self::HUGEPAGE_SIZE, &format!("{page} is neither 2M nor 1G"))?;
        let is_huge = !hugepages || size.is_multiple_of(page) && low.is_multiple_of(page);
        let rule = format!(
            "has {size} bytes, of which {low} bytes lie below the guest-physical address 3G: both numbers must be multiples of the huge page size of {page} bytes"
        );
        check(is_huge, Self::SIZE, &rule)?;
        let rule = "cannot be combined with hugepages: the file system determines the page size of a file";
        check(!hugepages || !has_file, Self::FILE, rule)?;
        let rule = "must be off if shared or hugepages is on: the host merges only private pages";
        check(!self.mergeable || !self.can_be_shared(), Self::MERGEABLE, rule)?;
        let exists = node.is_none_or(|node| node <= MAX_HOST_NODE);
        check(exists, Self::HOST_NUMA_NODE, &format!("the host node is above the maximum of {MAX_HOST_NODE}"))?;
        let rule =
            "cannot be combined with a shared file: the host kernel does not move pages that other processes allocated";
        check(node.is_none() || !self.shared || !has_file, Self::HOST_NUMA_NODE, rule)
    }
}

from_option!(MemoryZoneConfig);

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(text: &str) -> MemoryZoneConfig {
        text.parse().unwrap()
    }

    #[test]
    fn invalid_zone_is_refused_with_its_name() {
        let refused = |texts: &[&str]| {
            let zones: Vec<_> = texts.iter().map(|text| zone(text)).collect();
            MemoryZoneConfig::check_all(&zones).err().map(|error| error.to_string())
        };
        for (texts, start) in [
            (
                &["id=a,size=1M"][..],
                "--memory-zone size: zone 'a': has 1048576 bytes, but must have a multiple of 2M from 2M to",
            ),
            (&["id=a,size=0"], "--memory-zone size: zone 'a': has 0 bytes, but must have a multiple"),
            (&["id=a,size=2M", "id=a,size=2M"], "--memory-zone id: 'a' is given twice: every zone needs its own id"),
            (&["id=a,size=1G,hugepage_size=2M"], "--memory-zone hugepage_size: zone 'a': needs hugepages"),
            (
                &["id=a,size=1G,hugepages=on,hugepage_size=4M"],
                "--memory-zone hugepage_size: zone 'a': 4194304 is neither",
            ),
            (
                &["id=a,size=2M,hugepages=on,hugepage_size=1G"],
                "--memory-zone size: zone 'a': has 2097152 bytes, of which 2097152 bytes lie below",
            ),
            (
                &["id=a,size=512M", "id=b,size=3G,hugepages=on,hugepage_size=1G"],
                "--memory-zone size: zone 'b': has 3221225472 bytes, of which 2684354560 bytes lie below the guest-physical address 3G: both",
            ),
            (&["id=a,size=2M,hugepages=on,file=/f"], "--memory-zone file: zone 'a': cannot be combined with hugepages"),
            (&["id=a,size=2M,shared=on,mergeable=on"], "--memory-zone mergeable: zone 'a': must be off"),
            (
                &["id=a,size=2M,host_numa_node=1024"],
                "--memory-zone host_numa_node: zone 'a': the host node is above the maximum of 1023",
            ),
            (
                &["id=a,size=2M,host_numa_node=0,shared=on,file=/f"],
                "--memory-zone host_numa_node: zone 'a': cannot be combined",
            ),
        ] {
            let refused = refused(texts).unwrap();
            assert!(refused.starts_with(start), "{refused}");
            assert!(refused.contains("'a'") || refused.contains("zone 'b'"), "{refused}");
        }
        assert_eq!(refused(&["id=a,size=1G", "id=b,size=4G,hugepages=on,hugepage_size=1G"]), None);
        let many: Vec<_> = (0..33).map(|id| format!("id=z{id},size=2M")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(refused(&many).unwrap(), "--memory-zone: the VM has 33 zones, but the maximum is 32");
        assert_eq!(refused(&many[..32]), None);
    }

    #[test]
    fn zones_follow_each_other_and_skip_the_hole() {
        let of = |sizes: &[u64]| {
            let zones: Vec<_> =
                sizes.iter().map(|size| MemoryZoneConfig { size: size * GIB, ..Default::default() }).collect();
            let places = MemoryZoneConfig::places(&zones, 3 * GIB..4 * GIB);
            let gib = |parts: Vec<(u64, u64)>| parts.into_iter().map(|(gpa, len)| (gpa / GIB, len / GIB)).collect();
            places.into_iter().map(gib).collect::<Vec<Vec<_>>>()
        };
        assert_eq!(of(&[1, 1]), [vec![(0, 1)], vec![(1, 1)]]);
        assert_eq!(of(&[2, 2, 1]), [vec![(0, 2)], vec![(2, 1), (4, 1)], vec![(5, 1)]]);
        assert_eq!(of(&[3, 1]), [vec![(0, 3)], vec![(4, 1)]]);
        assert_eq!(of(&[5]), [vec![(0, 3), (4, 2)]]);
    }
}
