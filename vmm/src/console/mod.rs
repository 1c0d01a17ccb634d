// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections of a guest's console, which is its serial port or its virtio-console ([`ConsoleLinks`]): a file or standard output
//! ([`ConsoleOutput`]), the user's terminal ([`Terminal`]), or a line to a peer that may connect and disconnect, over a pseudoterminal
//! or a socket ([`Line`]).

mod line;
mod links;
mod output;
mod peer;
mod receiver;
pub mod terminal;

pub use line::Line;
pub use links::ConsoleLinks;
pub use output::ConsoleOutput;
pub use receiver::{Names, Receiver};
pub use terminal::Terminal;
