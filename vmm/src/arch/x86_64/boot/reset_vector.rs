// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Code at the address where a PC's firmware starts after a reset.
//!
//! Distribution kernels are built with EFI. Such a kernel restarts a hardware-reduced ACPI machine through EFI
//! (`efi_reboot_required` in `arch/x86/platform/efi/quirks.c`). If EFI has not booted the kernel, the kernel jumps in
//! real mode to the entry of the firmware instead. Carom's code at this entry resets the machine.

use devices::acpi::power::{RESET_OFFSET, RESET_VALUE};
use devices::ram::Ram;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::arch::layout::{ACPI_PORTS, RESET_VECTOR};

/// Writes the code.
pub(super) fn write(memory: &Ram) -> Result<(), GuestMemoryError> {
    memory.write_slice(&code(), GuestAddress(RESET_VECTOR))
}

/// Returns 16-bit code that writes to ACPI's reset register, and then halts for ever.
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

/// Returns the port of ACPI's reset register.
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
