// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu with its bounce windows.

use std::ops::RangeInclusive;
use std::sync::Arc;

use carom_api::config::{IommuPoll, MemoryConfig};
use carom_api::kinds::{Aperture, Kind, KindConfig};
use carom_api::limits::CHUNK_SIZE;
use carom_api::{ConfigError, IommuBounceConfig, VmConfig};
use devices::pci::{PciAddress, PciDevice};
use devices::virtio::iommu::{self, IommuHandle, IommuParams, RingFeatures, WindowRegion};
use devices::worker::Role;
use iommu_bounce::{DmaMapper, EngineConfig, Limits, MapperLimits, WindowConfig};

use super::context::DeviceContext;
use super::mapper::EndpointMapper;
use super::{Part, common_limits};
use crate::arch::layout::{HIGH_MEMORY_START, MEMORY_DEVICE_GRANULE, MSI_WINDOW, PciHole};
use crate::machine::VmError;
use crate::memory;

/// Where the virtio-iommu sits.
pub const IOMMU_ADDRESS: PciAddress = PciAddress::on_root_bus(1);
/// Its kind.
pub(super) const KIND: &Kind = &IommuBounceConfig::KIND;
/// The threads that it runs.
pub(super) const ROLES: &[Role] = &[Role::IommuPoll, Role::WindowStash, Role::WindowReader, Role::DmaFaults];
/// What the virtio-iommu's queues can do.
const RING_FEATURES: RingFeatures = RingFeatures { indirect_desc: true, event_idx: true };

/// What it counts is asked of its handle: not all of it are numbers.
struct Iommu(Arc<dyn PciDevice>);

impl Part for Iommu {
    fn kind(&self) -> &'static Kind {
        KIND
    }

    fn function(&self) -> Arc<dyn PciDevice> {
        self.0.clone()
    }
}

/// Makes the virtio-iommu for `endpoints`: it promises the guest what all of their mappers can do.
pub(super) fn build(
    config: &VmConfig,
    endpoints: Vec<(PciAddress, Box<dyn EndpointMapper>)>,
    context: &DeviceContext,
) -> Result<(Box<dyn Part>, Arc<IommuHandle>), VmError> {
    let limits: Vec<MapperLimits> = endpoints.iter().map(|(_, mapper)| mapper.limits()).collect();
    let max_mapped_bytes = config.iommu_bounce.as_ref().and_then(|bounce| bounce.max_mapped).unwrap_or(u64::MAX);
    let bounce = config.iommu_bounce.as_ref().filter(|bounce| bounce.has_windows());
    let input_range = common_limits::input_range(&limits, config.platform.iommu_address_width_bits);
    let engine = EngineConfig {
        page_size_mask: common_limits::page_size_mask(&limits),
        input_range: input_range.clone(),
        msi_window: MSI_WINDOW,
        bypass: firmware_reads_a_disk(config),
        limits: Limits { max_table_pages: max_table_pages(config), max_mapped_bytes, ..Default::default() },
        window: bounce.map(|bounce| window(config, bounce, &input_range, &limits)).transpose()?,
        ..Default::default()
    };
    let windows = bounce.map(|bounce| WindowRegion {
        size: bounce.max,
        chunk_size: CHUNK_SIZE,
        hugepages: bounce.hugepages,
        slots: context.slots.clone(),
    });
    let params = IommuParams {
        id: IommuBounceConfig::ID.into(),
        memory: context.memory.clone(),
        msi: context.msi.clone(),
        engine,
        windows,
        poll: polls(config.platform.iommu_poll, config.cpus.boot_vcpus),
        rings: RING_FEATURES,
        // IOMMUFD maps no memory of devices.
        devices: (!config.platform.iommufd).then(|| context.bars.clone()),
        observer: Some(context.observer.clone()),
    };
    let (function, handle) = iommu::create(params).map_err(|error| VmError::Iommu(error.to_string()))?;
    for (address, mapper) in endpoints {
        connect(&handle, address, mapper)?;
    }
    Ok((Box::new(Iommu(function)), handle))
}

/// Pages of the host's page tables for each address space. Drivers take IOVAs below 4 GiB first, which is 2048 pages of the lowest
/// level and some of others; windows above have 256. Beyond, what they have mapped at once and what their allocators keep apart is less than
/// twice the RAM.
fn max_table_pages(config: &VmConfig) -> u64 {
    /// What one page of the lowest level translates.
    const REACH: u64 = 2 << 20;
    2560 + config.memory.total().saturating_add(config.memory.hotplug_size) / REACH * 2
}

/// Whether firmware, which has no driver of a virtio-iommu, has to read a disk behind it. Then endpoints that are attached to nothing reach
/// all RAM until a driver attaches them, or writes 0 to `bypass`.
fn firmware_reads_a_disk(config: &VmConfig) -> bool {
    config.payload.firmware.is_some() && config.disks.iter().any(KindConfig::is_behind_iommu)
}

/// Puts the device at `address` behind `iommu`.
pub(super) fn connect(
    iommu: &IommuHandle,
    address: PciAddress,
    mapper: Box<dyn EndpointMapper>,
) -> Result<(), VmError> {
    mapper.connect(iommu);
    let added = iommu.add_endpoint(address.endpoint_id(), mapper as Box<dyn DmaMapper>);
    added.map_err(|error| VmError::Iommu(format!("device at {address}: {error}")))
}

/// Whether a thread may poll for requests of so many vCPUs. Where it would take a CPU from a vCPU, it could keep that one waiting.
pub(super) fn polls(poll: IommuPoll, vcpus: u32) -> bool {
    let vcpus = usize::try_from(vcpus).unwrap_or(usize::MAX);
    match poll {
        IommuPoll::On => true,
        IommuPoll::Off => false,
        IommuPoll::Auto => std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > vcpus),
    }
}

fn window(
    config: &VmConfig,
    bounce: &IommuBounceConfig,
    input_range: &RangeInclusive<u64>,
    limits: &[MapperLimits],
) -> Result<WindowConfig, VmError> {
    let PciHole { aperture: hole, .. } = PciHole::of(config.payload.firmware.is_some());
    let behind = behind_ram(&config.memory);
    let low = || common_limits::window_aperture(&hole, limits);
    let (end, size) = (*input_range.end(), hole.end() - hole.start() + 1);
    let high = || (behind <= end).then(|| common_limits::first_aperture(&(behind..=end), size, limits)).flatten();
    let (aperture, asked) = match bounce.aperture {
        Aperture::Auto => (
            low().or_else(high),
            format!("from {:#x} to {:#x}, nor behind RAM; leave it out", hole.start(), hole.end()),
        ),
        Aperture::Low => {
            (low(), format!("from {:#x} to {:#x}; try aperture=high, or leave it out", hole.start(), hole.end()))
        }
        Aperture::High => (high(), format!("at {behind:#x} or behind; try aperture=low, or leave it out")),
    };
    let aperture = aperture.ok_or_else(|| {
        let rule = format!(
            "the host's IOMMU, or memory of the host's that a device shares its IOMMU group with, leaves no room for bounce windows {asked}"
        );
        ConfigError::new(IommuBounceConfig::OPTION, rule)
    })?;
    if bounce.aperture == Aperture::Auto && *aperture.start() >= HIGH_MEMORY_START {
        let start = aperture.start();
        log::warn!(
            "the host leaves no room for bounce windows below 4 GiB: they start at {start:#x}, for guests that know such"
        );
    }
    Ok(WindowConfig { aperture, budget: bounce.size, threshold: bounce.threshold.unwrap_or(0) })
}

/// First address above 4 GiB that no RAM has, nor will have.
fn behind_ram(memory: &MemoryConfig) -> u64 {
    let end = memory::end(memory.total()).next_multiple_of(MEMORY_DEVICE_GRANULE).saturating_add(memory.hotplug_size);
    end.max(HIGH_MEMORY_START)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_firmware_with_a_disk_behind_the_iommu_needs_bypass() {
        let bypass = |json: &str| {
            let config: VmConfig = serde_json::from_str(json).unwrap();
            firmware_reads_a_disk(&config)
        };
        assert!(bypass(r#"{"payload": {"firmware": "/f"}, "disks": [{"path": "/a"}, {"path": "/b", "iommu": true}]}"#));
        assert!(!bypass(
            r#"{"payload": {"firmware": "/f"}, "disks": [{"path": "/a"}], "rng": {"src": "/r", "iommu": true}}"#
        ));
        assert!(!bypass(r#"{"payload": {"kernel": "/k"}, "disks": [{"path": "/a", "iommu": true}]}"#));
    }

    #[test]
    fn windows_are_above_4_gib_where_the_host_leaves_no_room_below_or_they_are_asked_to_be() {
        let config: VmConfig = serde_json::from_str(
            r#"{"payload": {"kernel": "/k"}, "memory": {"size": 8589934592, "hotplug_size": 1073741824}}"#,
        )
        .unwrap();
        let start = |option: &str, ranges: &[RangeInclusive<u64>]| {
            let bounce: IommuBounceConfig = option.parse().unwrap();
            let limits = MapperLimits { page_size_mask: !0xfff, iova_ranges: ranges.to_vec(), max_mappings: None };
            let limits = [limits];
            let input_range = common_limits::input_range(&limits, 64);
            window(&config, &bounce, &input_range, &limits)
                .map(|window| *window.aperture.start())
                .map_err(|error| error.to_string())
        };
        let (all, nothing_low, nothing_high) =
            ([0..=u64::MAX], [0..=0xbfff_ffff, 1 << 32..=1 << 40], [0..=0xfedf_ffff]);
        // 5 GiB of RAM are above 4 GiB, and 1 GiB may come.
        let behind = 10 << 30;
        assert_eq!(start("", &all), Ok(0xc000_0000));
        assert_eq!(start("", &nothing_low), Ok(behind));
        assert_eq!(start("aperture=high", &all), Ok(behind));
        assert_eq!(start("aperture=low", &nothing_high), Ok(0xc000_0000));
        for (option, ranges, place) in [
            ("aperture=low", nothing_low.as_slice(), "from 0xc0000000 to 0xdfffffff; try aperture=high"),
            ("aperture=high", nothing_high.as_slice(), "at 0x280000000 or behind; try aperture=low, or leave it out"),
            ("", [0..=0xbfff_ffff].as_slice(), "from 0xc0000000 to 0xdfffffff, nor behind RAM"),
        ] {
            let error = start(option, ranges).unwrap_err();
            assert!(error.starts_with("--iommu-bounce: the host's IOMMU") && error.contains(place), "{error}");
        }
    }
}
