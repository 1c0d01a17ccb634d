// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu with its bounce windows.

use std::ops::RangeInclusive;
use std::sync::Arc;

use carom_api::config::{IommuPoll, MemoryConfig};
use carom_api::kinds::{Aperture, Kind, KindConfig};
use carom_api::limits::CHUNK_SIZE;
use carom_api::{ConfigError, IommuBounceConfig, VmConfig};
use devices::dma::FAULTS_ROLE;
use devices::pci::PciAddress;
use devices::sandbox::ThreadRole;
use devices::virtio::iommu::{self, IommuHandle, IommuParams, RingFeatures, WindowRegion};
use devices::windows;
use iommu_bounce::{DmaMapper, EngineConfig, Limits, MapperLimits, WindowConfig};

use super::context::DeviceContext;
use super::mapper::EndpointMapper;
use super::{Built, Part, common_limits};
use crate::arch::layout::{HIGH_MEMORY_START, MEMORY_DEVICE_GRANULE, MSI_WINDOW, PciHole, ram_end};
use crate::error::VmError;

/// PCI address of the virtio-iommu.
pub const IOMMU_ADDRESS: PciAddress = PciAddress::on_root_bus(1);
/// Kind of the virtio-iommu.
pub(super) const KIND: &Kind = &IommuBounceConfig::KIND;
/// Roles of the virtio-iommu's threads.
pub(super) const ROLES: &[ThreadRole] = &[iommu::POLL_ROLE, windows::STASH_ROLE, windows::READER_ROLE, FAULTS_ROLE];
/// Ring features of the virtio-iommu's queues.
const RING_FEATURES: RingFeatures = RingFeatures { indirect_desc: true, event_idx: true };

/// [`Part`] of the virtio-iommu, with only the default methods. [`IommuHandle`] returns the counters instead, because some of them are not
/// plain numbers.
struct Iommu;

impl Part for Iommu {}

/// Creates the virtio-iommu for `endpoints`. The virtio-iommu offers the guest only page sizes and IOVAs that the mappers of all endpoints
/// support.
pub(super) fn build(
    config: &VmConfig,
    endpoints: Vec<(PciAddress, Box<dyn EndpointMapper>)>,
    context: &DeviceContext,
) -> Result<(Built, Arc<IommuHandle>), VmError> {
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
        window: bounce
            .map(|bounce| {
                let was = context.window_aperture.as_ref();
                window(config, context.ram_size, bounce, was, &input_range, &limits)
            })
            .transpose()?,
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
        devices: Some(context.bars.clone()),
        // With IOMMUFD, the registers of one device cannot be mapped for DMA by another device.
        mmio: !config.platform.iommufd,
        observer: Some(context.observer.clone()),
    };
    let (function, handle) = iommu::create(params).map_err(|error| VmError::Iommu(error.to_string()))?;
    for (address, mapper) in endpoints {
        connect(&handle, address, mapper)?;
    }
    Ok((Built { function, part: Box::new(Iommu), mapper: None }, handle))
}

/// Returns the maximum number of page-table pages of each host IOMMU address space. The maximum is enough for:
///
/// - IOVAs below 4 GiB, which drivers allocate first: 2048 pages of the lowest level, and some pages of higher levels
/// - windows above 4 GiB: 256 pages
/// - other IOVAs: the pages for a range of twice the size of RAM. Even with the gaps that IOVA allocators leave between mappings, the
///   mappings of a driver cover a smaller range.
fn max_table_pages(config: &VmConfig) -> u64 {
    /// Bytes that one page of the lowest page-table level translates.
    const LARGE_PAGE: u64 = 2 << 20;
    2560 + config.memory.total().saturating_add(config.memory.hotplug_size) / LARGE_PAGE * 2
}

/// True if the guest boots from firmware and has a disk behind the virtio-iommu. The firmware must read the disk, but has no virtio-iommu
/// driver. In this case, unattached endpoints can access all RAM until a driver attaches them, or writes 0 to `bypass`.
fn firmware_reads_a_disk(config: &VmConfig) -> bool {
    config.payload.firmware.is_some() && config.disks.iter().any(KindConfig::is_behind_iommu)
}

/// Puts the device at `address` behind `iommu`.
pub(super) fn connect(
    iommu: &IommuHandle,
    address: PciAddress,
    mapper: Box<dyn EndpointMapper>,
) -> Result<(), VmError> {
    mapper.connect(iommu.windows(), iommu.devices());
    let added = iommu.add_endpoint(address.endpoint_id(), mapper as Box<dyn DmaMapper>);
    added.map_err(|error| VmError::Iommu(format!("device at {address}: {error}")))
}

/// True if a thread may poll for the requests of `vcpus` vCPUs. Without a spare host CPU, the polling thread would slow down a vCPU.
pub(super) fn polls(poll: IommuPoll, vcpus: u32) -> bool {
    let vcpus = usize::try_from(vcpus).unwrap_or(usize::MAX);
    match poll {
        IommuPoll::On => true,
        IommuPoll::Off => false,
        IommuPoll::Auto => std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > vcpus),
    }
}

/// Returns the configuration of the bounce windows for a guest that was booted with `ram_size` bytes of RAM. RAM that was added after boot
/// does not move the windows. In a restored guest, the windows keep the aperture `was`, even if devices were removed, because the driver
/// remembers the aperture.
fn window(
    config: &VmConfig,
    ram_size: u64,
    bounce: &IommuBounceConfig,
    was: Option<&RangeInclusive<u64>>,
    input_range: &RangeInclusive<u64>,
    limits: &[MapperLimits],
) -> Result<WindowConfig, VmError> {
    let PciHole { aperture: hole, .. } = PciHole::of(config.payload.firmware.is_some());
    let behind = behind_ram(&config.memory.booted_with(ram_size));
    let (end, size) = (*input_range.end(), hole.end() - hole.start() + 1);
    let of = |aperture| WindowConfig {
        aperture,
        budget: bounce.size,
        threshold: bounce.threshold.unwrap_or(0),
        threshold_write: bounce.threshold_write.unwrap_or(0),
    };
    let places = match bounce.aperture {
        Aperture::Auto => vec![hole.clone(), behind..=end],
        Aperture::Low => vec![hole.clone()],
        Aperture::High => vec![behind..=end],
    };
    // If this VM cannot have the saved aperture, choose another aperture. Restoring the saved state fails later in this case.
    if let Some(was) = was.filter(|was| can_be(was, &places, size, limits)) {
        return Ok(of(was.clone()));
    }
    let low = || common_limits::window_aperture(&hole, limits);
    let high = || (behind <= end).then(|| common_limits::first_aperture(&(behind..=end), size, limits)).flatten();
    let (aperture, asked) = match bounce.aperture {
        Aperture::Auto => (
            low().or_else(high),
            format!("from {:#x} to {:#x} or above RAM: turn the windows off (size=0)", hole.start(), hole.end()),
        ),
        Aperture::Low => (
            low(),
            format!(
                "from {:#x} to {:#x}: try aperture=high, or turn the windows off (size=0)",
                hole.start(),
                hole.end()
            ),
        ),
        Aperture::High => {
            (high(), format!("at {behind:#x} or above: try aperture=low, or turn the windows off (size=0)"))
        }
    };
    let aperture = aperture.ok_or_else(|| {
        let rule = format!(
            "the devices behind the virtio-iommu have no 2 MiB of usable IOVAs in common for bounce windows {asked}"
        );
        ConfigError::new(IommuBounceConfig::OPTION, rule)
    })?;
    if bounce.aperture == Aperture::Auto && *aperture.start() >= HIGH_MEMORY_START {
        let start = aperture.start();
        log::warn!(
            "the host leaves no room for bounce windows below 4 GiB, so the windows start at {start:#x}: the guest's driver must support windows above 4 GiB"
        );
    }
    Ok(of(aperture))
}

/// True if a VM can have this aperture. The aperture must lie in one of `places`, have at most `most` bytes, and consist of whole chunks.
/// Every endpoint's host IOMMU must translate the whole aperture.
fn can_be(aperture: &RangeInclusive<u64>, places: &[RangeInclusive<u64>], most: u64, limits: &[MapperLimits]) -> bool {
    let (start, end) = (aperture.start(), aperture.end());
    let is_in = |place: &RangeInclusive<u64>| place.contains(start) && place.contains(end);
    start <= end
        && end - start < most
        && places.iter().any(is_in)
        && common_limits::window_aperture(aperture, limits).as_ref() == Some(aperture)
}

/// Returns the lowest address that is at least 4 GiB and above all RAM, including RAM that may be hot-plugged later.
fn behind_ram(memory: &MemoryConfig) -> u64 {
    let end = ram_end(memory.total()).next_multiple_of(MEMORY_DEVICE_GRANULE).saturating_add(memory.hotplug_size);
    end.max(HIGH_MEMORY_START)
}

#[cfg(test)]
mod tests {
    use std::io;

    use devices::pci::{FunctionState, PciDevice};
    use devices::platform::{HostRange, MemorySlots, MsiAllocator, MsiMessage, MsiVectors};
    use devices::ram::Ram;
    use iommu_bounce::test_utils::RecordingMapper;
    use vm_memory::GuestAddress;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::arch::saved::ProcessorsState;
    use crate::snapshot::fill_in_window_aperture;
    use crate::vm_state::{VERSION, VmState};

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
    fn windows_are_above_4_gib_if_requested_or_without_room_below() {
        let config: VmConfig = serde_json::from_str(
            r#"{"payload": {"kernel": "/k"}, "memory": {"size": 8589934592, "hotplug_size": 1073741824}}"#,
        )
        .unwrap();
        let start = |option: &str, ranges: &[RangeInclusive<u64>]| {
            let bounce: IommuBounceConfig = option.parse().unwrap();
            let limits = MapperLimits { page_size_mask: !0xfff, iova_ranges: ranges.to_vec(), max_mappings: None };
            let limits = [limits];
            let input_range = common_limits::input_range(&limits, 64);
            window(&config, config.memory.total(), &bounce, None, &input_range, &limits)
                .map(|window| *window.aperture.start())
                .map_err(|error| error.to_string())
        };
        let (all, nothing_low, nothing_high) =
            ([0..=u64::MAX], [0..=0xbfff_ffff, 1 << 32..=1 << 40], [0..=0xfedf_ffff]);
        // The guest has 8 GiB of RAM: 3 GiB start at 0, and 5 GiB start at 4 GiB. 1 GiB more may be added, so windows start at 10 GiB.
        let behind = 10 << 30;
        assert_eq!(start("", &all), Ok(0xc000_0000));
        assert_eq!(start("", &nothing_low), Ok(behind));
        assert_eq!(start("aperture=high", &all), Ok(behind));
        assert_eq!(start("aperture=low", &nothing_high), Ok(0xc000_0000));
        for (option, ranges, place) in [
            ("aperture=low", nothing_low.as_slice(), "from 0xc0000000 to 0xdfffffff: try aperture=high"),
            (
                "aperture=high",
                nothing_high.as_slice(),
                "at 0x280000000 or above: try aperture=low, or turn the windows off (size=0)",
            ),
            ("", [0..=0xbfff_ffff].as_slice(), "from 0xc0000000 to 0xdfffffff or above RAM"),
        ] {
            let error = start(option, ranges).unwrap_err();
            assert!(
                error.starts_with("--iommu-bounce: the devices behind the virtio-iommu have no 2 MiB of usable IOVAs")
                    && error.contains(place),
                "{error}"
            );
        }
    }

    #[test]
    fn windows_keep_their_place_when_ram_is_added() {
        const MIB: u64 = 1 << 20;
        let bounce: IommuBounceConfig = "aperture=high".parse().unwrap();
        let limits = [MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=u64::MAX], max_mappings: None }];
        let input_range = common_limits::input_range(&limits, 64);
        for (booted_with, hotplug_size) in [(8192 * MIB, 1024 * MIB), (256 * MIB, 512 * MIB), (3073 * MIB, 512 * MIB)] {
            let aperture = |came: u64| {
                let mut config: VmConfig = serde_json::from_str(r#"{"payload": {"kernel": "/k"}}"#).unwrap();
                config.memory = MemoryConfig { hotplug_size, ..MemoryConfig::with_size(booted_with + came) };
                window(&config, booted_with, &bounce, None, &input_range, &limits).unwrap().aperture
            };
            for came in [128 * MIB, 512 * MIB] {
                assert_eq!(aperture(came), aperture(0), "{came} bytes were added to {booted_with}");
            }
        }
    }

    /// Platform whose methods do nothing.
    struct Platform;

    impl MsiVectors for Platform {
        fn count(&self) -> u16 {
            3
        }

        fn event(&self, _: u16) -> Option<&EventFd> {
            None
        }

        fn route(&self, _: u16, _: Option<MsiMessage>) -> io::Result<()> {
            Ok(())
        }

        fn trigger(&self, _: u16) -> io::Result<()> {
            Ok(())
        }
    }

    impl MsiAllocator for Platform {
        fn allocate(&self, _: u16) -> io::Result<Arc<dyn MsiVectors>> {
            Ok(Arc::new(Self))
        }
    }

    impl MemorySlots for Platform {
        unsafe fn insert(&self, _: u64, _: HostRange, _: bool) -> io::Result<u32> {
            Ok(0)
        }

        fn remove(&self, _: u32) -> io::Result<()> {
            Ok(())
        }
    }

    /// IOVAs that a device's host IOMMU translates.
    type Ranges = Vec<RangeInclusive<u64>>;

    const ALL: RangeInclusive<u64> = 0..=u64::MAX;
    /// IOVAs that a host IOMMU translates if it reserves a quarter of the usual aperture.
    const PART: [RangeInclusive<u64>; 2] = [0..=0xcfff_ffff, 0xd800_0000..=u64::MAX];

    fn limits(hosts: &[Ranges]) -> Vec<MapperLimits> {
        let limits =
            |ranges: &Ranges| MapperLimits { page_size_mask: !0xfff, iova_ranges: ranges.clone(), max_mappings: None };
        hosts.iter().map(limits).collect()
    }

    /// Returns the window configuration of a VM. Each entry of `hosts` has the IOVAs that the host IOMMU of one device translates.
    fn windows(option: &str, was: Option<&RangeInclusive<u64>>, hosts: &[Ranges]) -> WindowConfig {
        let config: VmConfig = serde_json::from_str(r#"{"payload": {"kernel": "/k"}}"#).unwrap();
        let (bounce, limits) = (option.parse().unwrap(), limits(hosts));
        let input_range = common_limits::input_range(&limits, 64);
        window(&config, config.memory.total(), &bounce, was, &input_range, &limits).unwrap()
    }

    /// Creates the virtio-iommu of a VM. The arguments are as for [`windows`].
    fn device(was: Option<&RangeInclusive<u64>>, hosts: &[Ranges]) -> (Arc<dyn PciDevice>, Arc<IommuHandle>) {
        let window = windows("", was, hosts);
        let size = window.budget;
        let params = IommuParams {
            id: IommuBounceConfig::ID.into(),
            memory: Arc::new(Ram::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()),
            msi: Arc::new(Platform),
            engine: EngineConfig { window: Some(window), ..EngineConfig::default() },
            windows: Some(WindowRegion { size, chunk_size: CHUNK_SIZE, hugepages: false, slots: Arc::new(Platform) }),
            poll: false,
            rings: RING_FEATURES,
            devices: None,
            mmio: false,
            observer: None,
        };
        let (function, handle) = iommu::create(params).unwrap();
        for (endpoint, ranges) in (1..).zip(hosts) {
            handle.add_endpoint(endpoint, Box::new(RecordingMapper::with_ranges(ranges.clone()))).unwrap();
        }
        (function, handle)
    }

    #[test]
    fn restored_windows_keep_their_aperture_without_the_device() {
        let (function, handle) = device(None, &[vec![ALL], PART.to_vec()]);
        drop(handle.remove_endpoint(2).unwrap());
        let saved = FunctionState { segment: 0, device: 1, id: function.id().into(), state: function.save().unwrap() };
        let state = VmState {
            version: VERSION,
            processors: ProcessorsState::example(1),
            platform: vec![],
            functions: vec![saved],
            ram: vec![],
            added_ram: vec![],
            windows: vec![],
            window_aperture: handle.window_aperture(),
            generation_id: None,
        };
        let (start, end) = state.window_aperture.expect("the device has windows");
        let was = start..=end;
        assert_eq!(was, 0xc000_0000..=0xcfff_ffff);
        let mut older = VmState { window_aperture: None, ..state.clone() };
        fill_in_window_aperture(&mut older);
        assert_eq!(
            older.window_aperture, state.window_aperture,
            "a snapshot of an older version has the aperture in the device's state"
        );
        let (restored, _handle) = device(Some(&was), &[vec![ALL]]);
        restored.restore(&state.functions[0].state).expect("the driver finds its windows");
    }

    #[test]
    fn saved_aperture_is_used_only_if_windows_can_be_there() {
        let behind = 4 << 30;
        let quarter = 0xd000_0000..=0xd7ff_ffff;
        let all = [vec![ALL]];
        for option in ["", "aperture=low"] {
            assert_eq!(windows(option, Some(&quarter), &all).aperture, quarter);
        }
        let high = behind..=behind + 0x7ff_ffff;
        for option in ["", "aperture=high"] {
            assert_eq!(windows(option, Some(&high), &all).aperture, high);
        }
        let usual = windows("", None, &all).aperture;
        for was in [
            0..=0x1fff_ffff,
            0xb000_0000..=0xcfff_ffff,
            0xd000_0000..=0xefff_ffff,
            0xd000_1000..=0xd7ff_ffff,
            0xd000_0000..=0xd7ff_fffe,
            RangeInclusive::new(0xd7ff_ffff, 0xd000_0000),
            behind..=behind + 0x2000_0000 + CHUNK_SIZE - 1,
            behind..=u64::MAX,
        ] {
            assert_eq!(windows("", Some(&was), &all).aperture, usual, "{was:#x?}");
        }
        assert_eq!(windows("aperture=high", Some(&quarter), &all).aperture, behind..=behind + 0x1fff_ffff);
        assert_eq!(windows("aperture=low", Some(&high), &all).aperture, usual);
        assert_eq!(windows("", Some(&quarter), &[PART.to_vec()]).aperture, 0xc000_0000..=0xcfff_ffff);
    }
}
