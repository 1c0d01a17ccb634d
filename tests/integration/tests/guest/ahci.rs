// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! SATA drive on a passed-through AHCI controller. The controller's driver has not opted in to bouncing.

use carom_integration::devices::Figures;
use carom_integration::harness::guest_test;

use crate::support::driven::{assert_left_alone, drive_is_verified};
use crate::support::{MIB, SITE, required};

fn verified(choice: &str) -> Figures {
    let controller = required(SITE.ahci.as_ref(), "an AHCI controller (CAROM_AHCI)");
    drive_is_verified(&format!("ahci-{choice}"), controller, "ahci", choice)
}

#[guest_test(needs(Ahci), slow = "every_byte_of_a_bounced_sata_drive_is_right covers harder traffic")]
fn sata_drive_is_left_alone_by_default() {
    assert_left_alone(&verified("auto"));
}

#[guest_test(needs(Ahci))]
fn every_byte_of_a_bounced_sata_drive_is_right() {
    let figures = verified("on");

    // The job writes and reads 4 MiB in mixed sizes, so well over 200 requests bounce. Only the first requests might not
    // bounce, because the pool has no chunk yet.
    assert!(figures.bounced > 200, "{figures:?}");
    // Before a read, the kernel copies the buffer to the slot, because this driver does not promise that the drive overwrites
    // the whole buffer.
    assert!(figures.copied_in > 6 * MIB && figures.copied_out > 3 * MIB, "{figures:?}");
}
