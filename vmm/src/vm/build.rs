// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Building a VM from its configuration.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use carom_api::VmConfig;
use carom_api::config::ConsoleMode;
use carom_api::limits::{CHUNK_SIZE, MIB};
use devices::descriptors::{self, Shortage};
use devices::pci::{ConfigPorts, Ecam, HostBridgeKind, PciAddress, PciRoot};
use devices::platform::{AddressSpace, DeviceObserver, Space};
use devices::pvpanic::PvPanic;
use devices::shown::ShownMemory;
use devices::watchdog::Watchdog;
use log::warn;

use super::added_ram::{self, AddedRam};
use super::loading::{Contents, Loading};
use super::processors::Processors;
use super::snapshot::Source;
use super::{PVPANIC_ID, Vm, WATCHDOG_ID, serial};
use crate::address_space::{IoMap, IoMapOwner};
use crate::arch::boot::Payload;
use crate::arch::cpuid::CpuidTemplate;
use crate::arch::generation_id::GenerationId;
use crate::arch::irqchip::IrqchipState;
use crate::arch::layout::{GIB, PCI_ECAM};
use crate::arch::platform::PlatformDevices;
use crate::arch::saved::ProcessorsState;
use crate::arch::{acpi, platform, segments, smbios};
use crate::event_monitor::EventMonitor;
use crate::kvm::doorbells::KvmDoorbells;
use crate::kvm::msi::KvmMsi;
use crate::kvm::slots::KvmSlots;
use crate::kvm::{self, KvmError, KvmVm};
use crate::machine::{GuestEvent, Mailbox, VmError};
use crate::parts::IOMMU_ADDRESS;
use crate::parts::bus::PartBus;
use crate::parts::context::DeviceContext;
use crate::parts::observer::Observer;
use crate::parts::rate_limits::RateLimitGroups;
use crate::{affinity, memory, snapshot};

/// Where 64-bit BARs start where RAM leaves the place free: far enough that RAM could grow.
const MEM64_ALIGN: u64 = 64 * GIB;

impl Vm {
    /// Builds the VM. What the user may have got wrong comes first, and the terminal is touched last, so that a
    /// mistake leaves nothing behind.
    ///
    /// With `source` it is the VM that was saved there as far as that is fixed when a VM is built: RAM and CPUID.
    pub(super) fn new(
        config: &VmConfig,
        source: Option<&Source<'_>>,
        mailbox: Arc<Mailbox>,
        monitor: &EventMonitor,
    ) -> Result<Self, VmError> {
        let vcpu_places = affinity::of_vcpus(&config.cpus.affinity)?;
        let kvm = kvm::open()?;
        let template = CpuidTemplate::new(&kvm, &config.cpus)?.with_nodes(&config.numa);
        let saved = source.map(|source| &source.snapshot.state.processors);
        let wanted = config.cpus.boot_vcpus;
        let cpuids = saved.map_or_else(|| (0..wanted).collect(), ProcessorsState::numbers).into_iter().map(|number| {
            let host = template.for_vcpu(number)?;
            Ok((number, saved.map_or_else(|| Ok(host.clone()), |saved| saved.cpuid(number, &host))?))
        });
        let cpuids = cpuids.collect::<Result<Vec<_>, KvmError>>()?;
        let physical_bits = saved.and_then(ProcessorsState::physical_bits).unwrap_or_else(|| template.physical_bits());
        let added = source.map(Source::added_ram).unwrap_or_default();
        // What the guest boots with: what came since is described to it by the memory devices.
        let ram_size = config.memory.total() - added.iter().map(|device| device.len).sum::<u64>();
        let room = added_ram::room(&config.memory, ram_size, physical_bits);
        let tables = describe(config, &room, physical_bits);
        let smbios = smbios::Tables::new(&config.platform);
        let payload = Payload::open(&config.payload)?;
        let generation_id = config.platform.vmgenid.then(GenerationId::draw).transpose();
        let generation_id =
            generation_id.map_err(|source| VmError::Device { what: "drawing a VM Generation ID", source })?;
        let contents = Arc::new(Contents { payload, tables, smbios, generation_id });
        let (memory, loading) = match source {
            Some(Source { snapshot, prefault }) => (snapshot::ram::restore(snapshot, ram_size, *prefault)?, None),
            None => {
                let memory = memory::create(&config.memory)?;
                let loading = Loading::begin(contents.clone(), memory.clone(), ram_size)?;
                (memory, Some(loading))
            }
        };
        let kvm = KvmVm::new(kvm)?;
        let tables = &contents.tables;

        let slots = Arc::new(KvmSlots::new(kvm.fd.clone(), kvm.kvm.get_nr_memslots()));
        memory::show(&memory, slots.as_ref())?;
        let io_map = IoMapOwner::new();
        io_map.set_slots(&slots);
        platform::add_power_registers(&io_map, mailbox.clone())?;
        let control_port = platform::add_control_port(&io_map)?;
        let for_firmware = tables.firmware.then(|| platform::add_firmware_devices(&io_map, ram_size)).transpose()?;
        let bridge = if tables.firmware { HostBridgeKind::CloudHypervisor } else { HostBridgeKind::Generic };
        let (pci, config_ports) = add_root_buses(&io_map, tables, bridge, mailbox.clone())?;
        let msi = KvmMsi::new(kvm.fd.clone())
            .map_err(|source| VmError::Device { what: "setting interrupt routes", source })?;
        let hotplug = platform::add_hotplug_registers(&io_map, &kvm, &pci, mailbox.clone())?;
        let memory_devices =
            tables.memory_devices.then(|| platform::add_memory_devices(&io_map, &kvm, added)).transpose()?;
        let present = cpuids.iter().map(|(number, _)| *number).collect();
        let add_cpu_hotplug = || platform::add_cpu_hotplug(&io_map, &kvm, wanted, present, mailbox.clone());
        let cpu_hotplug = tables.processors_change().then(add_cpu_hotplug).transpose()?;
        let add_notice = |_| platform::add_generation_notice(&io_map, &kvm);
        let generation_notice = contents.generation_id.map(add_notice).transpose()?;
        let observer: Arc<dyn DeviceObserver> = Arc::new(Observer(monitor.clone()));
        if config.pvpanic {
            let device = PvPanic::new(PVPANIC_ID.into(), observer.clone());
            pci.add(PciAddress::on_root_bus(segments::pvpanic_slot()), Arc::new(device))?;
        }
        if config.watchdog {
            let mailbox = mailbox.clone();
            let expired = move || mailbox.leave(GuestEvent::Reset);
            let device = Watchdog::new(WATCHDOG_ID.into(), observer.clone(), expired)
                .map_err(|source| VmError::Device { what: "making the watchdog", source })?;
            pci.add(PciAddress::on_root_bus(segments::watchdog_slot(config)), Arc::new(device))?;
        }
        let bars = Arc::new(ShownMemory::new(slots.clone()));
        let (vm, memory_of_devices, slots_of_devices) = (kvm.fd.clone(), memory.clone(), slots.clone());
        let (msi, pci_of_devices) = (Arc::new(msi), pci.clone());
        let context = DeviceContext {
            vm,
            memory: memory_of_devices,
            ram_size,
            reclaim: config.balloon.as_ref().map(|_| memory::reclaim(&config.memory, &memory)),
            slots: slots_of_devices,
            bars,
            msi,
            doorbells: Arc::new(KvmDoorbells::new(kvm.fd.clone())),
            pci: pci_of_devices,
            limits: RateLimitGroups::new(&config.rate_limit_groups),
            observer,
            listener: mailbox.clone(),
            places: source.map(Source::places).unwrap_or_default(),
            window_aperture: source.and_then(|source| source.snapshot.state.window_aperture()),
        };
        // A mistake in a file shows before a device or the terminal is touched.
        let loaded = loading.map(Loading::end).transpose()?;
        let parts = PartBus::new(config, context)?;
        warn_of_few_descriptors(config);

        let processors = Processors::new(&kvm, cpuids, vcpu_places, Arc::clone(&io_map), mailbox.clone())?;
        let initial_irqchip = IrqchipState::save(&kvm.fd)?;
        let power_button = platform::add_power_button(&kvm)?;
        let (serial, serial_links) = serial::add_port(&config.serial, &kvm, &io_map)?;
        let platform = PlatformDevices {
            control_port,
            config_ports,
            hotplug,
            processors: cpu_hotplug,
            memory_devices,
            generation_notice,
            serial,
            for_firmware,
        };
        Ok(Self {
            processors,
            initial_irqchip,
            _io_map: io_map,
            pci,
            platform,
            parts,
            closed: Vec::new(),
            loaded,
            contents: Arc::into_inner(contents).expect("nobody else has it once all is loaded"),
            kvm,
            memory,
            slots,
            ram_size,
            added_ram: AddedRam::new(room),
            clock: None,
            knows_generation_id: config.platform.vmgenid,
            power_button,
            serial: serial_links,
        })
    }
}

/// Says so in the log where the guest may come to ask for more chunks than the limit on descriptors allows: each is one, and so is each
/// interrupt vector of the devices that are there now. The VM runs all the same: a WINDOW_ADD gets NOMEM then.
fn warn_of_few_descriptors(config: &VmConfig) {
    let Some(bounce) = config.iommu_bounce.as_ref().filter(|bounce| bounce.has_windows()) else { return };
    let chunks = bounce.max / CHUNK_SIZE;
    let Some(Shortage { open, limit, reserved }) = descriptors::shortage(chunks) else { return };
    warn!(
        "iommu_bounce.max: windows of {} MiB take up to {chunks} descriptors, and {open} are open, those of devices' interrupt vectors \
         among them; the limit of {limit}, of which {reserved} are not for the guest, is too low for that: raise it to {} (LimitNOFILE=, \
         ulimit -Hn), or lower max",
        bounce.max / MIB,
        enough(open + chunks),
    );
}

/// A limit that has room for so many descriptors beside what is kept from guests, and for some more.
fn enough(descriptors: u64) -> u64 {
    (descriptors + 256).next_power_of_two()
}

/// What the ACPI tables say of the VM: its CPUs, and which function sits where.
fn describe(config: &VmConfig, room: &Range<u64>, physical_bits: u8) -> acpi::TableConfig {
    acpi::TableConfig {
        vcpus: config.cpus.boot_vcpus,
        max_vcpus: config.cpus.max_vcpus,
        segments: segments::windows(config, &mem64(room.end, physical_bits)),
        firmware: config.payload.firmware.is_some(),
        iommu: config.has_iommu().then(|| (IOMMU_ADDRESS, segments::endpoints(config))),
        serial: config.serial.mode != ConsoleMode::Off,
        memory_devices: !room.is_empty(),
        generation_id: config.platform.vmgenid,
        nodes: acpi::Nodes::of(config),
    }
}

/// Where 64-bit BARs go, behind RAM and the room for more: the upper end of what the guest's CPUs can address.
fn mem64(ram_end: u64, physical_bits: u8) -> RangeInclusive<u64> {
    let end = 1u64 << physical_bits;
    let start = ram_end.next_multiple_of(MEM64_ALIGN);
    if start < end { start..=end - 1 } else { ram_end..=end.max(ram_end + GIB) - 1 }
}

fn add_root_buses(
    io_map: &Arc<IoMap>,
    tables: &acpi::TableConfig,
    bridge: HostBridgeKind,
    mailbox: Arc<Mailbox>,
) -> Result<(Arc<PciRoot>, Arc<ConfigPorts>), VmError> {
    let root = Arc::new(PciRoot::new(io_map.clone(), tables.segments.clone(), bridge)?);
    let place = |source| VmError::Device { what: "placing PCI configuration space", source };
    let ecam = Arc::new(Ecam::new(root.clone()));
    io_map.insert(Space::Memory, PCI_ECAM, ecam.size(), ecam).map_err(place)?;
    let ports = platform::add_config_ports(io_map, &root, mailbox).map_err(place)?;
    Ok((root, ports))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_of_64_bits_lie_above_ram_and_within_reach() {
        let behind = |ram_size, physical_bits| mem64(memory::end(ram_size), physical_bits);
        assert_eq!(behind(2 * GIB, 40), 64 * GIB..=1024 * GIB - 1);
        assert_eq!(behind(100 * GIB, 39), 128 * GIB..=512 * GIB - 1);
        let tight = behind(40 * GIB, 36);
        assert!(*tight.start() >= memory::end(40 * GIB));
    }
}
