// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO passthrough with real devices: an NVMe drive, and two `edu` devices of QEMU, whose DMA engines the tests control.
//!
//! The tests need devices bound to vfio-pci. `CAROM_NVME`, `CAROM_EDU` and `CAROM_EDU2` name these devices. Build the tests with the
//! feature `rig`. Then run `scripts/rig -- <this test's executable> --test-threads=1`, which sets the variables.
//!
//! With `CAROM_IOMMUFD=on`, the tests use IOMMUFD instead of groups and containers. This needs a kernel
//! with IOMMUFD: `scripts/rig --kernel iommufd`.

#![expect(clippy::unwrap_used, reason = "a test ends there")]

mod hardware;
mod locked_memory;
mod one_device;
mod oracle;
mod page_tables;
mod two_devices;
