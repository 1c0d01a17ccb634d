// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO passthrough with real devices: an NVMe drive and QEMU's `edu`, whose DMA engine the test steers.
//!
//! They run where `CAROM_NVME` and `CAROM_EDU` name such devices bound to vfio-pci, as in the rig:
//! `scripts/rig -- <this test's executable> --test-threads=1`, built with the feature `rig`. `CAROM_IOMMUFD=on` has them go by IOMMUFD instead of
//! groups and containers, and needs a kernel that has it: `scripts/rig --kernel iommufd`.

#![expect(clippy::unwrap_used, reason = "a test ends there")]

mod hardware;
mod locked_memory;
mod one_device;
mod oracle;
mod page_tables;
mod two_devices;
