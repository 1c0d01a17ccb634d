// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Properties and resources of a VM that are fixed before the VM is built. They come from the configuration of a new VM, or from the state
//! of a saved VM.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use carom_api::VmConfig;
use carom_api::config::ConsoleMode;
use devices::acpi::memory_devices::MemoryDevice;
use devices::pci::PciAddress;
use devices::ram::Ram;
use devices::sandbox::HostCpus;
use kvm_bindings::CpuId;
use kvm_ioctls::Kvm;

use super::added_ram;
use super::loading::{Contents, Loading};
use crate::arch::boot::Payload;
use crate::arch::cpuid::CpuidTemplate;
use crate::arch::generation_id::GenerationId;
use crate::arch::layout::GIB;
use crate::arch::{acpi, segments, smbios};
use crate::error::VmError;
use crate::kvm::{self, KvmError};
use crate::limits::affinity;
use crate::memory;
use crate::parts::IOMMU_ADDRESS;
use crate::vm_state::{self, StateSource};

/// Alignment of the lowest address for 64-bit BARs. The address is not aligned if the alignment would leave no room for BARs.
const MEM64_ALIGN: u64 = 64 * GIB;

/// Properties and resources of a VM that are fixed before it is built.
pub(super) struct Base {
    /// The KVM device (`/dev/kvm`).
    pub(super) kvm: Kvm,
    /// Host CPUs of each vCPU, by vCPU number.
    pub(super) vcpu_places: BTreeMap<u32, HostCpus>,
    /// Numbers and CPUID of the vCPUs.
    pub(super) cpuids: Vec<(u32, CpuId)>,
    /// RAM of the guest.
    pub(super) memory: Arc<Ram>,
    /// Bytes of RAM that the guest was booted with.
    pub(super) ram_size: u64,
    /// RAM that was added after boot.
    pub(super) added_ram: Vec<MemoryDevice>,
    /// Guest-physical addresses for RAM that is added after boot.
    pub(super) room: Range<u64>,
    /// Boot contents: kernel or firmware, and tables.
    pub(super) contents: Arc<Contents>,
    /// Thread that loads the contents into the RAM of a new VM.
    pub(super) loading: Option<Loading>,
    /// PCI addresses of a saved VM's functions, by ID.
    pub(super) places: BTreeMap<String, PciAddress>,
    /// Aperture of a saved VM's bounce windows, as IOVAs that are not validated yet.
    pub(super) window_aperture: Option<RangeInclusive<u64>>,
}

/// Host resources of a VM: KVM, the host CPUs of its vCPUs, and the template of their CPUID.
struct Host {
    kvm: Kvm,
    vcpu_places: BTreeMap<u32, HostCpus>,
    template: CpuidTemplate,
}

impl Host {
    fn open(config: &VmConfig) -> Result<Self, VmError> {
        let vcpu_places = affinity::of_vcpus(&config.cpus.affinity)?;
        let kvm = kvm::open()?;
        let template = CpuidTemplate::new(&kvm, &config.cpus)?.with_nodes(&config.numa);
        Ok(Self { kvm, vcpu_places, template })
    }
}

impl Base {
    /// Creates the base of a new VM. Starts a thread that loads the kernel or firmware.
    ///
    /// # Errors
    /// The host lacks a required feature, or the configuration names a file that cannot be used.
    pub(super) fn of_new(config: &VmConfig) -> Result<Self, VmError> {
        let host = Host::open(config)?;
        let cpuids = (0..config.cpus.boot_vcpus).map(|number| Ok((number, host.template.for_vcpu(number)?)));
        let cpuids = cpuids.collect::<Result<_, KvmError>>()?;
        let (ram_size, physical_bits) = (config.memory.total(), host.template.physical_bits());
        let base = Self::new(config, host, cpuids, ram_size, physical_bits, || Ok(memory::create(&config.memory)?))?;
        let loading = Some(Loading::begin(base.contents.clone(), base.memory.clone(), ram_size)?);
        Ok(Self { loading, ..base })
    }

    /// Creates the base of a saved VM. If `prefault` is set, reads all RAM now.
    ///
    /// # Errors
    /// As for [`of_new`](Self::of_new), or the host lacks a feature that the state needs.
    pub(super) fn of_saved(source: &dyn StateSource, prefault: bool) -> Result<Self, VmError> {
        let (config, state) = (source.config(), source.state());
        let host = Host::open(config)?;
        let cpuids = state.processors.numbers().into_iter().map(|number| {
            let template = host.template.for_vcpu(number)?;
            Ok((number, state.processors.cpuid(number, &template)?))
        });
        let cpuids = cpuids.collect::<Result<_, KvmError>>()?;
        let added = |range: &vm_state::RamRange| MemoryDevice { gpa: range.gpa, len: range.len };
        let added_ram: Vec<_> = state.added_ram.iter().map(added).collect();
        let ram_size = config.memory.total() - added_ram.iter().map(|device| device.len).sum::<u64>();
        let physical_bits = state.processors.physical_bits().unwrap_or_else(|| host.template.physical_bits());
        let memory = || Ok(vm_state::ram::restore(source, ram_size, prefault)?);
        Ok(Self {
            added_ram,
            places: state.functions.iter().map(|function| (function.id.clone(), function.address())).collect(),
            window_aperture: state.window_aperture.map(|(start, end)| start..=end),
            ..Self::new(config, host, cpuids, ram_size, physical_bits, memory)?
        })
    }

    /// Creates the base with the fields that new and saved VMs have in common. First opens the files of the payload, then calls `memory` to
    /// create RAM.
    fn new(
        config: &VmConfig,
        host: Host,
        cpuids: Vec<(u32, CpuId)>,
        ram_size: u64,
        physical_bits: u8,
        memory: impl FnOnce() -> Result<Arc<Ram>, VmError>,
    ) -> Result<Self, VmError> {
        let Host { kvm, vcpu_places, .. } = host;
        let (contents, room) = contents(config, ram_size, physical_bits)?;
        Ok(Self {
            kvm,
            vcpu_places,
            cpuids,
            memory: memory()?,
            ram_size,
            added_ram: Vec::new(),
            room,
            contents,
            loading: None,
            places: BTreeMap::new(),
            window_aperture: None,
        })
    }
}

/// Opens the files that the guest boots. `ram_size` is the number of bytes of RAM at boot. Returns the contents, and the guest-physical
/// addresses for RAM that is added later.
fn contents(config: &VmConfig, ram_size: u64, physical_bits: u8) -> Result<(Arc<Contents>, Range<u64>), VmError> {
    // The tables do not contain RAM that was added before a save, because the ACPI memory devices describe this RAM to the guest.
    let room = added_ram::room(&config.memory, ram_size, physical_bits);
    let tables = describe(config, &room, physical_bits);
    let smbios = smbios::Tables::new(&config.platform);
    let payload = Payload::open(&config.payload)?;
    let generation_id = config.platform.vmgenid.then(GenerationId::draw).transpose();
    let generation_id =
        generation_id.map_err(|source| VmError::Device { what: "generate a VM Generation ID", source })?;
    Ok((Arc::new(Contents { payload, tables, smbios, generation_id }), room))
}

/// Returns the configuration of the ACPI tables: CPUs, and the addresses of functions.
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

/// Returns the address range for 64-bit BARs. The range lies above the RAM at boot and above the addresses for added RAM. It ends at the
/// last address that the guest's CPUs support.
fn mem64(ram_end: u64, physical_bits: u8) -> RangeInclusive<u64> {
    let end = 1u64 << physical_bits;
    let start = ram_end.next_multiple_of(MEM64_ALIGN);
    if start < end { start..=end - 1 } else { ram_end..=end.max(ram_end + GIB) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::layout::ram_end;

    #[test]
    fn bars_of_64_bits_lie_above_ram_and_within_reach() {
        let behind = |ram_size, physical_bits| mem64(ram_end(ram_size), physical_bits);
        assert_eq!(behind(2 * GIB, 40), 64 * GIB..=1024 * GIB - 1);
        assert_eq!(behind(100 * GIB, 39), 128 * GIB..=512 * GIB - 1);
        let tight = behind(40 * GIB, 36);
        assert!(*tight.start() >= ram_end(40 * GIB));
    }
}
