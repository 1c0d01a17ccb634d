// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

mod device;
mod guest;
mod harness;
mod hostile;
mod hub;
