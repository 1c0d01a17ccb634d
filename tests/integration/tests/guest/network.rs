// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Passed-through network cards, which do many small DMA transfers in both directions. The drivers of these cards have not
//! opted in to bouncing. The e1000e driver maps each receive buffer. The igb driver keeps its pages mapped and synchronises
//! parts of them.

use carom_integration::devices::Figures;
use carom_integration::harness::guest_test;

use crate::support::driven::{assert_left_alone, bytes_come_back};
use crate::support::{MIB, SITE, required};

/// Number of bytes that the guest sends to the server, and that the server sends back.
const TRAFFIC: u64 = 2 * MIB;

fn e1000e(choice: &str) -> Figures {
    let card = required(SITE.net.as_ref(), "a network card (CAROM_NET)");
    bytes_come_back(&format!("network-{choice}"), card, "e1000e", choice, TRAFFIC)
}

fn igb(choice: &str) -> Figures {
    let card = required(SITE.igb.as_ref(), "an igb network card (CAROM_IGB)");
    bytes_come_back(&format!("network-igb-{choice}"), card, "igb", choice, TRAFFIC)
}

#[guest_test(needs(Net), slow = "every_byte_of_a_bounced_network_card_is_right covers harder traffic")]
fn network_card_is_left_alone_by_default() {
    assert_left_alone(&e1000e("auto"));
}

#[guest_test(needs(Net))]
fn every_byte_of_a_bounced_network_card_is_right() {
    let figures = e1000e("on");

    // Each packet, sent or received, needs at least one mapping.
    assert!(figures.bounced > TRAFFIC / 1500, "{figures:?}");
    // The first packets might not bounce, because the pool has no chunk yet.
    let least = TRAFFIC / 2;
    assert!(figures.copied_in > least && figures.copied_out > least, "{figures:?}");
}

#[guest_test(needs(Igb), slow = "every_byte_of_a_bounced_card_that_keeps_its_pages_is_right covers harder traffic")]
fn card_that_keeps_its_pages_is_left_alone_by_default() {
    assert_left_alone(&igb("auto"));
}

#[guest_test(needs(Igb))]
fn every_byte_of_a_bounced_card_that_keeps_its_pages_is_right() {
    let figures = igb("on");

    // Only sent packets bounce. The driver maps its receive pages with the attribute for mappings that the driver itself
    // synchronises.
    assert!(figures.copied_in > TRAFFIC / 2, "{figures:?}");
    assert!(figures.refused_by_attributes > 0 && figures.elision_lost > 0, "{figures:?}");
    assert_eq!((figures.copied_out, figures.syncs), (0, 0), "{figures:?}");
}
