// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device behind its transport, with a driver that the tests play.

mod harness;
mod hostile;
mod life;
mod model;
mod work;
