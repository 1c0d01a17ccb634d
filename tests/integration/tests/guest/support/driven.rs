// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests with a passed-through device whose driver has not opted in to bouncing.

use carom_integration::devices::{self, Figures, Peer};
use carom_integration::{Guest, Outcome, workload};

use super::run;

/// Runs a job of [`devices`] in a guest whose VMM offers windows, with the device behind the IOMMU. Prints the job's figures.
fn driven(name: &str, device: &str, job: &str) -> (Outcome, Figures) {
    let outcome = run(&Guest::new(name).iommu_device(device).bounce("size=32M").cmdline("iommu.strict=1").job(job));
    let figures = devices::figures(&outcome).unwrap_or_else(|error| panic!("{error:#}"));
    let [figures] = figures[..] else { panic!("not the figures of one device: {figures:?}") };
    let requests = outcome.counters.last().expect("the VMM reports its counters at the end").requests;
    println!("{name}: {figures}; {} MAP, {} WINDOW_ADD", requests.maps(), requests.window_add);
    (outcome, figures)
}

/// Checks I/O on the drive of a controller. `choice` is the value for the controller's `iommu_bounce/mode`.
pub(crate) fn drive_is_verified(name: &str, controller: &str, driver: &str, choice: &str) -> Figures {
    let (outcome, figures) = driven(name, controller, &devices::drive_job(driver, choice, 4, 4));
    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    figures
}

/// Checks that `bytes` bytes in large packets and 64 KiB in small packets come back unchanged from the rig's server.
pub(crate) fn bytes_come_back(name: &str, card: &str, driver: &str, choice: &str, bytes: u64) -> Figures {
    let (outcome, figures) = driven(name, card, &devices::card_job(driver, choice, &Peer::of_the_rig(bytes)));
    devices::check_same(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    figures
}

/// Asserts that nothing bounced, that the pool requested no memory, and that the kernel still skips the device's sync calls.
pub(crate) fn assert_left_alone(figures: &Figures) {
    let Figures { bounced, chunk_adds, elision_lost, .. } = *figures;
    assert_eq!((bounced, chunk_adds, elision_lost), (0, 0, 0), "{figures:?}");
}
