// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Methods that most kinds have alike.

/// Those of [`KindConfig`](super::KindConfig) for a type with the fields `id`, `iommu`, `pci_segment` and `pci_device_id`, which is what this variant of
/// [`PartConfig`](super::PartConfig) holds. With `fixed_id` the type has no field `id`, and writes the two methods for it itself.
macro_rules! usual_methods {
    ($variant:ident) => {
        usual_methods!($variant, fixed_id);

        fn id(&self) -> Option<&str> {
            self.id.as_deref()
        }

        fn set_id(&mut self, id: String) {
            self.id = Some(id);
        }
    };
    ($variant:ident, fixed_id) => {
        fn kind(&self) -> &'static $crate::kinds::Kind {
            &Self::KIND
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
            $crate::kinds::PartConfig::$variant(self.clone())
        }
    };
}
pub(super) use usual_methods;
