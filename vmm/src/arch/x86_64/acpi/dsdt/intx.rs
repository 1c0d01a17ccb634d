// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! INTx of PCI functions: the I/O APIC's interrupt line for each slot's pin (ACPI 6.5, section 6.2.13).
//!
//! Pins are routed to link devices. Each link device has one fixed line. The lines of KVM's I/O APIC are active high.
//! Without a link device, a guest would assume that a line is active low, as on a physical board.

use acpi_tables::aml::{EISAName, Interrupt, Method, Name, Package, Path, ResourceTemplate, ZERO};
use acpi_tables::{Aml, AmlSink};
use devices::pci::PciAddress;

use super::{Bytes, bytes_of, system_device};
use crate::arch::layout::INTX_IRQS;
use crate::arch::segments;

/// All functions of a slot.
const ANY_FUNCTION: u32 = 0xffff;
/// Number of pin INTA# in ACPI tables. Each slot has only one function, which uses this pin.
const INTA: u8 = 0;

fn link_name(irq: u32) -> String {
    format!("LNK{:X}", irq - INTX_IRQS.start())
}

/// Writes the link devices.
pub(super) fn links(aml: &mut Vec<u8>) {
    for irq in INTX_IRQS {
        let line = Interrupt::new(true, false, false, true, irq);
        let line = ResourceTemplate::new(vec![&line]);
        system_device(
            &link_name(irq),
            vec![
                &Name::new("_HID".into(), &EISAName::new("PNP0C0F")),
                &Name::new("_UID".into(), &irq),
                &Name::new("_PRS".into(), &line),
                &Name::new("_CRS".into(), &line),
                &Method::new("_SRS".into(), 1, false, vec![]),
            ],
            aml,
        );
    }
}

/// Route of a slot's pin.
struct Route(PciAddress);

impl Aml for Route {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let Self(slot) = self;
        let address = (u32::from(slot.device) << 16) | ANY_FUNCTION;
        let link = Path::new(&format!("\\_SB_.{}", link_name(segments::intx_irq(*slot))));
        Package::new(vec![&address, &INTA, &link, &ZERO]).to_aml_bytes(sink);
    }
}

/// Returns the routes of a segment's slots.
pub(super) fn routes(segment: u16) -> impl Aml {
    let slots = segments::slots(segment).map(|slot| Route(PciAddress::on_segment(segment, slot)));
    let routes: Vec<Route> = slots.collect();
    Made(bytes_of(&Package::new(routes.iter().map(|route| route as &dyn Aml).collect())))
}

/// Owned AML that is already encoded.
struct Made(Vec<u8>);

impl Aml for Made {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        Bytes(&self.0).to_aml_bytes(sink);
    }
}
