// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saving a VM and restoring it: where to, and from where.

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

/// How a URL of a directory begins.
const SCHEME: &str = "file://";

/// A directory of this host, as a URL: `file:///path`. The path is taken as it stands, as Cloud Hypervisor does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DirectoryUrl(PathBuf);

impl DirectoryUrl {
    /// The directory, an absolute path.
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

/// Where a VM is to be saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmSnapshotConfig {
    /// A directory that has no snapshot, or does not exist while its parent does: `file:///path`.
    #[schema(value_type = String)]
    pub destination_url: DirectoryUrl,
}

/// How a VM gets the bytes of its RAM when it is restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum MemoryRestoreMode {
    /// All are read before the VM is there.
    Copy,
    /// A page is read when it is touched; the snapshot must stay as it is for the life of the VM. For private RAM only.
    OnDemand,
}

/// A network device that was saved with descriptors of a client, and gets others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoredNetConfig {
    /// Its ID.
    pub id: String,
    /// How many of the descriptors that come with the request are for it. They come in the order of this list.
    #[schema(value_type = u64)]
    pub num_fds: usize,
    /// Numbers that they have in the client's process, which mean nothing here.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "or_default")]
    pub fds: Vec<i32>,
    /// The files themselves.
    #[serde(skip)]
    files: TapFiles,
}

/// Another node of the host for a zone of RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmMemoryZoneUpdateData {
    /// Its ID.
    pub id: String,
    /// The node that its pages come from.
    pub host_numa_node: u32,
}

/// What a VM is to be restored from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoreConfig {
    /// The directory of a snapshot: `file:///path`.
    #[schema(value_type = String)]
    pub source_url: DirectoryUrl,
    /// All of the RAM is read now. Otherwise private RAM is read when it is touched, and the snapshot must stay as it is for the
    /// life of the VM.
    #[serde(default)]
    pub prefault: bool,
    /// The VM runs once it is restored. Otherwise it is paused, as it was when it was saved.
    #[serde(default)]
    pub resume: bool,
    /// How RAM gets its bytes; as `prefault` says if nothing is said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_restore_mode: Option<MemoryRestoreMode>,
    /// Network devices that get other descriptors in place of a client's that they were saved with: all of these.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "object::list_or_null")]
    #[schema(value_type = Option<Vec<RestoredNetConfig>>)]
    pub net_fds: Vec<RestoredNetConfig>,
    /// Zones of RAM whose pages come from other nodes of the host.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "object::list_or_null")]
    #[schema(value_type = Option<Vec<VmMemoryZoneUpdateData>>)]
    pub zone_updates: Vec<VmMemoryZoneUpdateData>,
}

impl RestoreConfig {
    /// The option.
    pub const OPTION: Field = Field::only("--restore");
    /// [`Self::source_url`].
    pub const SOURCE_URL: Field = Field::new("--restore", "source_url").keys("source_url", "");
    /// [`Self::memory_restore_mode`].
    const MODE: Field = Field::new("--restore", "memory_restore_mode").keys("memory_restore_mode", "");
    /// [`Self::net_fds`].
    const NET_FDS: Field = Field::new("--restore", "net_fds").keys("net_fds", "");
    /// [`Self::zone_updates`].
    const ZONE_UPDATES: Field = Field::new("--restore", "zone_updates").keys("zone_updates", "");

    /// Takes the descriptors that came with the request.
    ///
    /// # Errors
    /// There are more or fewer than network devices are to get.
    pub fn take_files(&mut self, files: Vec<OwnedFd>) -> Result<(), ConfigError> {
        let wanted = self.net_fds.iter().fold(0usize, |sum, net| sum.saturating_add(net.num_fds));
        if wanted != files.len() {
            let rule = format!("{} descriptors came with the request, but devices are to get {wanted}", files.len());
            return Err(ConfigError::new(Self::NET_FDS, rule));
        }
        let mut files = files.into_iter();
        for net in &mut self.net_fds {
            net.files = TapFiles::new(files.by_ref().take(net.num_fds).collect());
        }
        Ok(())
    }

    /// Whether all of the RAM is read now.
    pub fn reads_all(&self) -> bool {
        self.prefault || self.memory_restore_mode == Some(MemoryRestoreMode::Copy)
    }

    /// Makes what was saved what is to be restored.
    ///
    /// # Errors
    /// A device or zone is not there, is given twice, or is not given what it needs; or RAM cannot be read as is wanted.
    pub fn apply(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        self.check_mode(config)?;
        for (place, RestoredNetConfig { id, files, num_fds, .. }) in self.net_fds.iter().enumerate() {
            let rule = match config.net.iter_mut().find(|net| net.id.as_ref() == Some(id)) {
                _ if self.net_fds[..place].iter().any(|other| other.id == *id) => format!("'{id}' is given twice"),
                None => format!("there is no network device '{id}'"),
                Some(net) if net.fds.is_empty() => format!("'{id}' was saved without descriptors of another process"),
                // They come with a request only.
                Some(_) if files.count() != *num_fds => format!("no descriptors came for '{id}'"),
                Some(net) => {
                    net.give_files(files.clone())?;
                    continue;
                }
            };
            return Err(ConfigError::new(Self::NET_FDS, rule));
        }
        if let Some(net) = config.net.iter().find(|net| !net.fds.is_empty()) {
            let (id, count) = (net.id.as_deref().unwrap_or_default(), net.fds.len());
            let rule = format!("'{id}' was saved with {count} descriptors of another process, and has to get others");
            return Err(ConfigError::new(Self::NET_FDS, rule));
        }
        for (place, VmMemoryZoneUpdateData { id, host_numa_node }) in self.zone_updates.iter().enumerate() {
            let rule = match config.memory.zones.iter_mut().find(|zone| zone.id == *id) {
                _ if self.zone_updates[..place].iter().any(|other| other.id == *id) => format!("'{id}' is given twice"),
                None => format!("there is no zone '{id}'"),
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
            "on demand does not go with prefault"
        } else if config.memory.all_zones().iter().any(MemoryZoneConfig::can_be_shared) {
            "on demand is for private RAM: what others share, and huge pages, are read at once"
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
    fn option_and_body_say_the_same() {
        let option: RestoreConfig = "source_url=file:///a/b,prefault=on,resume=on".parse().unwrap();
        let body = r#"{"source_url":"file:///a/b","prefault":true,"resume":true}"#;
        assert_eq!(serde_json::to_string(&option).unwrap(), body);
        assert_eq!(option.source_url.path(), Path::new("/a/b"));
        let least: RestoreConfig = serde_json::from_str(r#"{"source_url":"file:///a"}"#).unwrap();
        assert!(!least.prefault && !least.resume);
    }

    #[test]
    fn what_is_no_url_of_a_directory_is_refused() {
        for url in ["", "/a", "a", "file://a", "file:///a\0b", "unix:/a", "https://a/"] {
            assert!(url.parse::<DirectoryUrl>().is_err(), "{url}");
        }
    }

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    /// A VM with a device that was saved with two descriptors of a client, one without, and two zones.
    fn saved() -> VmConfig {
        let body = r#"{"payload": {"kernel": "/k"}, "net": [{"id": "a", "num_queues": 4, "fds": [-1, -1]}, {"id": "b", "tap": "t"}],
            "memory": {"size": 0, "zones": [{"id": "x", "size": 67108864}, {"id": "y", "size": 67108864}]}}"#;
        serde_json::from_str(body).unwrap()
    }

    fn restore(body: &str) -> RestoreConfig {
        serde_json::from_str(&format!(r#"{{"source_url": "file:///a"{body}}}"#)).unwrap()
    }

    #[test]
    fn device_that_had_a_clients_descriptors_gets_those_that_come() {
        let mut source = restore(r#", "net_fds": [{"id": "a", "num_fds": 2, "fds": [23, 24]}]"#);
        let refused = source.take_files(vec![file()]).unwrap_err().explain(Terms::Json);
        assert_eq!(refused, "net_fds: 1 descriptors came with the request, but devices are to get 2");
        source.take_files(vec![file(), file()]).unwrap();
        let mut vm = saved();
        source.apply(&mut vm).unwrap();
        assert_eq!((vm.net[0].files.count(), vm.net[0].fds.len(), vm.net[1].files.count()), (2, 0, 0));
        // So it is written again.
        assert_eq!(vm.to_be_saved().net[0].fds, [-1, -1]);
        assert!(vm.check().is_ok());
    }

    #[test]
    fn devices_and_zones_that_do_not_fit_are_refused() {
        let refused = |body: &str, files: usize| {
            let mut source = restore(body);
            source.take_files((0..files).map(|_| file()).collect()).unwrap();
            source.apply(&mut saved()).unwrap_err().explain(Terms::Json)
        };
        let needs = "net_fds: 'a' was saved with 2 descriptors of another process, and has to get others";
        assert_eq!(refused("", 0), needs);
        assert_eq!(refused(r#", "net_fds": null"#, 0), needs);
        assert_eq!(
            refused(r#", "net_fds": [{"id": "c", "num_fds": 1}]"#, 1),
            "net_fds: there is no network device 'c'"
        );
        let without = "net_fds: 'b' was saved without descriptors of another process";
        assert_eq!(refused(r#", "net_fds": [{"id": "b", "num_fds": 1}]"#, 1), without);
        let twice = r#", "net_fds": [{"id": "a", "num_fds": 2}, {"id": "a", "num_fds": 2}]"#;
        assert_eq!(refused(twice, 4), "net_fds: 'a' is given twice");
        let one = refused(r#", "net_fds": [{"id": "a", "num_fds": 1}]"#, 1);
        assert_eq!(one, "net.fds: 1 came, not 2: one for each two queues");
        let zone = |update: &str| {
            let mut vm = saved();
            vm.net.clear();
            let applied = restore(&format!(r#", "zone_updates": [{update}]"#)).apply(&mut vm);
            applied.map(|()| vm.memory.zones[1].host_numa_node).map_err(|error| error.explain(Terms::Json))
        };
        assert_eq!(zone(r#"{"id": "y", "host_numa_node": 1}"#), Ok(Some(1)));
        assert_eq!(zone(r#"{"id": "z", "host_numa_node": 1}"#), Err("zone_updates: there is no zone 'z'".into()));
    }

    #[test]
    fn ram_is_read_as_the_client_wants_it_or_not_at_all() {
        let mut vm = VmConfig::default();
        let applied = |body: &str, vm: &mut VmConfig| {
            let source = restore(body);
            source.apply(vm).map(|()| source.reads_all()).map_err(|error| error.explain(Terms::Json))
        };
        let on_demand = r#", "memory_restore_mode": "OnDemand""#;
        assert_eq!([applied("", &mut vm), applied(on_demand, &mut vm)], [Ok(false), Ok(false)]);
        assert_eq!(applied(r#", "memory_restore_mode": "Copy""#, &mut vm), Ok(true));
        let both = applied(&format!(r#"{on_demand}, "prefault": true"#), &mut vm);
        assert_eq!(both, Err("memory_restore_mode: on demand does not go with prefault".into()));
        vm.memory.shared = true;
        assert!(
            applied(on_demand, &mut vm).unwrap_err().starts_with("memory_restore_mode: on demand is for private RAM")
        );
    }
}
