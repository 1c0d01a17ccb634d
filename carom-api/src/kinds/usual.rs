// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fields and methods that most kinds share.

/// Declares the configuration of a device: its own fields, followed by the fields of every device. `id` overrides the description
/// of the field `id`.
macro_rules! device_config {
    ($(#[$meta:meta])* pub struct $name:ident $fields:tt) => {
        device_config! { id " Name in logs and the API. Must not be empty or start with `_`. By default, the VMM generates a name."; $(#[$meta])* pub struct $name $fields }
    };
    (id $id:tt; $(#[$meta:meta])* pub struct $name:ident { $($fields:tt)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, utoipa::ToSchema)]
        pub struct $name {
            $($fields)*
            /// Number of the PCI segment that the device is on.
            #[serde(default)]
            #[schema(maximum = 15)]
            pub pci_segment: u16,
            /// PCI slot of the device on the segment, 1 to 31. By default, a free slot.
            #[serde(skip_serializing_if = "Option::is_none")]
            #[schema(minimum = 1, maximum = 31)]
            pub pci_device_id: Option<u8>,
            #[doc = $id]
            pub id: Option<String>,
        }
    };
}
pub(super) use device_config;

/// Implements the methods of [`KindConfig`](super::KindConfig) that only read or set the fields of [`device_config`] and the field `iommu`.
macro_rules! usual_methods {
    () => {
        fn kind(&self) -> &'static $crate::kinds::Kind {
            &Self::KIND
        }

        fn id(&self) -> Option<&str> {
            self.id.as_deref()
        }

        fn set_id(&mut self, id: String) {
            self.id = Some(id);
        }

        fn put_behind_iommu(&mut self) {
            self.iommu = true;
        }

        fn is_behind_iommu(&self) -> bool {
            self.iommu
        }

        fn pci_segment(&self) -> u16 {
            self.pci_segment
        }

        fn pci_device_id(&self) -> Option<u8> {
            self.pci_device_id
        }

        fn to_part(&self) -> $crate::kinds::PartConfig {
            self.clone().into()
        }
    };
}
pub(super) use usual_methods;
