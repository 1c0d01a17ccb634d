// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What goes over the wire, in Cloud Hypervisor's terms. The configuration is [`crate::vm_config`]'s.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{CpusConfig, MemoryConfig};
use crate::error::{ConfigError, ensure};
use crate::field::{Field, Terms};
use crate::kinds::IommuBounceConfig;
use crate::limits::{CHUNK_SIZE, HOTPLUG_GRANULE, MIB};
use crate::told;
use crate::vm_config::VmConfig;

/// The VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmmPing {
    /// Version with what it was built from.
    pub build_version: String,
    /// Version.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// What it was built with.
    pub features: Vec<String>,
}

/// The state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum VmState {
    /// There is a configuration; the VM was not booted yet, or its guest has ended.
    Created,
    /// The guest runs.
    Running,
    /// The vCPUs stand still; the devices' DMA goes on.
    Paused,
    /// Never told, as in Cloud Hypervisor, whose clients know it: a VM whose guest has ended is `Created` again.
    Shutdown,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Its configuration, with what was left to defaults filled in. What Carom has not of Cloud Hypervisor's is told with the
    /// value that asks for nothing, such as `"iommu": false`.
    #[serde(serialize_with = "told::serialize")]
    pub config: VmConfig,
    /// Its state.
    pub state: VmState,
    /// Bytes of RAM, without those that the guest says are in the balloon.
    pub memory_actual_size: u64,
    /// Its bounce windows, if it has them.
    pub iommu_bounce: Option<IommuBounce>,
    /// Its devices by ID, while it is booted.
    pub device_tree: BTreeMap<String, DeviceNode>,
    /// Reason why the last guest failed, with `--no-shutdown`, until the VM is booted again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// A device of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceNode {
    /// Its ID.
    pub id: String,
    /// Always empty.
    pub resources: Vec<BTreeMap<String, String>>,
    /// Always empty.
    pub children: Vec<String>,
    /// Where the guest sees it: segment, bus, device, function.
    pub pci_bdf: String,
}

/// A device that was added to a VM that is booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PciDeviceInfo {
    /// Its ID.
    pub id: String,
    /// Where the guest sees it: segment, bus, device, function.
    pub bdf: String,
}

/// Counters by device ID and name.
pub type VmCounters = BTreeMap<String, BTreeMap<String, u64>>;

/// A new size.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmResize {
    /// Number of vCPUs wanted, 1 to `max_vcpus`. While the VM is booted, those that are missing come, and the guest is asked to let go of the
    /// last ones of those that are too many.
    pub desired_vcpus: Option<u32>,
    /// Bytes of RAM wanted. While the VM is booted it can grow by up to `hotplug_size` in steps of 128 MiB, and does not shrink.
    pub desired_ram: Option<u64>,
    /// Bytes of the balloon wanted, of a VM that has one: those that the guest is to give back. Otherwise 0.
    pub desired_balloon: Option<u64>,
}

/// A new size of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmResizeDisk {
    /// Its ID.
    pub id: String,
    /// Bytes wanted, a multiple of its blocks. Of a block device, and of a disk that is read-only, as many as the image has by now.
    pub desired_size: u64,
}

/// The device to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmRemoveDevice {
    /// Its ID.
    pub id: String,
}

/// Bounce windows: what they may use and do use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounce {
    /// Bytes that all windows together may use.
    pub budget: u64,
    /// How far the budget can be raised, in bytes.
    pub max: u64,
    /// Bytes at or below which the guest is advised to bounce a DMA; 0 leaves it to the guest.
    #[schema(value_type = u64, maximum = 4_294_967_295_u64)]
    pub threshold: u32,
    /// The most bytes of RAM that the guest may have mapped beside the windows; `null` without a limit.
    pub max_mapped: Option<u64>,
    /// Bytes of a chunk.
    pub chunk_size: u64,
    /// Whether chunks are huge pages of the host.
    pub hugepages: bool,
    /// Bytes of window memory that the host has allocated, with what is kept ready.
    pub held_bytes: u64,
    /// Windows of all domains, while the VM is booted.
    pub windows: Vec<BounceWindow>,
    /// Figures of the virtio-iommu, while the VM is booted, named as in `vm.counters`.
    pub counters: BTreeMap<String, u64>,
}

/// Bounce windows with all figures of the virtio-iommu, which are there while the VM is booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounceReport {
    /// What they may use and do use.
    #[serde(flatten)]
    pub bounce: IommuBounce,
    /// How long requests took, by kind, with the host's part of it.
    pub request_latency: BTreeMap<String, Latency>,
    /// How long calls to the host's IOMMU took, by call. One in eight is timed.
    pub host_latency: BTreeMap<String, Latency>,
    /// Domains that exist.
    pub domains: Vec<DomainFigures>,
    /// Devices behind the virtio-iommu.
    pub endpoints: Vec<EndpointFigures>,
}

/// How long things took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// How many there were.
    pub count: u64,
    /// Nanoseconds over all.
    pub sum_ns: u64,
    /// Nanoseconds of the longest.
    pub max_ns: u64,
    /// How many took how long, the shortest first; without what nothing took.
    pub buckets: Vec<LatencyBucket>,
}

/// Those of a [`Latency`] that took longer than the ones of the bucket before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBucket {
    /// Nanoseconds that they took at most.
    pub up_to_ns: u64,
    /// How many.
    pub count: u64,
}

/// Figures of a domain, since it exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DomainFigures {
    /// The domain, as the guest numbers it.
    pub domain: u32,
    /// Whether its devices reach all RAM.
    pub bypass: bool,
    /// Devices in the domain, by where the guest sees them.
    pub endpoints: Vec<String>,
    /// Address spaces of the host that hold what it maps.
    pub address_spaces: u64,
    /// Mappings that exist.
    pub mappings: u64,
    /// Bytes of RAM that they map.
    pub mapped_bytes: u64,
    /// Bytes of its window.
    pub window_bytes: u64,
    /// Requests for it, by kind.
    pub requests: BTreeMap<String, u64>,
    /// Of these, the ones that were not answered with OK.
    pub failed: BTreeMap<String, u64>,
    /// How long they took.
    pub latency: Latency,
}

/// Figures of a device behind the virtio-iommu.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointFigures {
    /// Where the guest sees it.
    pub address: String,
    /// The domain that it is attached to.
    pub domain: Option<u32>,
    /// Whether it reaches all RAM.
    pub bypass: bool,
    /// Bytes of RAM that it reaches.
    pub mapped_bytes: u64,
    /// Bytes of windows that it reaches, parked chunks included.
    pub window_bytes: u64,
    /// Of these, the parked ones: no domain's, as its domain ended, and kept mapped for the next one after a reset of the VM.
    pub parked_bytes: u64,
    /// Bytes that this keeps the host from moving or giving to others: both together.
    pub pinned_bytes: u64,
    /// Requests that named it, by kind: ATTACH, DETACH and PROBE.
    pub requests: BTreeMap<String, u64>,
    /// Of these, the ones that were not answered with OK.
    pub failed: BTreeMap<String, u64>,
    /// How long they took.
    pub latency: Latency,
}

/// The window of one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BounceWindow {
    /// The domain, as the guest numbers it.
    pub domain: u32,
    /// Devices in the domain, by where the guest sees them.
    pub endpoints: Vec<String>,
    /// Chunks that its devices may only read.
    pub read_chunks: u64,
    /// Chunks that its devices may only write.
    pub write_chunks: u64,
    /// Chunks that its devices may read and write.
    pub read_write_chunks: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// What to change of the bounce windows; what is left out stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounceChange {
    /// Bytes that all windows together may use: a positive multiple of the chunk size, at most `max`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 2_097_152, multiple_of = 2_097_152)]
    pub budget: Option<u64>,
    /// Bytes at or below which the guest is advised to bounce a DMA; 0 leaves it to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold: Option<u32>,
    /// The most bytes of RAM that the guest may have mapped beside the windows, a multiple of 4096; 0 lifts the limit. Where more is mapped, that
    /// stays, and requests that map get NOMEM until it is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(multiple_of = 4096)]
    pub max_mapped: Option<u64>,
}

impl IommuBounceChange {
    /// Makes the change in `config`, or leaves it as it was.
    ///
    /// # Errors
    /// The budget or the limit is none that can be, or there are no windows.
    pub fn apply(&self, config: &mut IommuBounceConfig) -> Result<(), ConfigError> {
        let max_mapped = self.max_mapped.filter(|bytes| *bytes != 0);
        if let Some(rule) = max_mapped.and_then(IommuBounceConfig::mapped_rule) {
            return Err(ConfigError::new(Field::only("max_mapped"), rule));
        }
        for (field, change) in [("budget", self.budget), ("threshold", self.threshold.map(u64::from))] {
            ensure(
                change.is_none() || config.has_windows(),
                Field::only(field),
                || "the VM has no bounce windows: it was created with a size of 0",
            )?;
        }
        if let Some(budget) = self.budget {
            let (field, max) = (Field::only("budget"), config.max);
            ensure(budget != 0 && budget.is_multiple_of(CHUNK_SIZE), field, || {
                format!("{budget} bytes are no positive multiple of {}M", CHUNK_SIZE / MIB)
            })?;
            ensure(budget <= max, field, || {
                format!("{budget} bytes are more than max, the {max} bytes that the VM was created with")
            })?;
            config.size = budget;
        }
        if let Some(threshold) = self.threshold {
            config.threshold = Some(threshold).filter(|bytes| *bytes != 0);
        }
        if self.max_mapped.is_some() {
            config.max_mapped = max_mapped;
        }
        Ok(())
    }
}

impl VmResizeDisk {
    /// [`Self::desired_size`].
    pub const DESIRED_SIZE: Field = Field::only("desired_size");
}

impl VmResize {
    /// [`Self::desired_vcpus`].
    pub const DESIRED_VCPUS: Field = Field::only("desired_vcpus");
    /// [`Self::desired_ram`].
    pub const DESIRED_RAM: Field = Field::only("desired_ram");
    /// [`Self::desired_balloon`].
    pub const DESIRED_BALLOON: Field = Field::only("desired_balloon");

    /// By how many bytes RAM is to grow in a VM that is booted and has `config`, to which `added` came since.
    ///
    /// # Errors
    /// It is to shrink, to grow by no whole steps, or by more than there is room for.
    pub fn more_ram(&self, config: &MemoryConfig, added: u64) -> Result<u64, ConfigError> {
        let (has, wanted) = (config.total(), self.desired_ram.unwrap_or(config.total()));
        ensure(wanted >= has, Self::DESIRED_RAM, || {
            format!("{wanted} bytes are less than the {has} that the guest has, which it keeps while it runs")
        })?;
        let (more, step) = (wanted - has, HOTPLUG_GRANULE >> 20);
        ensure(more.is_multiple_of(HOTPLUG_GRANULE), Self::DESIRED_RAM, || {
            format!("{wanted} bytes are not the {has} that the guest has and a multiple of {step}M more")
        })?;
        let room = config.hotplug_size.saturating_sub(added);
        ensure(more <= room, Self::DESIRED_RAM, || {
            let field = MemoryConfig::HOTPLUG_SIZE.name(Terms::Json);
            format!("{wanted} bytes are {more} more than the guest has, and {field} leaves {room}")
        })?;
        Ok(more)
    }

    /// Makes the change in `config`, to be checked as a whole.
    ///
    /// # Errors
    /// There cannot be so many vCPUs, or no such balloon.
    pub fn apply(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        let memory = self.desired_ram.unwrap_or(config.memory.total());
        match (self.desired_balloon, &mut config.balloon) {
            (Some(bytes), Some(_)) if !bytes.is_multiple_of(4096) || bytes > memory => {
                let rule = format!("{bytes} bytes are no multiple of 4096 up to the {memory} of RAM");
                return Err(ConfigError::new(Self::DESIRED_BALLOON, rule));
            }
            (Some(bytes), Some(balloon)) => balloon.size = bytes,
            (Some(1..), None) => {
                return Err(ConfigError::new(Self::DESIRED_BALLOON, "must be 0: the VM has no balloon"));
            }
            (Some(0) | None, _) => {}
        }
        if let Some(vcpus) = self.desired_vcpus {
            let most = config.cpus.max_vcpus;
            ensure((1..=most).contains(&vcpus), Self::DESIRED_VCPUS, || {
                format!("{vcpus} is not in 1 to {most} ({})", CpusConfig::MAX.name(Terms::Json))
            })?;
            config.cpus.boot_vcpus = vcpus;
        }
        if let Some(bytes) = self.desired_ram.filter(|bytes| *bytes != config.memory.total()) {
            ensure(config.memory.zones.is_empty(), Self::DESIRED_RAM, || {
                format!("RAM is made of zones, which keep their sizes ({})", MemoryConfig::ZONES.name(Terms::Json))
            })?;
            config.memory.size = bytes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> IommuBounceConfig {
        let bounce: IommuBounceConfig = "".parse().unwrap();
        IommuBounceConfig { size: 8 << 20, max: 64 << 20, threshold: None, max_mapped: Some(4096), ..bounce }
    }

    #[test]
    fn change_that_breaks_a_rule_changes_nothing() {
        for budget in [0, 1, (2 << 20) + 1, 66 << 20, u64::MAX] {
            let mut changed = config();
            let wanted = IommuBounceChange { budget: Some(budget), threshold: Some(5), max_mapped: Some(8192) };
            let error = wanted.apply(&mut changed).unwrap_err().to_string();
            assert!(error.starts_with("budget: "), "{error}");
            assert_eq!(changed, config());
        }
        for max_mapped in [1, 4097, 1 << 63, u64::MAX] {
            let mut changed = config();
            let wanted =
                IommuBounceChange { budget: Some(4 << 20), max_mapped: Some(max_mapped), ..Default::default() };
            let error = wanted.apply(&mut changed).unwrap_err().to_string();
            assert!(
                error.starts_with("max_mapped: ") && error.contains("no positive multiple of 4096 up to"),
                "{error}"
            );
            assert_eq!(changed, config());
        }
    }

    #[test]
    fn max_mapped_changes_without_windows_and_zero_lifts_it() {
        let mut changed = IommuBounceConfig { size: 0, max: 0, ..config() };
        IommuBounceChange { max_mapped: Some(1 << 20), ..Default::default() }.apply(&mut changed).unwrap();
        assert_eq!(changed.max_mapped, Some(1 << 20));
        IommuBounceChange::default().apply(&mut changed).unwrap();
        assert_eq!(changed.max_mapped, Some(1 << 20));
        IommuBounceChange { max_mapped: Some(0), ..Default::default() }.apply(&mut changed).unwrap();
        assert_eq!(changed.max_mapped, None);
        let windows = IommuBounceChange { threshold: Some(0), ..Default::default() };
        let refused = windows.apply(&mut changed).unwrap_err().to_string();
        assert_eq!(refused, "threshold: the VM has no bounce windows: it was created with a size of 0");
    }

    #[test]
    fn threshold_of_zero_is_left_to_the_guest() {
        let mut changed = config();
        IommuBounceChange { budget: Some(64 << 20), threshold: Some(4096), ..Default::default() }
            .apply(&mut changed)
            .unwrap();
        assert_eq!((changed.size, changed.threshold), (64 << 20, Some(4096)));
        IommuBounceChange { threshold: Some(0), ..Default::default() }.apply(&mut changed).unwrap();
        assert_eq!((changed.size, changed.threshold), (64 << 20, None));
    }

    #[test]
    fn ram_of_a_guest_grows_in_steps_within_its_room() {
        let config = MemoryConfig { hotplug_size: 512 << 20, ..MemoryConfig::with_size(1 << 30) };
        let more = |wanted: u64, added| {
            let resize = VmResize { desired_ram: Some(wanted), ..VmResize::default() };
            resize.more_ram(&config, added).map_err(|error| error.to_string())
        };
        assert_eq!([more(1 << 30, 0), more((1 << 30) + (512 << 20), 0)], [Ok(0), Ok(512 << 20)]);
        assert_eq!(VmResize::default().more_ram(&config, 0), Ok(0));
        let shrink = "desired_ram: 536870912 bytes are less than the 1073741824 that the guest has, which it keeps while it runs";
        assert_eq!(more(1 << 29, 0), Err(shrink.into()));
        assert!(more((1 << 30) + (64 << 20), 0).unwrap_err().ends_with("and a multiple of 128M more"));
        let full = "desired_ram: 1342177280 bytes are 268435456 more than the guest has, and memory.hotplug_size leaves 134217728";
        assert_eq!(more(1280 << 20, 384 << 20), Err(full.into()));
    }

    #[test]
    fn zones_keep_their_sizes() {
        let zones = vec!["id=a,size=64M".parse().unwrap()];
        let mut vm =
            VmConfig { memory: MemoryConfig { size: 0, zones, ..MemoryConfig::default() }, ..VmConfig::default() };
        let to = |mib: u64| VmResize { desired_ram: Some(mib << 20), ..VmResize::default() };
        let refused = to(128).apply(&mut vm).unwrap_err().to_string();
        assert_eq!(refused, "desired_ram: RAM is made of zones, which keep their sizes (memory.zones)");
        assert_eq!((to(64).apply(&mut vm), to(64).more_ram(&vm.memory, 0)), (Ok(()), Ok(0)));
        assert_eq!(vm.memory.total(), 64 << 20);
        assert!(to(192).more_ram(&vm.memory, 0).unwrap_err().to_string().contains("memory.hotplug_size leaves 0"));
    }

    #[test]
    fn size_is_changed_where_it_is_given() {
        let mut vm = VmConfig { cpus: CpusConfig { max_vcpus: 4, ..CpusConfig::default() }, ..VmConfig::default() };
        VmResize { desired_vcpus: Some(3), ..VmResize::default() }.apply(&mut vm).unwrap();
        assert_eq!((vm.cpus.boot_vcpus, vm.cpus.max_vcpus, vm.memory.size), (3, 4, 512 << 20));
        VmResize { desired_ram: Some(64 << 20), ..VmResize::default() }.apply(&mut vm).unwrap();
        assert_eq!((vm.cpus.boot_vcpus, vm.memory.size), (3, 64 << 20));
        for vcpus in [0, 5, u32::MAX] {
            let refused = VmResize { desired_vcpus: Some(vcpus), ..VmResize::default() }.apply(&mut vm).unwrap_err();
            assert_eq!(refused.to_string(), format!("desired_vcpus: {vcpus} is not in 1 to 4 (cpus.max_vcpus)"));
        }
        let balloon = |bytes| VmResize { desired_balloon: Some(bytes), ..VmResize::default() };
        assert_eq!(balloon(0).apply(&mut vm), Ok(()));
        assert!(balloon(4096).apply(&mut vm).unwrap_err().to_string().ends_with("the VM has no balloon"));
        vm.balloon = Some("size=0".parse().unwrap());
        balloon(32 << 20).apply(&mut vm).unwrap();
        assert_eq!(vm.balloon.as_ref().unwrap().size, 32 << 20);
        for bytes in [4097, 65 << 20] {
            let refused = balloon(bytes).apply(&mut vm).unwrap_err().to_string();
            assert_eq!(
                refused,
                format!("desired_balloon: {bytes} bytes are no multiple of 4096 up to the 67108864 of RAM")
            );
        }
    }
}
