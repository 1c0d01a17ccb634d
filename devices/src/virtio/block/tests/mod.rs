// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the disk device through its PCI transport. The tests act as the driver.

mod harness;
mod hostile;
mod lifecycle;
mod limits;
mod model;
mod notifications;
mod qcow2;
mod work;
