// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The differentiated system description: host bridges, INTx, PCI hot plug, processors, memory devices, VM Generation ID, serial port,
//! power button, sleep state.

mod generation_id;
mod hotplug;
mod intx;
mod memory;
mod notification;
mod processors;

use std::ops::RangeInclusive;

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method,
    MethodCall, Name, Notify, ONE, Package, Path, ResourceTemplate, Scope, ZERO,
};
use acpi_tables::{Aml, AmlSink};
use devices::pci::BarWindows;

use super::TableConfig;
use crate::arch::layout::{
    ACPI_EVENT_IRQ, CPU_HOTPLUG_IRQ, GENERATION_ID_IRQ, MEMORY_DEVICE_IRQ, PCI_CONFIG_PORTS, PCI_ECAM, PCI_ECAM_SIZE,
    PCI_HOTPLUG_IRQ, PciHole, SERIAL_IRQ, SERIAL_PORT,
};

/// Value of the sleep type field that powers the machine off.
const SLEEP_TYPE_S5: u8 = devices::acpi::power::SLEEP_TYPE_S5;

fn narrow<T: TryFrom<u64>>(value: u64) -> T {
    T::try_from(value).unwrap_or_else(|_| panic!("the value {value:#x} does not fit its field in the DSDT"))
}

/// Builds the body of the definition block.
pub(super) fn build(config: &TableConfig) -> Vec<u8> {
    let mut aml = Vec::new();
    for (segment, windows) in (0..).zip(&config.segments) {
        match segment {
            0 => host_bridge(config, windows, &mut aml),
            _ => bridge(config, segment, &[], &windows.mem32, windows, &mut aml),
        }
        hotplug::slots(segment, &mut aml);
    }
    intx::links(&mut aml);
    hotplug::registers(config, &mut aml);
    if config.processors_change() {
        processors::processors(config.max_vcpus, &mut aml);
    }
    if config.memory_devices {
        memory::devices(&mut aml);
    }
    if config.generation_id {
        generation_id::device(&mut aml);
    }
    if config.serial {
        serial_port(&mut aml);
    }
    events(config, &mut aml);
    Name::new("_S5_".into(), &Package::new(vec![&SLEEP_TYPE_S5])).to_aml_bytes(&mut aml);
    aml
}

/// Writes a device of the system bus.
fn system_device(name: &str, children: Vec<&dyn Aml>, aml: &mut Vec<u8>) {
    Scope::new("_SB_".into(), vec![&Device::new(name.into(), children)]).to_aml_bytes(aml);
}

/// Writes the PCI Express host bridge of segment 0 and its motherboard resources. The bridge's memory resources also cover the IOVA
/// aperture of the bounce windows. The guest's DMA layer never allocates IOVAs in the memory resources of a host bridge, so the aperture
/// stays free.
fn host_bridge(config: &TableConfig, windows: &BarWindows, aml: &mut Vec<u8>) {
    let ports = PCI_CONFIG_PORTS;
    let before: AddressSpace<u16> = AddressSpace::new_io(0, narrow(ports.start() - 1), None);
    let ports_len = narrow(ports.end() - ports.start() + 1);
    let config_ports = IO::new(narrow(*ports.start()), narrow(*ports.start()), 1, ports_len);
    let (start, end) = PciHole::of(config.firmware).aperture.into_inner();
    let mem32 = start.min(*windows.mem32.start())..=end.max(*windows.mem32.end());
    bridge(config, 0, &[&config_ports, &before], &mem32, windows, aml);
    let segments = config.segments.len() as u64;
    let ecam = Memory32Fixed::new(true, narrow(PCI_ECAM), narrow(PCI_ECAM_SIZE * segments));
    let aperture = Memory32Fixed::new(true, narrow(start), narrow(end - start + 1));
    // Linux expects ECAM as a motherboard resource in addition to the memory map. The aperture is listed so that the guest places no BAR of
    // a hot-plugged device in the aperture.
    system_device(
        "MBRD",
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ecam, &aperture])),
        ],
        aml,
    );
}

/// Writes the host bridge of a segment. The bridge's resources are, in this order: the bus number, `first`, the segment's I/O ports,
/// `mem32`, and the segment's 64-bit memory.
fn bridge(
    config: &TableConfig,
    segment: u16,
    first: &[&dyn Aml],
    mem32: &RangeInclusive<u64>,
    windows: &BarWindows,
    aml: &mut Vec<u8>,
) {
    let bus: AddressSpace<u16> = AddressSpace::new_bus_number(0, 0);
    let io: AddressSpace<u16> = AddressSpace::new_io(narrow(*windows.io.start()), narrow(*windows.io.end()), None);
    let low: AddressSpace<u32> = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        narrow(*mem32.start()),
        narrow(*mem32.end()),
        None,
    );
    let high: AddressSpace<u64> = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        *windows.mem64.start(),
        *windows.mem64.end(),
        None,
    );
    let mut resources: Vec<&dyn Aml> = vec![&bus];
    resources.extend(first);
    resources.extend([&io as &dyn Aml, &low, &high]);
    let names = [
        Name::new("_HID".into(), &EISAName::new("PNP0A08")),
        Name::new("_CID".into(), &EISAName::new("PNP0A03")),
        Name::new("_SEG".into(), &segment),
        Name::new("_BBN".into(), &ZERO),
        Name::new("_UID".into(), &segment),
        // DMA is coherent with the CPU caches.
        Name::new("_CCA".into(), &ONE),
        Name::new("_CRS".into(), &ResourceTemplate::new(resources)),
        Name::new("_PRT".into(), &intx::routes(segment)),
    ];
    let node = config.nodes.as_ref().and_then(|nodes| nodes.of_segment(segment));
    let node = node.map(|node| Name::new("_PXM".into(), &node));
    let children = names.iter().chain(&node).map(|name| name as &dyn Aml).collect();
    system_device(&bridge_name(segment), children, aml);
}

/// Returns the name of a segment's host bridge.
fn bridge_name(segment: u16) -> String {
    format!("PCI{segment:X}")
}

/// Writes the power button and the generic event device (ACPI 6.5, section 5.6.9). The event device's interrupts report presses of the
/// button, hotplug, and a new VM Generation ID. A hardware-reduced machine needs this device, because it has no fixed event registers.
fn events(config: &TableConfig, aml: &mut Vec<u8>) {
    /// Notification: the button was pressed (ACPI 6.5, section 5.6.6).
    const PRESSED: u8 = 0x80;
    let press = bytes_of(&Notify::new(&Path::new("PWRB"), &PRESSED));
    let scan = |method: &str| bytes_of(&MethodCall::new(method.into(), vec![]));
    let mut lines = vec![
        Event { irq: ACPI_EVENT_IRQ, edge: true, then: press },
        Event { irq: PCI_HOTPLUG_IRQ, edge: false, then: scan(hotplug::SCAN) },
    ];
    if config.processors_change() {
        lines.push(Event { irq: CPU_HOTPLUG_IRQ, edge: false, then: scan(processors::SCAN) });
    }
    if config.memory_devices {
        lines.push(Event { irq: MEMORY_DEVICE_IRQ, edge: false, then: scan(memory::SCAN) });
    }
    if config.generation_id {
        lines.push(Event { irq: GENERATION_ID_IRQ, edge: false, then: scan(generation_id::LOOK) });
    }
    let interrupts: Vec<Interrupt> =
        lines.iter().map(|line| Interrupt::new(true, line.edge, false, false, line.irq)).collect();
    Scope::new(
        "_SB_".into(),
        vec![
            &Device::new(
                "PWRB".into(),
                vec![&Name::new("_HID".into(), &EISAName::new("PNP0C0C")), &Name::new("_UID".into(), &ZERO)],
            ),
            &Device::new(
                "GED0".into(),
                vec![
                    &Name::new("_HID".into(), &"ACPI0013"),
                    &Name::new("_UID".into(), &ZERO),
                    &Name::new(
                        "_CRS".into(),
                        &ResourceTemplate::new(interrupts.iter().map(|line| line as &dyn Aml).collect()),
                    ),
                    &Method::new("_EVT".into(), 1, true, lines.iter().map(|line| line as &dyn Aml).collect()),
                ],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

/// Interrupt line of the generic event device.
struct Event {
    irq: u32,
    /// True if the line is edge-triggered, false if level-triggered.
    edge: bool,
    /// AML that the event device runs when the line is raised.
    then: Vec<u8>,
}

impl Aml for Event {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let raised = Equal::new(&Arg(0), &self.irq);
        If::new(&raised, vec![&Bytes(&self.then)]).to_aml_bytes(sink);
    }
}

fn bytes_of(aml: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    bytes
}

/// AML that is already encoded.
struct Bytes<'a>(&'a [u8]);

impl Aml for Bytes<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.0);
    }
}

fn serial_port(aml: &mut Vec<u8>) {
    let port = narrow(SERIAL_PORT);
    let (line, ports) = (Interrupt::new(true, true, false, false, SERIAL_IRQ), IO::new(port, port, 0, 8));
    system_device(
        "COM1",
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_DDN".into(), &"COM1"),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&line, &ports])),
        ],
        aml,
    );
}
