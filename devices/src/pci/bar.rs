// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Base address registers.

/// Kind of addresses that a base address register claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// I/O ports.
    Io,
    /// Memory below 4 GiB.
    Memory32 {
        /// True if reads have no side effect.
        prefetchable: bool,
    },
    /// Memory at any 64-bit address. The BAR occupies two of the six 32-bit registers.
    Memory64 {
        /// True if reads have no side effect.
        prefetchable: bool,
    },
}

impl BarKind {
    /// Returns the read-only low bits of the register (PCI Local Bus 3.0, section 6.2.5.1).
    pub fn flags(self) -> u32 {
        match self {
            Self::Io => 1,
            Self::Memory32 { prefetchable } => u32::from(prefetchable) << 3,
            Self::Memory64 { prefetchable } => 0b100 | (u32::from(prefetchable) << 3),
        }
    }

    /// True if the BAR occupies two of the six 32-bit registers.
    pub fn is_64bit(self) -> bool {
        matches!(self, Self::Memory64 { .. })
    }
}

/// Base address register: its number, kind and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Register number, 0 to 5.
    pub index: u8,
    /// Kind of addresses that the register claims.
    pub kind: BarKind,
    /// Size in bytes, a power of two, at least 16 for memory and 4 for I/O.
    pub size: u64,
}
