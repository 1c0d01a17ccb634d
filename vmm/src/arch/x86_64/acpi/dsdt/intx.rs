// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! INTx of PCI functions: which interrupt line of the I/O APIC each slot's pin leads to (ACPI 6.5, section 6.2.13).
//!
//! Pins lead to link devices, each of which has one line and cannot be given another. A line that is named without a link device is
//! taken to be active low, as on a board; those of KVM's I/O APIC are active high.

use acpi_tables::aml::{EISAName, Interrupt, Method, Name, Package, Path, ResourceTemplate, ZERO};
use acpi_tables::{Aml, AmlSink};
use devices::pci::PciAddress;

use super::{Bytes, bytes_of, system_device};
use crate::arch::layout::INTX_IRQS;
use crate::arch::segments;

/// All functions of a slot.
const ANY_FUNCTION: u32 = 0xffff;
/// Pin INTA#, as these tables number pins. A function that is alone in its slot uses no other.
const INTA: u8 = 0;

fn link_name(irq: u32) -> String {
    format!("LNK{:X}", irq - INTX_IRQS.start())
}

/// The link devices.
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

/// Where the pin of a slot leads.
struct Route(PciAddress);

impl Aml for Route {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        let Self(slot) = self;
        let address = (u32::from(slot.device) << 16) | ANY_FUNCTION;
        let link = Path::new(&format!("\\_SB_.{}", link_name(segments::intx_irq(*slot))));
        Package::new(vec![&address, &INTA, &link, &ZERO]).to_aml_bytes(sink);
    }
}

/// The routes of a segment's slots.
pub(super) fn routes(segment: u16) -> impl Aml {
    let slots = segments::slots(segment).map(|slot| Route(PciAddress::on_segment(segment, slot)));
    let routes: Vec<Route> = slots.collect();
    Made(bytes_of(&Package::new(routes.iter().map(|route| route as &dyn Aml).collect())))
}

/// AML that was made before, and that is owned.
struct Made(Vec<u8>);

impl Aml for Made {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        Bytes(&self.0).to_aml_bytes(sink);
    }
}
