// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration of snapshot and restore.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::MemoryZoneConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::left_out::or_default;
use crate::object;
use crate::option_list::{FromOption, Special, from_str};
use crate::tap_files::TapFiles;
use crate::text_form::text_form;
use crate::vm_config::VmConfig;

/// Prefix of a directory URL.
const SCHEME: &str = "file://";

/// Directory of this host, as a URL: `file:///path`. As in Cloud Hypervisor, the path is not percent-decoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DirectoryUrl(PathBuf);

impl DirectoryUrl {
    /// Returns the absolute path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl FromStr for DirectoryUrl {
    type Err = String;

    fn from_str(url: &str) -> Result<Self, String> {
        let path = url.strip_prefix(SCHEME).filter(|path| path.starts_with('/') && !path.contains('\0'));
        path.map(|path| Self(path.into())).ok_or_else(|| format!("'{url}' must be file:///PATH"))
    }
}

impl fmt::Display for DirectoryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.0.display())
    }
}
text_form!(DirectoryUrl);

/// Destination of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSnapshotConfig {
    /// Directory for the snapshot, as `file:///path`. The directory must not contain a snapshot. If the directory does not exist, its
    /// parent must exist.
    #[schema(value_type = String)]
    pub destination_url: DirectoryUrl,
}

/// Method to load the RAM of a restored VM: copy all RAM during the restore, or read each page on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum MemoryRestoreMode {
    /// Read all RAM before the restore completes.
    Copy,
    /// Read each page on first access. The snapshot must stay unchanged while the VM exists. Only possible with private RAM.
    OnDemand,
}

/// Network device that was saved with descriptors of a client, and needs new descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoredNetConfig {
    /// ID of the device.
    pub id: String,
    /// Number of descriptors for the device. With the request, the client passes the descriptors of all devices, in the order of `net_fds`.
    #[schema(value_type = u64)]
    pub num_fds: usize,
    /// Descriptor numbers in the client's process. The VMM ignores these numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "or_default")]
    pub fds: Vec<i32>,
    /// Descriptors passed with the request.
    #[serde(skip)]
    files: TapFiles,
}

/// New host NUMA node for a memory zone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmMemoryZoneUpdateData {
    /// ID of the zone.
    pub id: String,
    /// Host NUMA node on which the zone's memory is allocated.
    pub host_numa_node: u32,
}

/// Source and options of a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoreConfig {
    /// Snapshot directory, as `file:///path`.
    #[schema(value_type = String)]
    pub source_url: DirectoryUrl,
    /// True if the whole RAM is read during the restore. Otherwise each page of private RAM is read on first access, and the snapshot must
    /// stay unchanged while the VM exists.
    #[serde(default)]
    pub prefault: bool,
    /// True if the VM runs after the restore. Otherwise the VM stays paused.
    #[serde(default)]
    pub resume: bool,
    /// Method to load the RAM: `Copy` reads all RAM during the restore, and `OnDemand` reads each page on first access. By
    /// default, `prefault` decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_restore_mode: Option<MemoryRestoreMode>,
    /// New descriptors for network devices that were saved with descriptors of a client. Every such device must be listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "object::list_or_null")]
    #[schema(value_type = Option<Vec<RestoredNetConfig>>)]
    pub net_fds: Vec<RestoredNetConfig>,
    /// Memory zones whose memory is allocated on other host NUMA nodes than before.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "object::list_or_null")]
    #[schema(value_type = Option<Vec<VmMemoryZoneUpdateData>>)]
    pub zone_updates: Vec<VmMemoryZoneUpdateData>,
}

impl RestoreConfig {
    /// Name of the option.
    pub const OPTION: Field = Field::only("--restore");
    /// [`Self::source_url`].
    pub const SOURCE_URL: Field = Field::new("--restore", "source_url").keys("source_url", "");
    /// [`Self::memory_restore_mode`].
    const MODE: Field = Field::new("--restore", "memory_restore_mode").keys("memory_restore_mode", "");
    /// [`Self::net_fds`].
    const NET_FDS: Field = Field::new("--restore", "net_fds").keys("net_fds", "");
    /// [`Self::zone_updates`].
    const ZONE_UPDATES: Field = Field::new("--restore", "zone_updates").keys("zone_updates", "");

    /// Distributes the descriptors that the client passed with the request to the devices of `net_fds`.
    ///
    /// # Errors
    /// The number of descriptors differs from the number that the network devices need.
    pub fn take_files(&mut self, files: Vec<OwnedFd>) -> Result<(), ConfigError> {
        let wanted = self.net_fds.iter().fold(0usize, |sum, net| sum.saturating_add(net.num_fds));
        if wanted != files.len() {
            let rule = format!(
                "the request has {} descriptors, but the num_fds of all listed devices add up to {wanted}",
                files.len()
            );
            return Err(ConfigError::new(Self::NET_FDS, rule));
        }
        let mut files = files.into_iter();
        for net in &mut self.net_fds {
            net.files = TapFiles::new(files.by_ref().take(net.num_fds).collect());
        }
        Ok(())
    }

    /// True if the whole RAM is read during the restore.
    pub fn reads_all(&self) -> bool {
        self.prefault || self.memory_restore_mode == Some(MemoryRestoreMode::Copy)
    }

    /// Applies these options to the saved configuration.
    ///
    /// # Errors
    /// A named device or zone does not exist or is given twice, a device lacks its descriptors, or the RAM cannot be loaded by
    /// this method.
    pub fn apply(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        self.check_mode(config)?;
        for (place, RestoredNetConfig { id, files, num_fds, .. }) in self.net_fds.iter().enumerate() {
            let rule = match config.net.iter_mut().find(|net| net.id.as_ref() == Some(id)) {
                _ if self.net_fds[..place].iter().any(|other| other.id == *id) => {
                    format!("'{id}' is given twice: leave one out")
                }
                None => format!("the snapshot has no network device '{id}': remove this device from net_fds"),
                Some(net) if net.fds.is_empty() => {
                    format!(
                        "network device '{id}' used no descriptors of a client when it was saved: remove this device from net_fds"
                    )
                }
                // The API request passed no descriptors. Otherwise `take_files` has given each listed device its descriptors.
                Some(_) if files.count() != *num_fds => {
                    format!("the request has no descriptors for '{id}': pass them with SCM_RIGHTS")
                }
                Some(net) => {
                    net.give_files(files.clone())?;
                    continue;
                }
            };
            return Err(ConfigError::new(Self::NET_FDS, rule));
        }
        if let Some(net) = config.net.iter().find(|net| !net.fds.is_empty()) {
            let (id, count) = (net.id.as_deref().unwrap_or_default(), net.fds.len());
            let rule = format!(
                "network device '{id}' was saved with {count} descriptors of another process: restore the VM with the API request vm.restore, and pass new descriptors (SCM_RIGHTS)"
            );
            return Err(ConfigError::new(Self::NET_FDS, rule));
        }
        for (place, VmMemoryZoneUpdateData { id, host_numa_node }) in self.zone_updates.iter().enumerate() {
            let rule = match config.memory.zones.iter_mut().find(|zone| zone.id == *id) {
                _ if self.zone_updates[..place].iter().any(|other| other.id == *id) => {
                    format!("'{id}' is given twice: leave one out")
                }
                None => format!("the snapshot has no memory zone '{id}': remove this zone from zone_updates"),
                Some(zone) => {
                    zone.host_numa_node = Some(*host_numa_node);
                    continue;
                }
            };
            return Err(ConfigError::new(Self::ZONE_UPDATES, rule));
        }
        Ok(())
    }

    fn check_mode(&self, config: &VmConfig) -> Result<(), ConfigError> {
        if self.memory_restore_mode != Some(MemoryRestoreMode::OnDemand) {
            return Ok(());
        }
        let rule = if self.prefault {
            "OnDemand cannot be combined with prefault: leave one out"
        } else if config.memory.all_zones().iter().any(MemoryZoneConfig::can_be_shared) {
            "OnDemand is only possible with private RAM: use Copy for shared RAM and huge pages"
        } else {
            return Ok(());
        };
        Err(ConfigError::new(Self::MODE, rule))
    }
}

impl FromOption for RestoreConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[Special::By("net_fds", &[])];
}
from_str!(RestoreConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    #[test]
    fn option_and_body_have_the_same_meaning() {
        let option: RestoreConfig = "source_url=file:///a/b,prefault=on,resume=on".parse().unwrap();
        let body = r#"{"source_url":"file:///a/b","prefault":true,"resume":true}"#;
        assert_eq!(serde_json::to_string(&option).unwrap(), body);
        assert_eq!(option.source_url.path(), Path::new("/a/b"));
        let least: RestoreConfig = serde_json::from_str(r#"{"source_url":"file:///a"}"#).unwrap();
        assert!(!least.prefault && !least.resume);
    }

    #[test]
    fn invalid_directory_url_is_refused() {
        for url in ["", "/a", "a", "file://a", "file:///a\0b", "unix:/a", "https://a/"] {
            assert!(url.parse::<DirectoryUrl>().is_err(), "{url}");
        }
    }

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    /// Returns a VM with two zones and two network devices. One device was saved with two descriptors of a client, and the other device
    /// without descriptors.
    fn saved() -> VmConfig {
        let body = r#"{"payload": {"kernel": "/k"}, "net": [{"id": "a", "num_queues": 4, "fds": [-1, -1]}, {"id": "b", "tap": "t"}],
            "memory": {"size": 0, "zones": [{"id": "x", "size": 67108864}, {"id": "y", "size": 67108864}]}}"#;
        serde_json::from_str(body).unwrap()
    }

    fn restore(body: &str) -> RestoreConfig {
        serde_json::from_str(&format!(r#"{{"source_url": "file:///a"{body}}}"#)).unwrap()
    }

    #[test]
    fn device_with_client_descriptors_gets_the_new_ones() {
        let mut source = restore(r#", "net_fds": [{"id": "a", "num_fds": 2, "fds": [23, 24]}]"#);
        let refused = source.take_files(vec![file()]).unwrap_err().explain(Terms::Json);
        assert_eq!(
            refused,
            "net_fds: the request has 1 descriptors, but the num_fds of all listed devices add up to 2"
        );
        source.take_files(vec![file(), file()]).unwrap();
        let mut vm = saved();
        source.apply(&mut vm).unwrap();
        assert_eq!((vm.net[0].files.count(), vm.net[0].fds.len(), vm.net[1].files.count()), (2, 0, 0));
        // A new snapshot of the VM contains the same `fds` as the first snapshot.
        assert_eq!(vm.to_be_saved().net[0].fds, [-1, -1]);
        assert!(vm.check().is_ok());
    }

    #[test]
    fn unknown_devices_zones_and_descriptors_are_refused() {
        let refused = |body: &str, files: usize| {
            let mut source = restore(body);
            source.take_files((0..files).map(|_| file()).collect()).unwrap();
            source.apply(&mut saved()).unwrap_err().explain(Terms::Json)
        };
        let needs = "net_fds: network device 'a' was saved with 2 descriptors of another process: restore the VM with the API request vm.restore, and pass new descriptors (SCM_RIGHTS)";
        assert_eq!(refused("", 0), needs);
        assert_eq!(refused(r#", "net_fds": null"#, 0), needs);
        assert_eq!(
            refused(r#", "net_fds": [{"id": "c", "num_fds": 1}]"#, 1),
            "net_fds: the snapshot has no network device 'c': remove this device from net_fds"
        );
        let without = "net_fds: network device 'b' used no descriptors of a client when it was saved: remove this device from net_fds";
        assert_eq!(refused(r#", "net_fds": [{"id": "b", "num_fds": 1}]"#, 1), without);
        let twice = r#", "net_fds": [{"id": "a", "num_fds": 2}, {"id": "a", "num_fds": 2}]"#;
        assert_eq!(refused(twice, 4), "net_fds: 'a' is given twice: leave one out");
        let one = refused(r#", "net_fds": [{"id": "a", "num_fds": 1}]"#, 1);
        assert_eq!(one, "net.fds: 1 descriptors were passed instead of 2: pass one for each pair of queues");
        let zone = |update: &str| {
            let mut vm = saved();
            vm.net.clear();
            let applied = restore(&format!(r#", "zone_updates": [{update}]"#)).apply(&mut vm);
            applied.map(|()| vm.memory.zones[1].host_numa_node).map_err(|error| error.explain(Terms::Json))
        };
        assert_eq!(zone(r#"{"id": "y", "host_numa_node": 1}"#), Ok(Some(1)));
        assert_eq!(
            zone(r#"{"id": "z", "host_numa_node": 1}"#),
            Err("zone_updates: the snapshot has no memory zone 'z': remove this zone from zone_updates".into())
        );
    }

    #[test]
    fn impossible_memory_restore_mode_is_refused() {
        let mut vm = VmConfig::default();
        let applied = |body: &str, vm: &mut VmConfig| {
            let source = restore(body);
            source.apply(vm).map(|()| source.reads_all()).map_err(|error| error.explain(Terms::Json))
        };
        let on_demand = r#", "memory_restore_mode": "OnDemand""#;
        assert_eq!([applied("", &mut vm), applied(on_demand, &mut vm)], [Ok(false), Ok(false)]);
        assert_eq!(applied(r#", "memory_restore_mode": "Copy""#, &mut vm), Ok(true));
        let both = applied(&format!(r#"{on_demand}, "prefault": true"#), &mut vm);
        assert_eq!(both, Err("memory_restore_mode: OnDemand cannot be combined with prefault: leave one out".into()));
        vm.memory.shared = true;
        assert!(
            applied(on_demand, &mut vm)
                .unwrap_err()
                .starts_with("memory_restore_mode: OnDemand is only possible with private RAM")
        );
    }
}
