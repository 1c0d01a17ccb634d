// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Platform options of the VM: host interfaces, virtio-iommu, PCI segments and SMBIOS strings.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::{Field, keys};
use crate::left_out::{number, yes};
use crate::limits::MAX_PCI_SEGMENTS;
use crate::option_list::{FromOption, Special, defaults, from_str};

/// Platform options of the VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlatformConfig {
    /// True if the VMM accesses host devices through IOMMUFD instead of VFIO groups and containers.
    #[serde(default)]
    pub iommufd: bool,
    /// Polling for virtio-iommu requests. While the rate of requests is high, a thread polls for them, so that vCPUs need not exit for
    /// each request. With `auto`, the thread polls only if this process may use more host CPUs than the VM has vCPUs.
    #[serde(default)]
    pub iommu_poll: IommuPoll,
    /// Number of PCI segments of the guest, 1 to 16. A device is on segment 0 unless its `pci_segment` names another segment.
    #[serde(default = "number::<1, _>")]
    #[schema(minimum = 1, maximum = 16)]
    pub num_pci_segments: u16,
    /// PCI segments whose devices are all behind the virtio-iommu, even if their `iommu` is off.
    #[serde(default)]
    #[schema(max_items = 16)]
    pub iommu_segments: Vec<u16>,
    /// Maximum width in bits of the addresses that the virtio-iommu translates, 32 to 64. The width is lower if the host's IOMMU
    /// supports fewer bits.
    #[serde(default = "default_iommu_address_width_bits")]
    #[schema(minimum = 32, maximum = 64)]
    pub iommu_address_width_bits: u8,
    /// True if the guest has a VM Generation ID, an ACPI device that notifies the guest when the VM is restored from a snapshot.
    #[serde(default = "yes")]
    pub vmgenid: bool,
    /// Manufacturer in the guest's SMBIOS tables.
    pub system_manufacturer: Option<String>,
    /// Product name in the SMBIOS tables.
    pub system_product_name: Option<String>,
    /// Version in the SMBIOS tables.
    pub system_version: Option<String>,
    /// Serial number in the SMBIOS tables.
    pub system_serial_number: Option<String>,
    /// Older name of `system_serial_number`.
    pub serial_number: Option<String>,
    /// UUID in the SMBIOS tables.
    pub system_uuid: Option<String>,
    /// Older name of `system_uuid`.
    pub uuid: Option<String>,
    /// SKU number in the SMBIOS tables: the manufacturer's number of the product.
    pub system_sku_number: Option<String>,
    /// Product family in the SMBIOS tables.
    pub system_family: Option<String>,
    /// Asset tag of the chassis in the SMBIOS tables.
    pub chassis_asset_tag: Option<String>,
    /// OEM strings in the SMBIOS tables, for the guest's own use. At most 255 strings.
    #[serde(default)]
    #[schema(max_items = 255)]
    pub oem_strings: Vec<String>,
}

fn default_iommu_address_width_bits() -> u8 {
    64
}

/// Polling for virtio-iommu requests. While the rate of requests is high, a thread polls for them, so that vCPUs need not exit for
/// each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IommuPoll {
    /// Poll only if this process may use more host CPUs than the VM has vCPUs. The VMM checks this condition at boot and while the
    /// guest runs.
    #[default]
    Auto,
    /// Poll whenever the rate of requests is high.
    On,
    /// Never poll.
    Off,
}

impl PlatformConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--platform", "platform");
    keys! {
        IOMMUFD = "iommufd", OEM_STRINGS = "oem_strings", NUM_PCI_SEGMENTS = "num_pci_segments",
        IOMMU_SEGMENTS = "iommu_segments",
    }

    /// Maximum bytes of all SMBIOS strings together, including a terminating byte for each. The manufacturer counts twice, because
    /// two tables contain it.
    pub const MAX_STRINGS: usize = 60 << 10;

    /// [`Self::iommu_address_width_bits`].
    pub const IOMMU_ADDRESS_WIDTH: Field = Self::OPTION.keys("iommu_address_width", "iommu_address_width_bits");

    /// Returns all fields that hold one SMBIOS string, each with its key.
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

    /// Returns `system_serial_number`, or `serial_number` if only the older field is set.
    pub fn serial(&self) -> Option<&str> {
        self.system_serial_number.as_deref().or(self.serial_number.as_deref())
    }

    /// Returns `system_uuid`, or `uuid` if only the older field is set. `None` if the UUID is missing or malformed.
    pub fn uuid(&self) -> Option<Uuid> {
        self.system_uuid.as_deref().or(self.uuid.as_deref()).and_then(|uuid| uuid.parse().ok())
    }

    fn check_smbios(&self) -> Result<(), ConfigError> {
        let mut len = 0;
        let mut check_text = |field: Field, text: &str, copies: usize| {
            len += (text.len() + 1) * copies;
            let is_plain = !text.chars().any(char::is_control);
            ensure(is_plain, field, || "has a control character, which SMBIOS strings cannot have: remove it")?;
            let most = Self::MAX_STRINGS;
            ensure(len <= most, field, || {
                format!("makes all SMBIOS strings together longer than {most} bytes: shorten a string")
            })
        };
        for (key, text) in self.smbios_strings() {
            // The system and chassis tables both contain the manufacturer.
            let copies = if key == "system_manufacturer" { 2 } else { 1 };
            text.as_deref().map_or(Ok(()), |text| check_text(Self::OPTION.key(key), text, copies))?;
        }
        for text in &self.oem_strings {
            check_text(Self::OEM_STRINGS, text, 1)?;
            ensure(!text.is_empty(), Self::OEM_STRINGS, || "has an empty string: SMBIOS strings cannot be empty")?;
        }
        let few = self.oem_strings.len() <= usize::from(u8::MAX);
        ensure(few, Self::OEM_STRINGS, || "has more than the maximum of 255 strings")?;
        let twice = [
            ("system_serial_number", &self.system_serial_number, "serial_number", &self.serial_number),
            ("system_uuid", &self.system_uuid, "uuid", &self.uuid),
        ];
        for (key, new, old_key, old) in twice {
            let agree = new.is_none() || old.is_none() || new == old;
            ensure_in_terms(agree, Self::OPTION.key(key), |terms| {
                format!(
                    "differs from {}, an older name of this field: leave one out",
                    Self::OPTION.key(old_key).name(terms)
                )
            })?;
        }
        for (key, uuid) in [("system_uuid", &self.system_uuid), ("uuid", &self.uuid)] {
            let uuid = uuid.as_ref().map_or(Ok(Uuid::nil()), |text| text.parse());
            uuid.map_err(|error| {
                ConfigError::new(
                    Self::OPTION.key(key),
                    format!(
                        "is not a UUID: {error}; an example of a valid UUID is 00112233-4455-6677-8899-aabbccddeeff"
                    ),
                )
            })?;
        }
        Ok(())
    }

    /// Checks the number of segments, the segments of the virtio-iommu, the address width, and the SMBIOS strings.
    ///
    /// # Errors
    /// A number is out of range, a segment does not exist or is given twice, or a string is invalid in SMBIOS.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_smbios()?;
        let (segments, most) = (self.num_pci_segments, MAX_PCI_SEGMENTS);
        let fits = (1..=most).contains(&segments);
        ensure(fits, Self::NUM_PCI_SEGMENTS, || format!("{segments} is not between 1 and {most}"))?;
        let bits = self.iommu_address_width_bits;
        ensure((32..=64).contains(&bits), Self::IOMMU_ADDRESS_WIDTH, || {
            format!("{bits} bits are not between 32 and 64")
        })?;
        for (place, segment) in self.iommu_segments.iter().enumerate() {
            self.check_segment(Self::IOMMU_SEGMENTS, *segment)?;
            let is_first = !self.iommu_segments[..place].contains(segment);
            ensure(is_first, Self::IOMMU_SEGMENTS, || format!("segment {segment} is given twice: list it once"))?;
        }
        Ok(())
    }

    /// Checks that `segment`, the value of `field`, exists.
    ///
    /// # Errors
    /// The segment does not exist.
    pub fn check_segment(&self, field: Field, segment: u16) -> Result<(), ConfigError> {
        let last = self.num_pci_segments.saturating_sub(1);
        ensure_in_terms(segment < self.num_pci_segments, field, |terms| {
            let number = Self::NUM_PCI_SEGMENTS.name(terms);
            format!("segment {segment} does not exist: the last segment is {last}; raise {number} for more segments")
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
        Special::Rule("num_pci_segments", |text| {
            format!("'{text}' is not a number of segments: write a number from 1 to {MAX_PCI_SEGMENTS}")
        }),
    ];
}
from_str!(PlatformConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field::Terms;

    #[test]
    fn address_width_outside_32_to_64_bits_is_refused() {
        let width = |text: &str| {
            let platform: PlatformConfig = text.parse()?;
            platform.check().map(|()| platform.iommu_address_width_bits)
        };
        assert_eq!((width("iommufd=on").unwrap(), width("iommu_address_width=39").unwrap()), (64, 39));
        for bits in [31, 65] {
            let error = width(&format!("iommu_address_width={bits}")).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("--platform iommu_address_width: {bits} bits are not between 32 and 64")
            );
            assert_eq!(error.field.name(Terms::Json), "platform.iommu_address_width_bits");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a string of the maximum length takes Miri minutes")]
    fn invalid_smbios_strings_are_refused() {
        let platform =
            |text: &str| text.parse::<PlatformConfig>().and_then(|platform| platform.check().map(|()| platform));
        let all =
            platform("uuid=00112233-4455-6677-8899-aabbccddeeff,serial_number=\"a, b\",oem_strings=[x=1,y]").unwrap();
        assert_eq!(all.uuid(), Some(Uuid::from_u128(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff)));
        assert_eq!((all.serial(), &all.oem_strings[..]), (Some("a, b"), &["x=1".to_string(), "y".into()][..]));
        assert_eq!(platform("oem_strings=one").unwrap().oem_strings, ["one"]);
        let long = format!("system_family={}", "x".repeat(PlatformConfig::MAX_STRINGS));
        // The system and chassis tables both contain the manufacturer.
        let maker = |len| format!("system_manufacturer={}", "x".repeat(len));
        platform(&maker(PlatformConfig::MAX_STRINGS / 2 - 1)).unwrap();
        let twice_too_long = maker(PlatformConfig::MAX_STRINGS / 2);
        for (text, start) in [
            ("uuid=1", "--platform uuid: is not a UUID: "),
            ("system_uuid=x", "--platform system_uuid: is not a UUID: "),
            ("system_family=a\nb", "--platform system_family: has a control character"),
            ("oem_strings=[a,,b]", "--platform oem_strings: has an empty string"),
            (&long, "--platform system_family: makes all SMBIOS strings together longer than 61440 bytes"),
            (
                &twice_too_long,
                "--platform system_manufacturer: makes all SMBIOS strings together longer than 61440 bytes",
            ),
            (
                "serial_number=1,system_serial_number=2",
                "--platform system_serial_number: differs from --platform serial_number, an older name",
            ),
        ] {
            let error = platform(text).unwrap_err().to_string();
            assert!(error.starts_with(start), "{error}");
        }
        let many = PlatformConfig { oem_strings: vec!["x".into(); 256], ..PlatformConfig::default() };
        assert_eq!(many.check().unwrap_err().field, PlatformConfig::OEM_STRINGS);
    }

    #[test]
    fn segment_count_and_numbers_out_of_range_are_refused() {
        let segments =
            |text: &str| text.parse::<PlatformConfig>().and_then(|platform| platform.check().map(|()| platform));
        assert_eq!(segments("iommufd=on").unwrap().num_pci_segments, 1);
        assert_eq!(segments("num_pci_segments=16").unwrap().num_pci_segments, 16);
        for number in [0, 17] {
            let error = segments(&format!("num_pci_segments={number}")).unwrap_err().to_string();
            assert_eq!(error, format!("--platform num_pci_segments: {number} is not between 1 and 16"));
        }
        let iommu = |text: &str| segments(&format!("num_pci_segments=3,iommu_segments={text}"));
        assert_eq!(iommu("[0,2]").unwrap().iommu_segments, [0, 2]);
        assert_eq!(iommu("1").unwrap().iommu_segments, [1]);
        for (text, rule) in [
            (
                "3",
                "segment 3 does not exist: the last segment is 2; raise --platform num_pci_segments for more segments",
            ),
            ("[1,0-1]", "segment 1 is given twice: list it once"),
            ("[x]", "'[x]' must be a number from 0 to 65535, or a list of numbers such as [0,2-4]"),
        ] {
            assert_eq!(iommu(text).unwrap_err().to_string(), format!("--platform iommu_segments: {rule}"));
        }
    }
}
