// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Facts that sysfs reports about a host function, before VFIO opens it.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use crate::vfio::error::{Holder, VfioPciError};

/// Drivers that do no DMA. VFIO accepts a group in which these drivers hold functions.
const HARMLESS: [&str; 2] = ["pci-stub", "pcieport"];

/// Host function that, according to sysfs, VFIO can pass through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostFunctionPath {
    path: PathBuf,
    name: String,
    group: u32,
}

impl HostFunctionPath {
    /// Checks the function at the sysfs path `path`. The path must lead to a PCI function that is bound to vfio-pci (or to a variant for
    /// its kind of device). The host must not use the other functions of its IOMMU group.
    pub fn inspect(path: &Path) -> Result<Self, VfioPciError> {
        let real =
            fs::canonicalize(path).map_err(|source| VfioPciError::NoSuchDevice { path: path.to_path_buf(), source })?;
        let not_pci = || VfioPciError::NotPci { path: path.to_path_buf() };
        let name = real.file_name().and_then(|name| name.to_str()).filter(|name| is_address(name));
        let name = name.ok_or_else(not_pci)?.to_string();
        if !real.join("config").exists() {
            return Err(not_pci());
        }
        let driver = link_name(&real.join("driver"));
        if !driver.as_deref().is_some_and(is_vfio_driver) {
            return Err(VfioPciError::NotBound { name, driver });
        }
        let group = link_name(&real.join("iommu_group")).and_then(|group| group.parse().ok());
        let function =
            Self { group: group.ok_or_else(|| VfioPciError::NoGroup { name: name.clone() })?, path: real, name };
        let others = function.in_the_way();
        if !others.is_empty() {
            return Err(VfioPciError::NotViable { name: function.name, group: function.group, others });
        }
        Ok(function)
    }

    /// Returns the path without symbolic links. All symbolic links to one function give the same path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the address of the function, such as `0000:00:05.0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the function's IOMMU group. Functions of one group must share an address space.
    pub fn group(&self) -> u32 {
        self.group
    }

    /// True if opening the function resets it, as `vfio_pci_core_enable()` of the kernel does. The result is false for a variant driver,
    /// because such a driver may behave differently.
    pub(crate) fn is_reset_when_opened(&self) -> bool {
        link_name(&self.path.join("driver")).as_deref() == Some("vfio-pci")
    }

    /// Returns VFIO's character device for the function, if the kernel provides one.
    pub(crate) fn cdev(&self) -> Option<PathBuf> {
        let entry = fs::read_dir(self.path.join("vfio-dev")).ok()?.next()?.ok()?;
        Some(Path::new("/dev/vfio/devices").join(entry.file_name()))
    }

    /// Returns ranges of bus addresses, in whole pages. DMA of the function to these ranges may reach another function instead of the
    /// host's IOMMU. The ranges are the BARs and bridge windows of the function's IOMMU group. The list is empty if the function is alone
    /// in its group, because the host then isolates the function from all other functions (ACS).
    pub fn peer_memory(&self) -> Vec<RangeInclusive<u64>> {
        let Ok(entries) = fs::read_dir(self.path.join("iommu_group/devices")) else { return Vec::new() };
        let functions: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        if functions.len() < 2 {
            return Vec::new();
        }
        let resources = functions.iter().filter_map(|path| fs::read_to_string(path.join("resource")).ok());
        let mut ranges: Vec<_> =
            resources.flat_map(|text| text.lines().filter_map(memory).collect::<Vec<_>>()).collect();
        ranges.sort_by_key(|range| (*range.start(), *range.end()));
        ranges.dedup();
        ranges
    }

    /// Returns the functions of the group that host drivers hold.
    pub(crate) fn in_the_way(&self) -> Vec<Holder> {
        let Ok(entries) = fs::read_dir(self.path.join("iommu_group/devices")) else { return Vec::new() };
        let holder = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let driver = link_name(&entry.path().join("driver"))?;
            let harmless = is_vfio_driver(&driver) || HARMLESS.contains(&driver.as_str());
            (!harmless).then_some(Holder { name, driver })
        };
        let mut holders: Vec<_> = entries.flatten().filter_map(holder).collect();
        holders.sort_by(|a, b| a.name.cmp(&b.name));
        holders
    }
}

/// `IORESOURCE_MEM`, a flag in a line of `resource` (`include/linux/ioport.h`).
const IS_MEMORY: u64 = 0x200;

/// Returns the memory range in a line of `resource`, in whole pages.
fn memory(line: &str) -> Option<RangeInclusive<u64>> {
    let mut numbers = line.split_whitespace().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16));
    let (first, last, flags) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
    (flags & IS_MEMORY != 0 && first < last).then_some(first & !0xfff..=last | 0xfff)
}

/// True if the driver is `vfio-pci`, or a variant for one kind of device, such as `mlx5_vfio_pci`.
fn is_vfio_driver(name: &str) -> bool {
    name.replace('_', "-").contains("vfio-pci")
}

/// True if `name` has the form `ssss:bb:dd.f`.
fn is_address(name: &str) -> bool {
    let hex = |text: &str, least: usize| text.len() >= least && text.bytes().all(|b| b.is_ascii_hexdigit());
    let mut parts = name.splitn(3, ':');
    let (Some(segment), Some(bus), Some(rest)) = (parts.next(), parts.next(), parts.next()) else { return false };
    rest.split_once('.').is_some_and(|(device, function)| {
        hex(segment, 4) && bus.len() == 2 && hex(bus, 2) && device.len() == 2 && hex(device, 2) && hex(function, 1)
    })
}

fn link_name(link: &Path) -> Option<String> {
    fs::read_link(link).ok()?.file_name()?.to_str().map(str::to_string)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    /// Creates a directory tree like that of sysfs, with one IOMMU group. `functions` has the address and the driver of each function.
    fn sysfs(functions: &[(&str, Option<&str>)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("groups/7");
        fs::create_dir_all(group.join("devices")).unwrap();
        for (name, driver) in functions {
            let path = root.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::write(path.join("config"), [0; 64]).unwrap();
            symlink(&group, path.join("iommu_group")).unwrap();
            symlink(&path, group.join("devices").join(name)).unwrap();
            if let Some(driver) = driver {
                symlink(root.path().join("drivers").join(driver), path.join("driver")).unwrap();
            }
        }
        root
    }

    fn inspect(root: &TempDir, name: &str) -> Result<HostFunctionPath, VfioPciError> {
        HostFunctionPath::inspect(&root.path().join(name))
    }

    #[test]
    fn free_function_is_accepted_also_behind_a_link() {
        let root = sysfs(&[("0000:00:05.0", Some("vfio-pci")), ("0000:00:05.1", None)]);
        let function = inspect(&root, "0000:00:05.0").unwrap();
        assert_eq!((function.name(), function.group()), ("0000:00:05.0", 7));
        symlink(root.path().join("0000:00:05.0"), root.path().join("alias")).unwrap();
        assert_eq!(inspect(&root, "alias").unwrap(), function);
    }

    #[test]
    fn only_vfio_pci_is_known_to_reset_functions_at_open() {
        let root = sysfs(&[("0000:00:05.0", Some("vfio-pci")), ("0000:00:05.1", Some("mlx5_vfio_pci"))]);
        let of = |name| inspect(&root, name).unwrap().is_reset_when_opened();
        assert_eq!([of("0000:00:05.0"), of("0000:00:05.1")], [true, false]);
    }

    #[test]
    fn missing_path_is_a_user_error_and_is_named() {
        let error = HostFunctionPath::inspect(Path::new("/nonexistent/0000:00:05.0")).unwrap_err();
        assert!(matches!(error, VfioPciError::NoSuchDevice { .. }) && error.is_user_error());
        assert!(error.to_string().starts_with("/nonexistent/0000:00:05.0: No such file"), "{error}");
    }

    #[test]
    fn path_of_no_pci_function_is_refused() {
        let root = sysfs(&[("0000:00:05.0", Some("vfio-pci"))]);
        assert!(matches!(inspect(&root, "groups").unwrap_err(), VfioPciError::NotPci { .. }));
        fs::remove_file(root.path().join("0000:00:05.0/config")).unwrap();
        assert!(matches!(inspect(&root, "0000:00:05.0").unwrap_err(), VfioPciError::NotPci { .. }));
    }

    #[test]
    fn driver_that_holds_the_function_is_named() {
        let root = sysfs(&[("0000:00:05.0", Some("nvme")), ("0000:00:06.0", None)]);
        let error = inspect(&root, "0000:00:05.0").unwrap_err();
        assert!(error.to_string().contains("bound to driver nvme, not to vfio-pci"), "{error}");
        let error = inspect(&root, "0000:00:06.0").unwrap_err();
        assert!(error.to_string().contains("bound to no driver"), "{error}");
    }

    #[test]
    fn function_without_group_is_refused() {
        let root = sysfs(&[("0000:00:05.0", Some("vfio-pci"))]);
        fs::remove_file(root.path().join("0000:00:05.0/iommu_group")).unwrap();
        assert!(matches!(inspect(&root, "0000:00:05.0").unwrap_err(), VfioPciError::NoGroup { .. }));
    }

    #[test]
    fn functions_in_the_way_are_named_and_harmless_ones_are_not() {
        let root = sysfs(&[
            ("0000:00:05.0", Some("vfio-pci")),
            ("0000:00:05.1", Some("mlx5_vfio_pci")),
            ("0000:00:05.2", Some("pcieport")),
            ("0000:00:05.3", Some("e1000e")),
        ]);
        let Err(VfioPciError::NotViable { others, .. }) = inspect(&root, "0000:00:05.0") else { panic!() };
        assert_eq!(others, [Holder { name: "0000:00:05.3".into(), driver: "e1000e".into() }]);
    }

    #[test]
    fn peer_memory_covers_a_shared_iommu_group_only() {
        let resource = |root: &TempDir, name: &str, text: &str| {
            fs::write(root.path().join(name).join("resource"), text).unwrap();
        };
        let bar = "0x00000000d0000000 0x00000000d00007ff 0x0000000000040200\n0x0000000000000000 0x0 0x0\n";
        let ports = "0x000000000000e000 0x000000000000e0ff 0x0000000000040101\n";
        let window = "0x00000000c8000000 0x00000000d7ffffff 0x0000000000000200\nnonsense\n";
        let root = sysfs(&[("0000:01:00.0", Some("vfio-pci")), ("0000:00:1c.0", Some("pcieport"))]);
        resource(&root, "0000:01:00.0", &format!("{bar}{ports}"));
        resource(&root, "0000:00:1c.0", window);
        let function = inspect(&root, "0000:01:00.0").unwrap();
        assert_eq!(function.peer_memory(), [0xc800_0000..=0xd7ff_ffff, 0xd000_0000..=0xd000_0fff]);
        let alone = sysfs(&[("0000:01:00.0", Some("vfio-pci"))]);
        resource(&alone, "0000:01:00.0", bar);
        assert!(inspect(&alone, "0000:01:00.0").unwrap().peer_memory().is_empty());
    }
}
