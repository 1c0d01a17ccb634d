// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Library of the scripts. Each script builds the program `carom-tools`, and then replaces itself with this program
//! (`scripts/lib/common.sh`).
//!
//! [`Tools`] runs programs, keeps results in the cache ([`cache`]) under keys of their inputs ([`key`]), and installs or fetches
//! Debian packages ([`packages`], [`apt`]). Other modules build guest kernels ([`kernel`]), initramfs ([`initramfs`],
//! [`archive`]) and the files of the rig ([`rig`], [`emulator`]). [`test`], [`demo`] and [`bench`] build what their guests need
//! ([`assets`], [`mod@cargo`]).

mod apt;
pub mod archive;
mod assets;
pub mod bench;
mod cache;
mod cargo;
pub mod check;
pub mod children;
mod commands;
pub mod demo;
pub mod distribution;
mod emulator;
mod files;
mod fio;
pub mod firmware;
pub mod initramfs;
pub mod kernel;
mod key;
pub mod kunit;
pub mod kvm;
mod mails;
mod measuring;
mod modules;
pub mod package;
mod packaged_kernel;
mod packages;
pub mod peers;
mod priority;
pub mod progress;
pub mod rig;
pub mod series;
pub mod signals;
pub mod test;
mod tools;
pub mod vm;
pub mod work_dir;

pub use tools::{Tools, Usage, checkout};
