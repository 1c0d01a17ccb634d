// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu engine and its bounce windows: requests in, status out.
#![forbid(unsafe_code)]
