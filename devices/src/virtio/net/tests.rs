// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device behind its transport, with a driver and an interface of the host that the tests play.

mod gone;
mod harness;
mod hostile;
mod limits;
mod packets;
mod queues;
mod turns;
