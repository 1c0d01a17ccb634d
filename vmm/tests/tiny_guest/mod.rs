// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guests with a few instructions.

/// Load address of the guest's code.
const ENTRY: u32 = 0x20_0000;

/// Returns an ELF image of `code` with a PVH entry point.
pub(crate) fn elf(code: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 2 * 56;
    let entry = u64::from(ENTRY);
    let mut note = Vec::new();
    // Lengths of name and value, XEN_ELFNOTE_PHYS32_ENTRY.
    [4, 4, 18u32].iter().for_each(|word| note.extend(word.to_le_bytes()));
    note.extend(b"Xen\0");
    note.extend(ENTRY.to_le_bytes());
    let note_len = note.len() as u64;

    let mut image = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // ET_EXEC, EM_X86_64, version. Then the entry, the offset of program headers, no section headers, flags, sizes and numbers.
    image.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    [entry, 64, 0].iter().for_each(|word| image.extend(word.to_le_bytes()));
    image.extend([0; 4]);
    [64, 56, 2, 64, 0, 0u16].iter().for_each(|half| image.extend(half.to_le_bytes()));
    let code_len = code.len() as u64;
    // PT_NOTE and PT_LOAD. Both may be read and executed.
    for (kind, offset, address, len) in [(4u32, HEADERS, 0, note_len), (1, HEADERS + note_len, entry, code_len)] {
        [kind, 5].iter().for_each(|word| image.extend(word.to_le_bytes()));
        [offset, address, address, len, len, 4].iter().for_each(|word| image.extend(word.to_le_bytes()));
    }
    image.extend(note);
    image.extend(code);
    image
}
