// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device behind its transport, with a driver that the tests play.

mod harness;
mod hostile;
mod life;
mod limits;
mod model;
mod notifications;
mod qcow2;
mod work;
