// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! USB drive on a passed-through xHCI host controller, which uses many small rings and buffers. The controller's driver has not
//! opted in to bouncing.

use carom_integration::devices::Figures;
use carom_integration::harness::guest_test;

use crate::support::driven::{assert_left_alone, drive_is_verified};
use crate::support::{SITE, required};

fn verified(choice: &str) -> Figures {
    let controller = required(SITE.usb.as_ref(), "an xHCI host controller (CAROM_USB)");
    drive_is_verified(&format!("usb-{choice}"), controller, "xhci_hcd", choice)
}

#[guest_test(needs(Usb), slow = "every_byte_of_a_bounced_usb_drive_is_right covers harder traffic")]
fn usb_drive_is_left_alone_by_default() {
    assert_left_alone(&verified("auto"));
}

#[guest_test(needs(Usb), slow = "network:: covers another device whose driver has not opted in")]
fn every_byte_of_a_bounced_usb_drive_is_right() {
    let figures = verified("on");

    // Each request to the drive has three mappings: for the command, the status and the data.
    assert!(figures.bounced > 200, "{figures:?}");
}
