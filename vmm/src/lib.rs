// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Carom: command line, VM life cycle, memory, vCPUs, boot and wiring.
