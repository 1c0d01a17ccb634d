// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

mod bus;
mod hostile;
mod iommu;
mod lifecycle;
mod net;
mod reconnect;
mod server;
mod support;
