// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Code where a PC's firmware would start after a reset.
//!
//! Linux restarts a machine of hardware-reduced ACPI by EFI if it is built with EFI, as distributions' kernels are
//! (`efi_reboot_required` in `arch/x86/platform/efi/quirks.c`). Where it was not booted by EFI, it falls back to a jump in
//! real mode to the firmware's entry. So something has to be there that resets the machine.

use devices::acpi::power::{RESET_OFFSET, RESET_VALUE};
use devices::ram::Ram;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::arch::layout::{ACPI_PORTS, RESET_VECTOR};

/// Writes the code.
pub(super) fn write(memory: &Ram) -> Result<(), GuestMemoryError> {
    memory.write_slice(&code(), GuestAddress(RESET_VECTOR))
}

/// Code of 16 bits that writes to ACPI's reset register, and waits for good.
fn code() -> [u8; 9] {
    let [low, high] = reset_port().to_le_bytes();
    [
        0xba,
        low,
        high, // mov dx, port
        0xb0,
        RESET_VALUE, // mov al, value
        0xee,        // out dx, al
        0xf4,        // hlt
        0xeb,
        0xfd, // jmp to the hlt
    ]
}

/// ACPI's reset register.
const fn reset_port() -> u16 {
    let port = ACPI_PORTS + RESET_OFFSET;
    assert!(port <= u16::MAX as u64, "a port has 16 bits");
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    {
        port as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_writes_the_reset_port_and_fits_below_a_mib() {
        assert_eq!(code(), [0xba, 0x02, 0x06, 0xb0, 0x01, 0xee, 0xf4, 0xeb, 0xfd]);
        let memory = Ram::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        write(&memory).unwrap();
        assert_eq!(memory.read_obj::<[u8; 9]>(GuestAddress(0xf_fff0)).unwrap(), code());
    }
}
