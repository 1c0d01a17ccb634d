// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections of a guest's console ([`ConsoleLinks`]), which is the serial port or the virtio-console. A console can be connected to a
//! file or standard output ([`ConsoleOutput`]), or to the user's terminal ([`Terminal`]). It can also be connected to a pseudoterminal or
//! a socket, whose peer can connect and disconnect ([`Line`]).

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
