// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the guest's serial port is connected with: a file or standard output ([`SerialOutput`]), the user's terminal
//! ([`Terminal`]), or a line to whoever comes and goes, by a pseudoterminal or a socket ([`Line`]).

mod line;
mod output;
mod peer;
mod terminal;

pub use line::Line;
pub use output::SerialOutput;
pub use terminal::Terminal;
