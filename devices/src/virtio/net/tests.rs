// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device through its PCI transport. The tests act as the driver and as the host interface.

mod gone;
mod harness;
mod hostile;
mod limits;
mod packets;
mod queues;
mod turns;
