// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of devices. Each device defines its counters with [`counters!`].

use std::sync::atomic::{AtomicU64, Ordering};

/// Named count that never decreases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// Name, such as `requests`.
    pub name: &'static str,
    /// Meaning of the count, in one sentence.
    pub help: &'static str,
    /// Amount counted since the device was created.
    pub value: u64,
}

/// Adds `more` to a counter. Other threads may see the changes of several counters in any order.
pub(crate) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

/// Defines the counters of a device from their names and help texts. Generates two structures. `Counts` holds the counters that the
/// device's threads update. `$values` holds the values that one read of `Counts` returned.
macro_rules! counters {
    ($(#[$about:meta])* $values:ident { $($name:ident: $help:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $values {
            $(#[doc = $help] pub $name: u64,)*
        }

        impl $values {
            /// Returns all counters with their names, help texts and values.
            pub fn all(&self) -> Vec<$crate::counters::Counter> {
                vec![$($crate::counters::Counter { name: stringify!($name), help: $help, value: self.$name },)*]
            }
        }

        /// Counters that the device's threads update.
        #[derive(Default)]
        pub(super) struct Counts {
            $(pub(super) $name: std::sync::atomic::AtomicU64,)*
        }

        impl Counts {
            /// Returns the current values of all counters.
            pub(super) fn read(&self) -> $values {
                $values { $($name: self.$name.load(std::sync::atomic::Ordering::Relaxed),)* }
            }
        }
    };
}
pub(crate) use counters;
