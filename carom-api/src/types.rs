// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Types of requests and answers, in Cloud Hypervisor's terms. The configuration is in [`crate::vm_config`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{CpusConfig, MemoryConfig};
use crate::error::{ConfigError, ensure};
use crate::field::{Field, Terms};
use crate::info_form;
use crate::kinds::IommuBounceConfig;
use crate::limits::{CHUNK_SIZE, HOTPLUG_GRANULE, MIB};
use crate::vm_config::VmConfig;

/// Description of the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmmPing {
    /// Version, with build information.
    pub build_version: String,
    /// Version.
    pub version: String,
    /// Process ID.
    pub pid: u32,
    /// Features that the VMM was built with.
    pub features: Vec<String>,
}

/// State of a VM. `Created` means that the VM has a configuration, but was not booted yet or its guest has ended. `Shutdown` is never
/// reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum VmState {
    /// The VM has a configuration, but was not booted yet or its guest has ended.
    Created,
    /// The guest runs.
    Running,
    /// The vCPUs are stopped. DMA of passed-through devices continues.
    Paused,
    /// Never reported. The state exists because Cloud Hypervisor's clients know it. A VM whose guest has ended is `Created`
    /// again.
    Shutdown,
}

/// Description of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmInfo {
    /// Configuration with all defaults filled in. Unsupported fields of Cloud Hypervisor have their neutral value, which requests no
    /// feature, such as `"iommu": false`.
    #[serde(serialize_with = "info_form::serialize")]
    pub config: VmConfig,
    /// State of the VM.
    pub state: VmState,
    /// Bytes of RAM, without the bytes that the guest reports to be in the balloon.
    pub memory_actual_size: u64,
    /// Bounce windows, if the VM has any.
    pub iommu_bounce: Option<IommuBounce>,
    /// Devices by ID. Empty unless the VM is booted.
    pub device_tree: BTreeMap<String, DeviceNode>,
    /// Reason why the last guest failed. Only reported with `--no-shutdown`, and until the VM is booted again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Device of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceNode {
    /// ID of the device.
    pub id: String,
    /// Always empty.
    pub resources: Vec<BTreeMap<String, String>>,
    /// Always empty.
    pub children: Vec<String>,
    /// PCI address in the guest: segment, bus, device, function.
    pub pci_bdf: String,
}

/// Device that was added to a booted VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PciDeviceInfo {
    /// ID of the device.
    pub id: String,
    /// PCI address in the guest: segment, bus, device, function.
    pub bdf: String,
}

/// Counters by device ID and counter name.
pub type VmCounters = BTreeMap<String, BTreeMap<String, u64>>;

/// Change of a VM's vCPUs, RAM and balloon. Omitted fields keep their values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmResize {
    /// Wanted number of vCPUs, 1 to `max_vcpus`. In a booted VM, missing vCPUs are hot-plugged, and the VMM asks the guest to release the
    /// surplus vCPUs, which have the highest numbers.
    pub desired_vcpus: Option<u32>,
    /// Wanted size of the RAM in bytes. The RAM of a booted VM can grow by up to `hotplug_size`, in steps of 128 MiB, but cannot shrink.
    pub desired_ram: Option<u64>,
    /// Wanted size of the balloon in bytes. The guest returns this memory to the host. Must be 0 if the VM has no balloon.
    pub desired_balloon: Option<u64>,
}

/// New size of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmResizeDisk {
    /// ID of the disk.
    pub id: String,
    /// Wanted size in bytes, a multiple of the disk's block size. For a block device or a read-only disk, the wanted size must be the
    /// current size of the image.
    pub desired_size: u64,
}

/// Device to remove.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmRemoveDevice {
    /// ID of the device.
    pub id: String,
}

/// Limits and usage of the bounce windows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounce {
    /// Maximum bytes of all windows together.
    pub budget: u64,
    /// Maximum budget that can be set, in bytes.
    pub max: u64,
    /// Maximum bytes of a DMA that the guest is advised to bounce. 0 leaves the decision to the guest.
    #[schema(value_type = u64, maximum = 4_294_967_295_u64)]
    pub threshold: u32,
    /// Maximum bytes of a DMA that the guest is advised to bounce if the device writes the memory. 0 stands for `threshold`.
    #[schema(value_type = u64, maximum = 4_294_967_295_u64)]
    pub threshold_write: u32,
    /// Maximum bytes of RAM that the guest can map for devices, not counting the windows. `null` means no limit.
    pub max_mapped: Option<u64>,
    /// Bytes of a chunk.
    pub chunk_size: u64,
    /// True if chunks are huge pages of the host.
    pub hugepages: bool,
    /// Bytes of window memory that the host has allocated, including memory that is kept for later use.
    pub held_bytes: u64,
    /// Windows of all domains. Empty unless the VM is booted.
    pub windows: Vec<BounceWindow>,
    /// Counters of the virtio-iommu by name. Empty unless the VM is booted. `vm.counters` uses the same names.
    pub counters: BTreeMap<String, u64>,
}

/// Bounce windows and all figures of the virtio-iommu. The figures exist only while the VM is booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounceReport {
    /// Limits and usage of the windows.
    #[serde(flatten)]
    pub bounce: IommuBounce,
    /// Duration of virtio-iommu requests, by kind of request. The duration includes calls to the host's IOMMU.
    pub request_latency: BTreeMap<String, Latency>,
    /// Duration of calls to the host's IOMMU, by kind of call. One in eight calls is timed.
    pub host_latency: BTreeMap<String, Latency>,
    /// Existing domains.
    pub domains: Vec<DomainFigures>,
    /// Devices behind the virtio-iommu.
    pub endpoints: Vec<EndpointFigures>,
}

/// Distribution of durations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Number of events.
    pub count: u64,
    /// Total nanoseconds of all events.
    pub sum_ns: u64,
    /// Nanoseconds of the longest event.
    pub max_ns: u64,
    /// Buckets of events by duration, shortest first. Empty buckets are omitted.
    pub buckets: Vec<LatencyBucket>,
}

/// Events of a [`Latency`] that took longer than the limit of the previous bucket, and at most `up_to_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBucket {
    /// Maximum nanoseconds of an event in this bucket.
    pub up_to_ns: u64,
    /// Number of events.
    pub count: u64,
}

/// Figures of a domain, counted since the domain was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DomainFigures {
    /// Domain ID that the guest chose.
    pub domain: u32,
    /// True if the domain's devices can access all RAM (bypass).
    pub bypass: bool,
    /// Devices in the domain, by their PCI address in the guest.
    pub endpoints: Vec<String>,
    /// Number of host address spaces that hold the domain's mappings.
    pub address_spaces: u64,
    /// Number of existing mappings.
    pub mappings: u64,
    /// Bytes of RAM that these mappings cover.
    pub mapped_bytes: u64,
    /// Bytes of the domain's window.
    pub window_bytes: u64,
    /// Number of requests for the domain, by kind of request.
    pub requests: BTreeMap<String, u64>,
    /// Number of these requests that were not answered with OK, by kind of request.
    pub failed: BTreeMap<String, u64>,
    /// Duration of these requests.
    pub latency: Latency,
}

/// Figures of a device behind the virtio-iommu.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointFigures {
    /// PCI address in the guest.
    pub address: String,
    /// Domain that the device is attached to.
    pub domain: Option<u32>,
    /// True if the device can access all RAM (bypass).
    pub bypass: bool,
    /// Bytes of RAM that the device can access.
    pub mapped_bytes: u64,
    /// Bytes of windows that the device can access, including parked chunks.
    pub window_bytes: u64,
    /// Bytes of parked chunks among `window_bytes`. A parked chunk belonged to a domain that ended with a reset of the VM. The chunk stays
    /// mapped, so that the next domain can use it.
    pub parked_bytes: u64,
    /// Bytes that the host kernel has pinned for the device: the sum of `mapped_bytes` and `window_bytes`, or 0 if the device is not
    /// a host device.
    pub pinned_bytes: u64,
    /// Number of requests that named the device, by kind of request: ATTACH, DETACH and PROBE.
    pub requests: BTreeMap<String, u64>,
    /// Number of these requests that were not answered with OK, by kind of request.
    pub failed: BTreeMap<String, u64>,
    /// Duration of these requests.
    pub latency: Latency,
}

/// Bounce window of one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BounceWindow {
    /// Domain ID that the guest chose.
    pub domain: u32,
    /// Devices in the domain, by their PCI address in the guest.
    pub endpoints: Vec<String>,
    /// Chunks that the domain's devices may only read.
    pub read_chunks: u64,
    /// Chunks that the domain's devices may only write.
    pub write_chunks: u64,
    /// Chunks that the domain's devices may read and write.
    pub read_write_chunks: u64,
    /// Bytes of all chunks.
    pub bytes: u64,
}

/// Change of the limits of bounce windows and of other mappings. Omitted fields keep their values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounceChange {
    /// Maximum bytes of all windows together: a positive multiple of the chunk size, at most `max`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 2_097_152, multiple_of = 2_097_152)]
    pub budget: Option<u64>,
    /// Maximum bytes of a DMA that the guest is advised to bounce. 0 leaves the decision to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold: Option<u32>,
    /// Maximum bytes of a DMA that the guest is advised to bounce if the device writes the memory. 0 stands for `threshold`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold_write: Option<u32>,
    /// Maximum bytes of RAM that the guest can map for devices, not counting the windows: a multiple of 4096, or 0 for no limit. If
    /// existing mappings exceed the limit, they stay, and further MAP requests fail with NOMEM until the mapped bytes are below the limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(multiple_of = 4096)]
    pub max_mapped: Option<u64>,
}

impl IommuBounceChange {
    /// Applies the change to `config`. On an error, `config` is unchanged.
    ///
    /// # Errors
    /// A value is invalid, or a limit of windows is changed although the VM has no windows.
    pub fn apply(&self, config: &mut IommuBounceConfig) -> Result<(), ConfigError> {
        let max_mapped = self.max_mapped.filter(|bytes| *bytes != 0);
        if let Some(rule) = max_mapped.and_then(IommuBounceConfig::mapped_rule) {
            return Err(ConfigError::new(Field::only("max_mapped"), rule));
        }
        for (field, change) in [
            ("budget", self.budget),
            ("threshold", self.threshold.map(u64::from)),
            ("threshold_write", self.threshold_write.map(u64::from)),
        ] {
            ensure(
                change.is_none() || config.has_windows(),
                Field::only(field),
                || "the VM has no bounce windows: create the VM with an iommu_bounce.size above 0",
            )?;
        }
        if let Some(budget) = self.budget {
            let (field, max) = (Field::only("budget"), config.max);
            ensure(budget != 0 && budget.is_multiple_of(CHUNK_SIZE), field, || {
                format!("is {budget} bytes, but must be a multiple of {0}M and at least {0}M", CHUNK_SIZE / MIB)
            })?;
            ensure(budget <= max, field, || {
                format!("{budget} bytes exceed the {max} bytes of iommu_bounce.max, with which the VM was created")
            })?;
            config.size = budget;
        }
        if let Some(threshold) = self.threshold {
            config.threshold = Some(threshold).filter(|bytes| *bytes != 0);
        }
        if let Some(threshold) = self.threshold_write {
            config.threshold_write = Some(threshold).filter(|bytes| *bytes != 0);
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

    /// Returns the bytes of RAM to hot-plug into a booted VM. `config` is the configuration of the VM's RAM, and `added` is the number of
    /// bytes that were hot-plugged before.
    ///
    /// # Errors
    /// The RAM would shrink, the growth is not a multiple of the step, or the growth exceeds the remaining `hotplug_size`.
    pub fn more_ram(&self, config: &MemoryConfig, added: u64) -> Result<u64, ConfigError> {
        let (has, wanted) = (config.total(), self.desired_ram.unwrap_or(config.total()));
        ensure(wanted >= has, Self::DESIRED_RAM, || {
            format!(
                "{wanted} bytes are less than the guest's {has} bytes: the RAM of a running guest cannot shrink, but a balloon can take RAM back"
            )
        })?;
        let (more, step) = (wanted - has, HOTPLUG_GRANULE >> 20);
        ensure(more.is_multiple_of(HOTPLUG_GRANULE), Self::DESIRED_RAM, || {
            format!("{wanted} bytes exceed the guest's {has} bytes by {more} bytes, which is not a multiple of {step}M")
        })?;
        let room = config.hotplug_size.saturating_sub(added);
        ensure(more <= room, Self::DESIRED_RAM, || {
            let field = MemoryConfig::HOTPLUG_SIZE.name(Terms::Json);
            format!(
                "{wanted} bytes would add {more} bytes to the guest's RAM, but {field} leaves room for only {room} bytes"
            )
        })?;
        Ok(more)
    }

    /// Applies the change to `config`. The caller must then check the whole configuration.
    ///
    /// # Errors
    /// A number is out of range, or the VM has no balloon.
    pub fn apply(&self, config: &mut VmConfig) -> Result<(), ConfigError> {
        let memory = self.desired_ram.unwrap_or(config.memory.total());
        match (self.desired_balloon, &mut config.balloon) {
            (Some(bytes), Some(_)) if !bytes.is_multiple_of(4096) || bytes > memory => {
                let rule =
                    format!("is {bytes} bytes, but must be a multiple of 4096 and at most {memory}, the VM's RAM");
                return Err(ConfigError::new(Self::DESIRED_BALLOON, rule));
            }
            (Some(bytes), Some(balloon)) => balloon.size = bytes,
            (Some(1..), None) => {
                return Err(ConfigError::new(Self::DESIRED_BALLOON, "must be 0 or left out: the VM has no balloon"));
            }
            (Some(0) | None, _) => {}
        }
        if let Some(vcpus) = self.desired_vcpus {
            let most = config.cpus.max_vcpus;
            ensure((1..=most).contains(&vcpus), Self::DESIRED_VCPUS, || {
                format!("{vcpus} is not between 1 and {most} ({})", CpusConfig::MAX.name(Terms::Json))
            })?;
            config.cpus.boot_vcpus = vcpus;
        }
        if let Some(bytes) = self.desired_ram.filter(|bytes| *bytes != config.memory.total()) {
            ensure(config.memory.zones.is_empty(), Self::DESIRED_RAM, || {
                format!(
                    "the RAM consists of zones, which cannot be resized ({}): create the VM without zones",
                    MemoryConfig::ZONES.name(Terms::Json)
                )
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
            let wanted = IommuBounceChange {
                budget: Some(budget),
                threshold: Some(5),
                threshold_write: Some(6),
                max_mapped: Some(8192),
            };
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
                error.starts_with("max_mapped: ") && error.contains("must be a multiple of 4096 from 4096 to"),
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
        assert_eq!(refused, "threshold: the VM has no bounce windows: create the VM with an iommu_bounce.size above 0");
        let windows = IommuBounceChange { threshold_write: Some(0), ..Default::default() };
        let refused = windows.apply(&mut changed).unwrap_err().to_string();
        assert!(refused.starts_with("threshold_write: the VM has no bounce windows"), "{refused}");
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
    fn each_threshold_changes_alone_and_zero_resets_it() {
        let mut changed = config();
        let mut change = |threshold, threshold_write| {
            IommuBounceChange { threshold, threshold_write, ..Default::default() }.apply(&mut changed).unwrap();
            (changed.threshold, changed.threshold_write)
        };
        assert_eq!(change(Some(8192), Some(4096)), (Some(8192), Some(4096)));
        assert_eq!(change(None, Some(1024)), (Some(8192), Some(1024)));
        assert_eq!(change(Some(2048), None), (Some(2048), Some(1024)));
        assert_eq!(change(None, Some(0)), (Some(2048), None));
    }

    #[test]
    fn ram_grows_in_steps_up_to_the_hotplug_size() {
        let config = MemoryConfig { hotplug_size: 512 << 20, ..MemoryConfig::with_size(1 << 30) };
        let more = |wanted: u64, added| {
            let resize = VmResize { desired_ram: Some(wanted), ..VmResize::default() };
            resize.more_ram(&config, added).map_err(|error| error.to_string())
        };
        assert_eq!([more(1 << 30, 0), more((1 << 30) + (512 << 20), 0)], [Ok(0), Ok(512 << 20)]);
        assert_eq!(VmResize::default().more_ram(&config, 0), Ok(0));
        let shrink = "desired_ram: 536870912 bytes are less than the guest's 1073741824 bytes: the RAM of a running guest cannot shrink, but a balloon can take RAM back";
        assert_eq!(more(1 << 29, 0), Err(shrink.into()));
        assert!(
            more((1 << 30) + (64 << 20), 0)
                .unwrap_err()
                .ends_with("by 67108864 bytes, which is not a multiple of 128M")
        );
        let full = "desired_ram: 1342177280 bytes would add 268435456 bytes to the guest's RAM, but memory.hotplug_size leaves room for only 134217728 bytes";
        assert_eq!(more(1280 << 20, 384 << 20), Err(full.into()));
    }

    #[test]
    fn zones_cannot_be_resized() {
        let zones = vec!["id=a,size=64M".parse().unwrap()];
        let mut vm =
            VmConfig { memory: MemoryConfig { size: 0, zones, ..MemoryConfig::default() }, ..VmConfig::default() };
        let to = |mib: u64| VmResize { desired_ram: Some(mib << 20), ..VmResize::default() };
        let refused = to(128).apply(&mut vm).unwrap_err().to_string();
        assert_eq!(
            refused,
            "desired_ram: the RAM consists of zones, which cannot be resized (memory.zones): create the VM without zones"
        );
        assert_eq!((to(64).apply(&mut vm), to(64).more_ram(&vm.memory, 0)), (Ok(()), Ok(0)));
        assert_eq!(vm.memory.total(), 64 << 20);
        assert!(
            to(192)
                .more_ram(&vm.memory, 0)
                .unwrap_err()
                .to_string()
                .contains("memory.hotplug_size leaves room for only 0")
        );
    }

    #[test]
    fn only_given_sizes_are_changed() {
        let mut vm = VmConfig { cpus: CpusConfig { max_vcpus: 4, ..CpusConfig::default() }, ..VmConfig::default() };
        VmResize { desired_vcpus: Some(3), ..VmResize::default() }.apply(&mut vm).unwrap();
        assert_eq!((vm.cpus.boot_vcpus, vm.cpus.max_vcpus, vm.memory.size), (3, 4, 512 << 20));
        VmResize { desired_ram: Some(64 << 20), ..VmResize::default() }.apply(&mut vm).unwrap();
        assert_eq!((vm.cpus.boot_vcpus, vm.memory.size), (3, 64 << 20));
        for vcpus in [0, 5, u32::MAX] {
            let refused = VmResize { desired_vcpus: Some(vcpus), ..VmResize::default() }.apply(&mut vm).unwrap_err();
            assert_eq!(refused.to_string(), format!("desired_vcpus: {vcpus} is not between 1 and 4 (cpus.max_vcpus)"));
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
                format!(
                    "desired_balloon: is {bytes} bytes, but must be a multiple of 4096 and at most 67108864, the VM's RAM"
                )
            );
        }
    }
}
