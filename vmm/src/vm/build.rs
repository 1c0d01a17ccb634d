// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Builds a VM from its configuration.

use std::sync::Arc;

use carom_api::VmConfig;
use carom_api::limits::{CHUNK_SIZE, MIB};
use devices::descriptors::{self, Shortage};
use devices::guest_visible::GuestVisibleMemory;
use devices::pci::{Ecam, HostBridgeKind, PciAddress, PciRoot};
use devices::platform::{AddressSpace, DeviceObserver, Space};
use devices::pvpanic::PvPanic;
use devices::watchdog::Watchdog;
use log::warn;

use super::added_ram::AddedRam;
use super::base::Base;
use super::loading::Loading;
use super::processors::Processors;
use super::{PVPANIC_ID, Vm, WATCHDOG_ID, serial};
use crate::address_space::{IoMap, IoMapOwner};
use crate::arch::board::{Board, BoardConfig};
use crate::arch::irqchip::{self, IrqchipState};
use crate::arch::layout::{FIRST_MSI_GSI, PCI_ECAM};
use crate::arch::{acpi, segments};
use crate::error::VmError;
use crate::kvm::KvmVm;
use crate::kvm::doorbells::KvmDoorbells;
use crate::kvm::msi::KvmMsi;
use crate::kvm::slots::KvmSlots;
use crate::mailbox::{GuestEvent, Mailbox};
use crate::memory;
use crate::parts::bus::PartBus;
use crate::parts::context::DeviceContext;
use crate::parts::observer::Observer;
use crate::parts::rate_limits::RateLimitGroups;
use crate::process::event_monitor::EventMonitor;

impl Vm {
    /// Builds the VM on `base`. Does the steps that may fail because of a user error first, and sets the terminal up last. So a user error
    /// does not change the terminal.
    pub(super) fn new(
        config: &VmConfig,
        base: Base,
        mailbox: Arc<Mailbox>,
        monitor: &EventMonitor,
    ) -> Result<Self, VmError> {
        let kvm = KvmVm::new(base.kvm)?;
        irqchip::create(&kvm.fd)?;
        let (memory, tables) = (base.memory, &base.contents.tables);

        let slots = Arc::new(KvmSlots::new(kvm.fd.clone(), kvm.kvm.get_nr_memslots()));
        memory::show(&memory, slots.as_ref())?;
        let io_map = IoMapOwner::new();
        io_map.set_slots(&slots);
        let bridge = if tables.firmware { HostBridgeKind::CloudHypervisor } else { HostBridgeKind::Generic };
        let pci = add_root_buses(&io_map, tables, bridge)?;
        let msi = KvmMsi::new(kvm.fd.clone(), irqchip::line_routes(), FIRST_MSI_GSI)
            .map_err(|source| VmError::Device { what: "set interrupt routes", source })?;
        let present = base.cpuids.iter().map(|(number, _)| *number).collect();
        let board = BoardConfig {
            firmware: tables.firmware,
            ram_size: base.ram_size,
            processors: tables.processors_change().then_some((config.cpus.boot_vcpus, present)),
            memory_devices: tables.memory_devices.then_some(base.added_ram),
            generation_id: base.contents.generation_id.is_some(),
        };
        let mut board = Board::new(&io_map, &kvm, &pci, &mailbox, board)?;
        let observer: Arc<dyn DeviceObserver> = Arc::new(Observer(monitor.clone()));
        if config.pvpanic {
            let device = PvPanic::new(PVPANIC_ID.into(), observer.clone());
            pci.add(PciAddress::on_root_bus(segments::pvpanic_slot()), Arc::new(device))?;
        }
        if config.watchdog {
            let mailbox = mailbox.clone();
            let expired = move || mailbox.leave(GuestEvent::Reset);
            let device = Watchdog::new(WATCHDOG_ID.into(), observer.clone(), expired)
                .map_err(|source| VmError::Device { what: "create the watchdog", source })?;
            pci.add(PciAddress::on_root_bus(segments::watchdog_slot(config)), Arc::new(device))?;
        }
        let context = DeviceContext {
            vm: kvm.fd.clone(),
            memory: memory.clone(),
            ram_size: base.ram_size,
            reclaim: config.balloon.as_ref().map(|_| memory::reclaim(&config.memory, &memory)),
            slots: slots.clone(),
            bars: Arc::new(GuestVisibleMemory::new(slots.clone())),
            msi: Arc::new(msi),
            doorbells: Arc::new(KvmDoorbells::new(kvm.fd.clone())),
            pci: pci.clone(),
            limits: RateLimitGroups::new(&config.rate_limit_groups),
            observer,
            listener: mailbox.clone(),
            places: base.places,
            window_aperture: base.window_aperture,
        };
        // Wait for the loader here, so that an invalid boot file is reported before a device or the terminal is opened.
        let loaded = base.loading.map(Loading::end).transpose()?;
        let parts = PartBus::new(config, context)?;
        warn_of_few_descriptors(config);

        let processors = Processors::new(&kvm, base.cpuids, base.vcpu_places, Arc::clone(&io_map), mailbox.clone())?;
        let initial_irqchip = IrqchipState::save(&kvm.fd)?;
        let serial = serial::add_port(&config.serial, &kvm, &io_map, &mut board)?;
        Ok(Self {
            processors,
            initial_irqchip,
            _io_map: io_map,
            pci,
            board,
            parts,
            closed: Vec::new(),
            loaded,
            contents: Arc::into_inner(base.contents).expect("the loader has ended, so this is the only reference"),
            kvm,
            memory,
            slots,
            ram_size: base.ram_size,
            added_ram: AddedRam::new(base.room),
            clock: None,
            knows_generation_id: config.platform.vmgenid,
            serial,
        })
    }
}

/// Logs a warning if the guest may ask for more chunks than the descriptor limit allows. Each chunk needs a descriptor. The descriptors
/// that are already open, such as those of interrupt vectors, also count. The VM still runs, but a WINDOW_ADD request beyond the limit
/// fails with NOMEM.
fn warn_of_few_descriptors(config: &VmConfig) {
    let Some(bounce) = config.iommu_bounce.as_ref().filter(|bounce| bounce.has_windows()) else { return };
    let chunks = bounce.max / CHUNK_SIZE;
    let Some(Shortage { open, limit, reserved }) = descriptors::shortage(chunks) else { return };
    warn!(
        "iommu_bounce.max: windows of {} MiB take up to {chunks} descriptors, and {open} descriptors are already open, for example for interrupt vectors. \
         Together they exceed the limit of {limit}, of which {reserved} are reserved for the VMM: raise the limit to {} (LimitNOFILE=, \
         ulimit -Hn), or lower iommu_bounce.max",
        bounce.max / MIB,
        enough(open + chunks),
    );
}

/// Returns a descriptor limit that is enough for this number of descriptors, for the descriptors reserved for the VMM, and for some spare
/// descriptors.
fn enough(descriptors: u64) -> u64 {
    (descriptors + 256).next_power_of_two()
}

fn add_root_buses(
    io_map: &Arc<IoMap>,
    tables: &acpi::TableConfig,
    bridge: HostBridgeKind,
) -> Result<Arc<PciRoot>, VmError> {
    let root = Arc::new(PciRoot::new(io_map.clone(), tables.segments.clone(), bridge)?);
    let place = |source| VmError::Device { what: "place PCI configuration space", source };
    let ecam = Arc::new(Ecam::new(root.clone()));
    io_map.insert(Space::Memory, PCI_ECAM, ecam.size(), ecam).map_err(place)?;
    Ok(root)
}
