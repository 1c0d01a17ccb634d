// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Encoding of messages about translations (vhost-user, "IOTLB messages"), for both channels.

use iommu_bounce::Permissions;

/// Size of a message in bytes, without its header: `struct vhost_iotlb_msg` (`include/uapi/linux/vhost_types.h`).
pub(super) const BYTES: usize = 32;

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The server needs a translation.
    Miss,
    /// The front end sends the server a translation.
    Update,
    /// The server must drop its translations of a range.
    Invalidate,
    /// The server has already denied an access.
    AccessFail,
}

/// Message about translations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Iotlb {
    pub(super) iova: u64,
    /// Number of bytes from `iova` on.
    pub(super) size: u64,
    /// Address of the memory in the server's memory table.
    pub(super) user: u64,
    pub(super) permissions: Permissions,
    pub(super) kind: Kind,
}

impl Iotlb {
    /// Encodes the message. The protocol's permission bits are 1 for read and 2 for write.
    pub(super) fn to_bytes(self) -> [u8; BYTES] {
        let kind = match self.kind {
            Kind::Miss => 1,
            Kind::Update => 2,
            Kind::Invalidate => 3,
            Kind::AccessFail => 4,
        };
        let mut bytes = [0; BYTES];
        for (place, number) in [(0, self.iova), (8, self.size), (16, self.user)] {
            bytes[place..place + 8].copy_from_slice(&number.to_le_bytes());
        }
        (bytes[24], bytes[25]) = (permission_bits(self.permissions), kind);
        bytes
    }

    /// Decodes a message of a server. Returns `None` if the bytes are not a message about translations.
    pub(super) fn from_bytes(bytes: &[u8; BYTES]) -> Option<Self> {
        let number = |place: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[place..place + 8]);
            u64::from_le_bytes(number)
        };
        let kind = match bytes[25] {
            1 => Kind::Miss,
            4 => Kind::AccessFail,
            _ => return None,
        };
        let permissions = match bytes[24] {
            1 => Permissions::READ,
            2 => Permissions::WRITE,
            3 => Permissions::READ | Permissions::WRITE,
            _ => return None,
        };
        Some(Self { iova: number(0), size: number(8), user: number(16), permissions, kind })
    }
}

fn permission_bits(permissions: Permissions) -> u8 {
    u8::from(permissions.contains(Permissions::READ)) | u8::from(permissions.contains(Permissions::WRITE)) << 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iotlb_messages_match_kernel_layout_and_bad_ones_are_refused() {
        let update =
            Iotlb { iova: 0x1000, size: 0x2000, user: 0x3000, permissions: Permissions::WRITE, kind: Kind::Update };
        let bytes = update.to_bytes();
        assert_eq!(
            (bytes[1], bytes[9], bytes[17], &bytes[24..]),
            (0x10, 0x20, 0x30, [2, 2, 0, 0, 0, 0, 0, 0].as_slice())
        );
        assert_eq!(Iotlb::from_bytes(&bytes), None, "a server must not send translations");
        for kind in [Kind::Miss, Kind::AccessFail] {
            let asked = Iotlb { kind, permissions: Permissions::READ | Permissions::WRITE, ..update };
            assert_eq!(Iotlb::from_bytes(&asked.to_bytes()), Some(asked));
        }
        for (permission, kind) in [(0, 1), (4, 1), (1, 0), (1, 3), (1, 5)] {
            let mut wrong = bytes;
            (wrong[24], wrong[25]) = (permission, kind);
            assert_eq!(Iotlb::from_bytes(&wrong), None, "{permission} {kind}");
        }
    }
}
