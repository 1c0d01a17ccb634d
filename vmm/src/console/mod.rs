// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a console of the guest, its serial port or its virtio-console, is connected with ([`ConsoleLinks`]): a file or standard output
//! ([`ConsoleOutput`]), the user's terminal ([`Terminal`]), or a line to whoever comes and goes, by a pseudoterminal or a socket
//! ([`Line`]).

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
