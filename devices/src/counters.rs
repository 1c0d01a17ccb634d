// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of devices. A device names each of its counters once, in [`counters!`].

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Its name, such as `requests`.
    pub name: &'static str,
    /// Its meaning, in a sentence.
    pub help: &'static str,
    /// How much it has counted since the device was made.
    pub value: u64,
}

/// Adds `more` to a counter, whose order to others says nothing.
pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// Defines the counters of a device by name and help: a structure of their values, and `Counts`, which threads of the device count by.
macro_rules! counters {
    ($(#[$about:meta])* $values:ident { $($name:ident: $help:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $values {
            $(#[doc = $help] pub $name: u64,)*
        }

        impl $values {
            /// All counters.
            pub fn all(&self) -> Vec<$crate::counters::Counter> {
                vec![$($crate::counters::Counter { name: stringify!($name), help: $help, value: self.$name },)*]
            }
        }

        /// Counters, as threads of the device count.
        #[derive(Default)]
        pub(super) struct Counts {
            $(pub(super) $name: std::sync::atomic::AtomicU64,)*
        }

        impl Counts {
            /// Reads all counters.
            pub(super) fn read(&self) -> $values {
                $values { $($name: self.$name.load(std::sync::atomic::Ordering::Relaxed),)* }
            }
        }
    };
}
pub(crate) use counters;
