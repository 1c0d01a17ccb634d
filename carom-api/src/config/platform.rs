// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VM uses of the host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::{Field, keys};
use crate::left_out::{number, yes};
use crate::limits::MAX_PCI_SEGMENTS;
use crate::option_list::{FromOption, Special, defaults, from_str};

/// What the VM uses of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlatformConfig {
    /// Whether devices of the host are reached by IOMMUFD rather than by VFIO's groups and containers.
    #[serde(default)]
    pub iommufd: bool,
    /// Whether a thread polls for requests of the virtio-iommu while they come fast.
    #[serde(default)]
    pub iommu_poll: IommuPoll,
    /// PCI segments that the guest has, 1 to 16. Devices are on segment 0 unless their `pci_segment` says another.
    #[serde(default = "number::<1, _>")]
    #[schema(minimum = 1, maximum = 16)]
    pub num_pci_segments: u16,
    /// Segments whose devices are behind the virtio-iommu, all of them, whether their `iommu` is on or not.
    #[serde(default)]
    #[schema(max_items = 16)]
    pub iommu_segments: Vec<u16>,
    /// Bits of the addresses that the virtio-iommu translates at most, 32 to 64; fewer where the host's IOMMU has fewer.
    #[serde(default = "default_iommu_address_width_bits")]
    #[schema(minimum = 32, maximum = 64)]
    pub iommu_address_width_bits: u8,
    /// True if the guest has a VM Generation ID, an ACPI device that tells it when the VM was restored from a snapshot.
    #[serde(default = "yes")]
    pub vmgenid: bool,
    /// The machine's manufacturer, as its SMBIOS tables have it.
    pub system_manufacturer: Option<String>,
    /// Its name, likewise.
    pub system_product_name: Option<String>,
    /// Its version, likewise.
    pub system_version: Option<String>,
    /// Its serial number, likewise.
    pub system_serial_number: Option<String>,
    /// The same by an older name.
    pub serial_number: Option<String>,
    /// Its UUID, likewise.
    pub system_uuid: Option<String>,
    /// The same by an older name.
    pub uuid: Option<String>,
    /// Number of the product in the manufacturer's list, likewise.
    pub system_sku_number: Option<String>,
    /// The family that the product belongs to, likewise.
    pub system_family: Option<String>,
    /// Asset tag of its chassis, likewise.
    pub chassis_asset_tag: Option<String>,
    /// Strings for the guest's own use, likewise, 255 at most.
    #[serde(default)]
    #[schema(max_items = 255)]
    pub oem_strings: Vec<String>,
}

fn default_iommu_address_width_bits() -> u8 {
    64
}

/// Whether a thread polls for requests of the virtio-iommu while they come fast, rather than have vCPUs leave the guest for
/// each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IommuPoll {
    /// If the host has more CPUs for this process than the VM boots with vCPUs, and only while it has more than there are.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl PlatformConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--platform", "platform");
    keys! {
        IOMMUFD = "iommufd", OEM_STRINGS = "oem_strings", NUM_PCI_SEGMENTS = "num_pci_segments",
        IOMMU_SEGMENTS = "iommu_segments",
    }

    /// Most bytes of all strings of the SMBIOS tables together, with a byte of each for its end. The manufacturer is there twice.
    pub const MAX_STRINGS: usize = 60 << 10;

    /// [`Self::iommu_address_width_bits`].
    pub const IOMMU_ADDRESS_WIDTH: Field = Self::OPTION.keys("iommu_address_width", "iommu_address_width_bits");

    /// The strings of the SMBIOS tables that there is one of each, by key.
    fn smbios_strings(&self) -> [(&'static str, &Option<String>); 10] {
        [
            ("system_manufacturer", &self.system_manufacturer),
            ("system_product_name", &self.system_product_name),
            ("system_version", &self.system_version),
            ("system_serial_number", &self.system_serial_number),
            ("serial_number", &self.serial_number),
            ("system_uuid", &self.system_uuid),
            ("uuid", &self.uuid),
            ("system_sku_number", &self.system_sku_number),
            ("system_family", &self.system_family),
            ("chassis_asset_tag", &self.chassis_asset_tag),
        ]
    }

    /// The serial number, by whichever name it is given.
    pub fn serial(&self) -> Option<&str> {
        self.system_serial_number.as_deref().or(self.serial_number.as_deref())
    }

    /// The UUID, by whichever name it is given, once it was checked.
    pub fn uuid(&self) -> Option<Uuid> {
        self.system_uuid.as_deref().or(self.uuid.as_deref()).and_then(|uuid| uuid.parse().ok())
    }

    fn check_smbios(&self) -> Result<(), ConfigError> {
        let mut len = 0;
        let mut check_text = |field: Field, text: &str, copies: usize| {
            len += (text.len() + 1) * copies;
            let is_plain = !text.chars().any(char::is_control);
            ensure(is_plain, field, || "has a control character, which no string of SMBIOS has")?;
            let most = Self::MAX_STRINGS;
            ensure(len <= most, field, || format!("has the strings of SMBIOS take more than {most} bytes"))
        };
        for (key, text) in self.smbios_strings() {
            // System and chassis both have the manufacturer.
            let copies = if key == "system_manufacturer" { 2 } else { 1 };
            text.as_deref().map_or(Ok(()), |text| check_text(Self::OPTION.key(key), text, copies))?;
        }
        for text in &self.oem_strings {
            check_text(Self::OEM_STRINGS, text, 1)?;
            ensure(!text.is_empty(), Self::OEM_STRINGS, || "has an empty string, which SMBIOS cannot have")?;
        }
        let few = self.oem_strings.len() <= usize::from(u8::MAX);
        ensure(few, Self::OEM_STRINGS, || "has more than 255 strings")?;
        let twice = [
            ("system_serial_number", &self.system_serial_number, "serial_number", &self.serial_number),
            ("system_uuid", &self.system_uuid, "uuid", &self.uuid),
        ];
        for (key, new, old_key, old) in twice {
            let agree = new.is_none() || old.is_none() || new == old;
            ensure_in_terms(agree, Self::OPTION.key(key), |terms| {
                format!("is another than {}, which is an older name for it", Self::OPTION.key(old_key).name(terms))
            })?;
        }
        for (key, uuid) in [("system_uuid", &self.system_uuid), ("uuid", &self.uuid)] {
            let uuid = uuid.as_ref().map_or(Ok(Uuid::nil()), |text| text.parse());
            uuid.map_err(|error| ConfigError::new(Self::OPTION.key(key), format!("is no UUID: {error}")))?;
        }
        Ok(())
    }

    /// Checks the number of segments, those behind the virtio-iommu, the width of its addresses, and the strings of the SMBIOS tables.
    ///
    /// # Errors
    /// There are none or too many, one is not among them or given twice, a width is out of range, or a string is none of SMBIOS.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_smbios()?;
        let (segments, most) = (self.num_pci_segments, MAX_PCI_SEGMENTS);
        let fits = (1..=most).contains(&segments);
        ensure(fits, Self::NUM_PCI_SEGMENTS, || format!("{segments} is not in 1 to {most}"))?;
        let bits = self.iommu_address_width_bits;
        ensure((32..=64).contains(&bits), Self::IOMMU_ADDRESS_WIDTH, || format!("{bits} bits are not 32 to 64"))?;
        for (place, segment) in self.iommu_segments.iter().enumerate() {
            self.check_segment(Self::IOMMU_SEGMENTS, *segment)?;
            let is_first = !self.iommu_segments[..place].contains(segment);
            ensure(is_first, Self::IOMMU_SEGMENTS, || format!("{segment} is given twice"))?;
        }
        Ok(())
    }

    /// Checks that there is a segment which `field` names.
    ///
    /// # Errors
    /// There is not.
    pub fn check_segment(&self, field: Field, segment: u16) -> Result<(), ConfigError> {
        let last = self.num_pci_segments.saturating_sub(1);
        ensure_in_terms(segment < self.num_pci_segments, field, |terms| {
            let number = Self::NUM_PCI_SEGMENTS.name(terms);
            format!("there is no segment {segment}, the last is {last} ({number})")
        })
    }
}

impl Default for PlatformConfig {
    fn default() -> Self {
        defaults()
    }
}

impl FromOption for PlatformConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[
        Special::Name(Self::IOMMU_ADDRESS_WIDTH),
        Special::Rule("num_pci_segments", |text| format!("'{text}' is no number of segments")),
    ];
}
from_str!(PlatformConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field::Terms;

    #[test]
    fn width_of_addresses_is_32_to_64_bits() {
        let width = |text: &str| {
            let platform: PlatformConfig = text.parse()?;
            platform.check().map(|()| platform.iommu_address_width_bits)
        };
        assert_eq!((width("iommufd=on").unwrap(), width("iommu_address_width=39").unwrap()), (64, 39));
        for bits in [31, 65] {
            let error = width(&format!("iommu_address_width={bits}")).unwrap_err();
            assert_eq!(error.to_string(), format!("--platform iommu_address_width: {bits} bits are not 32 to 64"));
            assert_eq!(error.field.name(Terms::Json), "platform.iommu_address_width_bits");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a string as long as may be takes Miri minutes")]
    fn strings_of_smbios_are_read_and_what_cannot_be_one_is_refused() {
        let platform =
            |text: &str| text.parse::<PlatformConfig>().and_then(|platform| platform.check().map(|()| platform));
        let all =
            platform("uuid=00112233-4455-6677-8899-aabbccddeeff,serial_number=\"a, b\",oem_strings=[x=1,y]").unwrap();
        assert_eq!(all.uuid(), Some(Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff)));
        assert_eq!((all.serial(), &all.oem_strings[..]), (Some("a, b"), &["x=1".to_string(), "y".into()][..]));
        assert_eq!(platform("oem_strings=one").unwrap().oem_strings, ["one"]);
        let long = format!("system_family={}", "x".repeat(PlatformConfig::MAX_STRINGS));
        // System and chassis both have the manufacturer.
        let maker = |len| format!("system_manufacturer={}", "x".repeat(len));
        platform(&maker(PlatformConfig::MAX_STRINGS / 2 - 1)).unwrap();
        let twice_too_long = maker(PlatformConfig::MAX_STRINGS / 2);
        for (text, start) in [
            ("uuid=1", "--platform uuid: is no UUID: "),
            ("system_uuid=x", "--platform system_uuid: is no UUID: "),
            ("system_family=a\nb", "--platform system_family: has a control character"),
            ("oem_strings=[a,,b]", "--platform oem_strings: has an empty string"),
            (&long, "--platform system_family: has the strings of SMBIOS take more than 61440 bytes"),
            (&twice_too_long, "--platform system_manufacturer: has the strings of SMBIOS take more than 61440 bytes"),
            (
                "serial_number=1,system_serial_number=2",
                "--platform system_serial_number: is another than --platform serial_number, which is an older name",
            ),
        ] {
            let error = platform(text).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error}");
        }
        let many = PlatformConfig { oem_strings: vec!["x".into(); 256], ..PlatformConfig::default() };
        assert_eq!(many.check().unwrap_err().field, PlatformConfig::OEM_STRINGS);
    }

    #[test]
    fn segments_are_read_and_none_or_too_many_refused() {
        let segments =
            |text: &str| text.parse::<PlatformConfig>().and_then(|platform| platform.check().map(|()| platform));
        assert_eq!(segments("iommufd=on").unwrap().num_pci_segments, 1);
        assert_eq!(segments("num_pci_segments=16").unwrap().num_pci_segments, 16);
        for number in [0, 17] {
            let error = segments(&format!("num_pci_segments={number}")).unwrap_err().to_string();
            assert_eq!(error, format!("--platform num_pci_segments: {number} is not in 1 to 16"));
        }
        let iommu = |text: &str| segments(&format!("num_pci_segments=3,iommu_segments={text}"));
        assert_eq!(iommu("[0,2]").unwrap().iommu_segments, [0, 2]);
        assert_eq!(iommu("1").unwrap().iommu_segments, [1]);
        for (text, rule) in [
            ("3", "there is no segment 3, the last is 2 (--platform num_pci_segments)"),
            ("[1,0-1]", "1 is given twice"),
            ("[x]", "'[x]' is no number and no list of them, such as [0,2-4]"),
        ] {
            assert_eq!(iommu(text).unwrap_err().to_string(), format!("--platform iommu_segments: {rule}"));
        }
    }
}
