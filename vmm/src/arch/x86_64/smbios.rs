// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! SMBIOS tables: the names of the machine (DMTF DSP0134, System Management BIOS reference specification 3.7). Linux looks for the tables'
//! entry point between 0xf0000 and 0xfffff. EDK2 looks for the entry point at 0xf0000. Linux shows the names in `/sys/class/dmi/id`.
//! Numbers in parentheses are sections of the specification.

use carom_api::config::PlatformConfig;
use devices::ram::Ram;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use super::layout::{SMBIOS_ENTRY, SMBIOS_TABLES, SMBIOS_TABLES_END};

/// Version of the specification that the tables follow.
const VERSION: (u8, u8) = (3, 2);
/// Bytes of the entry point (5.2.2).
const ENTRY_LEN: u8 = 24;
/// Default manufacturer, and vendor of the virtual firmware.
const MANUFACTURER: &str = "Carom";
/// Default product name.
const PRODUCT: &str = "Carom virtual machine";

/// Types of structures (7).
mod kind {
    pub(super) const FIRMWARE: u8 = 0;
    pub(super) const SYSTEM: u8 = 1;
    pub(super) const CHASSIS: u8 = 3;
    pub(super) const OEM_STRINGS: u8 = 11;
    pub(super) const END: u8 = 127;
}

/// Structure: its formatted part, and the strings that the formatted part refers to by number.
struct Structure {
    bytes: Vec<u8>,
    strings: Vec<String>,
}

impl Structure {
    fn new(kind: u8) -> Self {
        // `append_to` fills in the length and the handle.
        Self { bytes: vec![kind, 0, 0, 0], strings: Vec::new() }
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend(bytes);
        self
    }

    /// Appends the number of a string, and keeps the string for the end of the structure. A missing or empty string has number 0.
    fn text(mut self, text: Option<&str>) -> Self {
        let number = match text {
            Some(text) if !text.is_empty() => {
                self.strings.push(text.into());
                u8::try_from(self.strings.len()).expect("a structure has few strings")
            }
            _ => 0,
        };
        self.bytes.push(number);
        self
    }

    /// Appends the structure to the table (6.1.2, 6.1.3).
    fn append_to(mut self, table: &mut Vec<u8>, handle: u16) {
        self.bytes[1] = u8::try_from(self.bytes.len()).expect("the formatted part of a structure is short");
        self.bytes[2..4].copy_from_slice(&handle.to_le_bytes());
        table.append(&mut self.bytes);
        for text in &self.strings {
            table.extend(text.as_bytes());
            table.push(0);
        }
        if self.strings.is_empty() {
            table.push(0);
        }
        table.push(0);
    }
}

/// Returns all structures for a VM of this configuration.
fn structures(platform: &PlatformConfig) -> Vec<Structure> {
    let uuid = platform.uuid().unwrap_or_default();
    let firmware = Structure::new(kind::FIRMWARE)
        .text(Some(MANUFACTURER))
        .text(Some(env!("CARGO_PKG_VERSION")))
        // The firmware has no start address in real mode, no release date and no size.
        .bytes(&[0, 0])
        .text(None)
        .bytes(&[0])
        // No characteristics except the bit of a virtual machine (7.1.2.2, bit 4).
        .bytes(&(1u64 << 3).to_le_bytes())
        .bytes(&[0, 1 << 4])
        // The releases of the firmware and of the embedded controller are unknown.
        .bytes(&[0xff; 4])
        .bytes(&[0, 0]);
    let system = Structure::new(kind::SYSTEM)
        .text(platform.system_manufacturer.as_deref().or(Some(MANUFACTURER)))
        .text(platform.system_product_name.as_deref().or(Some(PRODUCT)))
        .text(platform.system_version.as_deref())
        .text(platform.serial())
        .bytes(&uuid.to_bytes_le())
        // Wake-up type: power switch (7.2.2).
        .bytes(&[6])
        .text(platform.system_sku_number.as_deref())
        .text(platform.system_family.as_deref());
    let chassis = Structure::new(kind::CHASSIS)
        .text(platform.system_manufacturer.as_deref().or(Some(MANUFACTURER)))
        // Type of the chassis: other (7.4.1). The states that follow are unknown (value 2).
        .bytes(&[1])
        .text(None)
        .text(None)
        .text(platform.chassis_asset_tag.as_deref())
        .bytes(&[2, 2, 2, 2])
        .bytes(&[0; 4])
        // Height, power cords, contained elements.
        .bytes(&[0, 0, 0, 0])
        .text(None);
    let mut all = vec![firmware, system, chassis];
    if let Ok(count @ 1..) = u8::try_from(platform.oem_strings.len()) {
        let mut oem = Structure::new(kind::OEM_STRINGS).bytes(&[count]);
        oem.strings.clone_from(&platform.oem_strings);
        all.push(oem);
    }
    all.push(Structure::new(kind::END));
    all
}

/// Encoded tables.
#[derive(Debug)]
pub struct Tables {
    entry: [u8; ENTRY_LEN as usize],
    table: Vec<u8>,
}

impl Tables {
    /// Builds the tables of a VM whose configuration is validated.
    pub fn new(platform: &PlatformConfig) -> Self {
        let mut table = Vec::new();
        for (handle, structure) in (0..).zip(structures(platform)) {
            structure.append_to(&mut table, handle);
        }
        let len = u32::try_from(table.len()).expect("the lengths of strings are bounded");
        let mut entry = [0; ENTRY_LEN as usize];
        entry[..5].copy_from_slice(b"_SM3_");
        entry[6] = ENTRY_LEN;
        (entry[7], entry[8]) = VERSION;
        // Revision of the entry point.
        entry[10] = 1;
        entry[12..16].copy_from_slice(&len.to_le_bytes());
        entry[16..].copy_from_slice(&SMBIOS_TABLES.to_le_bytes());
        entry[5] = entry.iter().fold(0u8, |sum, byte| sum.wrapping_sub(*byte));
        Self { entry, table }
    }

    /// Writes the tables to guest memory.
    ///
    /// # Errors
    /// The addresses are not guest memory.
    pub fn write(&self, memory: &Ram) -> Result<(), GuestMemoryError> {
        assert!(SMBIOS_TABLES + self.table.len() as u64 <= SMBIOS_TABLES_END, "the tables must fit in their area");
        memory.write_slice(&self.table, GuestAddress(SMBIOS_TABLES))?;
        memory.write_slice(&self.entry, GuestAddress(SMBIOS_ENTRY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the structures as a reader sees them: type, formatted part, strings.
    fn read(mut table: &[u8]) -> Vec<(u8, Vec<u8>, Vec<String>)> {
        let mut all = Vec::new();
        while !table.is_empty() {
            let (formatted, rest) = table.split_at(table[1].into());
            let end = rest.windows(2).position(|pair| pair == [0, 0]).unwrap();
            let strings = rest[..end].split(|byte| *byte == 0).filter(|text| !text.is_empty());
            let strings = strings.map(|text| String::from_utf8(text.to_vec()).unwrap()).collect();
            all.push((formatted[0], formatted.to_vec(), strings));
            table = &rest[end + 2..];
        }
        all
    }

    fn platform(json: &str) -> PlatformConfig {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn plain_machine_has_the_required_smbios_structures() {
        let tables = Tables::new(&PlatformConfig::default());
        assert_eq!(tables.entry.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!(&tables.entry[..5], b"_SM3_");
        let structures = read(&tables.table);
        let kinds: Vec<u8> = structures.iter().map(|(kind, ..)| *kind).collect();
        assert_eq!(kinds, [0, 1, 3, 127]);
        // Each structure has the minimum length in version 3.2 of the specification (7.1 to 7.4).
        let lengths: Vec<usize> = structures.iter().map(|(_, formatted, _)| formatted.len()).collect();
        assert_eq!(lengths, [0x1a, 0x1b, 0x16, 4]);
        assert_eq!(structures[1].2, [MANUFACTURER, PRODUCT]);
    }

    #[test]
    fn strings_and_uuid_are_where_readers_look_for_them() {
        let platform = platform(
            r#"{"system_manufacturer": "M", "system_product_name": "P", "system_version": "V", "serial_number": "S",
                "uuid": "00112233-4455-6677-8899-aabbccddeeff", "system_sku_number": "K", "system_family": "F",
                "chassis_asset_tag": "A", "oem_strings": ["one", "two"]}"#,
        );
        let structures = read(&Tables::new(&platform).table);
        let (_, system, strings) = &structures[1];
        assert_eq!(strings, &["M", "P", "V", "S", "K", "F"]);
        assert_eq!((&system[4..8], &system[0x19..0x1b]), (&[1, 2, 3, 4][..], &[5, 6][..]));
        // The first three parts of a UUID are little-endian (7.2.1).
        let uuid = [0x33, 0x22, 0x11, 0, 0x55, 0x44, 0x77, 0x66, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff];
        assert_eq!(system[8..0x18], uuid);
        assert_eq!((structures[2].1[8], &structures[2].2[..]), (2, &["M".to_string(), "A".into()][..]));
        assert_eq!((structures[3].1[4], &structures[3].2[..]), (2, &["one".to_string(), "two".into()][..]));
    }

    #[test]
    fn tables_of_the_largest_configuration_fit() {
        let most = "x".repeat(PlatformConfig::MAX_STRINGS / 255 - 1);
        let platform = PlatformConfig { oem_strings: vec![most; 255], ..PlatformConfig::default() };
        platform.check().unwrap();
        let room = usize::try_from(SMBIOS_TABLES_END - SMBIOS_TABLES).unwrap();
        assert!((room - 0x2000..=room).contains(&Tables::new(&platform).table.len()));
        // The tables contain the manufacturer twice, so the manufacturer may have at most half the maximum length of all strings.
        for len in [20_000, PlatformConfig::MAX_STRINGS / 2 - 1, 33_000, 40_000, PlatformConfig::MAX_STRINGS - 1] {
            let platform = PlatformConfig { system_manufacturer: Some("x".repeat(len)), ..PlatformConfig::default() };
            assert_eq!(platform.check().is_ok(), len < PlatformConfig::MAX_STRINGS / 2, "{len}");
            assert!(platform.check().is_err() || Tables::new(&platform).table.len() <= room, "{len}");
        }
    }
}
