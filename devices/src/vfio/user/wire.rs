// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Messages of the protocol. Encodes requests, and decodes answers and requests of a server, which may send any bytes.
//!
//! Messages follow the vfio-user specification (QEMU, `docs/interop/vfio-user.rst`). Numbers have the byte order of the host. Where the
//! specification uses a VFIO structure, the offsets are those of `linux/vfio.h`.

/// Size of the header of every message, in bytes.
pub(super) const HEADER: usize = 16;
/// Maximum number of bytes that one message may read or write. Carom reports this limit to the server in VERSION.
pub(super) const MOST_DATA: usize = 1 << 20;
/// Size of the part before the data in a message that reads or writes, in bytes.
pub(super) const ACCESS: usize = 16;
/// Maximum size of a message that Carom accepts, in bytes.
const LONGEST: usize = HEADER + ACCESS + MOST_DATA;

/// Region index of a PCI device's configuration space. The BARs are regions 0 to 5.
pub(super) const CONFIG_REGION: u32 = 7;
/// Number of regions of a PCI device.
pub(super) const PCI_REGIONS: u32 = 9;
/// Interrupt index of a PCI device's MSI vectors.
pub(super) const MSI_IRQS: u32 = 1;
/// Interrupt index of a PCI device's MSI-X vectors.
pub(super) const MSIX_IRQS: u32 = 2;

/// Command of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Version,
    DmaMap,
    DmaUnmap,
    DeviceInfo,
    RegionInfo,
    IrqInfo,
    SetIrqs,
    RegionRead,
    RegionWrite,
    DmaRead,
    DmaWrite,
    Reset,
}

impl Command {
    /// Returns the number of the command.
    pub(super) fn number(self) -> u16 {
        match self {
            Self::Version => 1,
            Self::DmaMap => 2,
            Self::DmaUnmap => 3,
            Self::DeviceInfo => 4,
            Self::RegionInfo => 5,
            Self::IrqInfo => 7,
            Self::SetIrqs => 8,
            Self::RegionRead => 9,
            Self::RegionWrite => 10,
            Self::DmaRead => 11,
            Self::DmaWrite => 12,
            Self::Reset => 13,
        }
    }

    /// Returns the name of the command in the specification.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Version => "VERSION",
            Self::DmaMap => "DMA_MAP",
            Self::DmaUnmap => "DMA_UNMAP",
            Self::DeviceInfo => "DEVICE_GET_INFO",
            Self::RegionInfo => "DEVICE_GET_REGION_INFO",
            Self::IrqInfo => "DEVICE_GET_IRQ_INFO",
            Self::SetIrqs => "DEVICE_SET_IRQS",
            Self::RegionRead => "REGION_READ",
            Self::RegionWrite => "REGION_WRITE",
            Self::DmaRead => "DMA_READ",
            Self::DmaWrite => "DMA_WRITE",
            Self::Reset => "DEVICE_RESET",
        }
    }
}

/// Kind of message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A request.
    Command {
        /// True if the sender wants no answer.
        no_reply: bool,
    },
    /// An answer.
    Reply {
        /// Error number if the request was rejected. The number may be 0.
        refused: Option<u32>,
    },
}

const TYPE: u32 = 0xf;
const TYPE_COMMAND: u32 = 0;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 0x10;
const ERROR: u32 = 0x20;

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Number chosen by the sender of a request. The answer has the same number.
    pub(super) id: u16,
    /// Number of the command. The number may be unknown.
    pub(super) command: u16,
    /// Kind of the message.
    pub(super) kind: Kind,
    /// Number of bytes after the header.
    pub(super) payload: usize,
}

impl Header {
    /// Creates the header of a request.
    pub(super) fn request(id: u16, command: Command, payload: usize) -> Self {
        Self { id, command: command.number(), kind: Kind::Command { no_reply: false }, payload }
    }

    /// Creates the header of an answer to this request. With an error number, the answer rejects the request.
    pub(super) fn answer(&self, refused: Option<u32>, payload: usize) -> Self {
        Self { kind: Kind::Reply { refused }, payload, ..*self }
    }

    /// Encodes the header.
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let (flags, error) = match self.kind {
            Kind::Command { no_reply: false } => (TYPE_COMMAND, 0),
            Kind::Command { no_reply: true } => (TYPE_COMMAND | NO_REPLY, 0),
            Kind::Reply { refused: None } => (TYPE_REPLY, 0),
            Kind::Reply { refused: Some(error) } => (TYPE_REPLY | ERROR, error),
        };
        // Every message is short enough for the 32-bit field.
        let size = u32::try_from(HEADER + self.payload).unwrap_or(u32::MAX);
        let mut bytes = [0; HEADER];
        bytes[..2].copy_from_slice(&self.id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_ne_bytes());
        bytes[4..8].copy_from_slice(&size.to_ne_bytes());
        bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
        bytes[12..].copy_from_slice(&error.to_ne_bytes());
        bytes
    }

    /// Decodes a header. The error describes the fault.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Result<Self, String> {
        let (size, flags, error) = (long(bytes, 4), long(bytes, 8), long(bytes, 12));
        let payload = usize::try_from(size).ok().filter(|size| (HEADER..=LONGEST).contains(size));
        let payload = payload
            .ok_or_else(|| format!("sent a message of {size} bytes, but a message has {HEADER} to {LONGEST} bytes"))?
            - HEADER;
        let kind = match flags & TYPE {
            TYPE_COMMAND => Kind::Command { no_reply: flags & NO_REPLY != 0 },
            TYPE_REPLY => Kind::Reply { refused: (flags & ERROR != 0).then_some(error) },
            kind => return Err(format!("sent a message of unknown type {kind}")),
        };
        Ok(Self { id: short(bytes, 0), command: short(bytes, 2), kind, payload })
    }
}

/// Returns the 16-bit number at `offset`, or 0 beyond the end.
fn short(bytes: &[u8], offset: usize) -> u16 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u16::from_ne_bytes(*bytes))
}

/// Returns the 32-bit number at `offset`, or 0 beyond the end.
fn long(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// Returns the 64-bit number at `offset`, or 0 beyond the end.
fn quad(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

/// Builder for the payload of a message: appends numbers in the host's byte order.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn short(mut self, value: u16) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }
    fn long(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }
    fn quad(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }
}

/// Converts a length for a 32-bit field. The length of every message fits.
fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Encodes VERSION: the version, and the capabilities of the sender as JSON.
pub(super) fn version(major: u16, minor: u16, data: &str) -> Vec<u8> {
    let mut bytes = Fields::default().short(major).short(minor).0;
    bytes.extend(data.as_bytes());
    bytes.push(0);
    bytes
}

/// Decodes the answer to VERSION: major, minor, and the JSON text, which may be empty.
pub(super) fn parse_version(bytes: &[u8]) -> Option<(u16, u16, &str)> {
    let data = bytes.get(4..)?;
    // The terminating zero may be missing if the text is empty.
    let text = data.split(|byte| *byte == 0).next().unwrap_or_default();
    Some((short(bytes, 0), short(bytes, 2), std::str::from_utf8(text).ok()?))
}

/// Flags of DMA_MAP: the accesses that the device may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DmaFlags {
    pub(super) read: bool,
    pub(super) write: bool,
}

/// Encodes DMA_MAP. `offset` is the offset in the file whose descriptor is sent with the message, or 0 without a descriptor.
pub(super) fn dma_map(flags: DmaFlags, offset: u64, iova: u64, len: u64) -> Vec<u8> {
    let flags = u32::from(flags.read) | (u32::from(flags.write) << 1);
    Fields::default().long(32).long(flags).quad(offset).quad(iova).quad(len).0
}

/// Encodes DMA_UNMAP.
pub(super) fn dma_unmap(iova: u64, len: u64) -> Vec<u8> {
    Fields::default().long(24).long(0).quad(iova).quad(len).0
}

/// Encodes DEVICE_GET_INFO.
pub(super) fn device_info() -> Vec<u8> {
    Fields::default().long(16).long(0).long(0).long(0).0
}

/// Description of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceInfo {
    /// True if the device can be reset.
    pub(super) resets: bool,
    /// True if the device is a PCI device.
    pub(super) pci: bool,
    /// Number of regions.
    pub(super) regions: u32,
    /// Number of kinds of interrupts.
    pub(super) irqs: u32,
}

/// Decodes the answer to DEVICE_GET_INFO.
pub(super) fn parse_device_info(bytes: &[u8]) -> Option<DeviceInfo> {
    let flags = long(bytes, 4);
    let info =
        DeviceInfo { resets: flags & 1 != 0, pci: flags & 2 != 0, regions: long(bytes, 8), irqs: long(bytes, 12) };
    (bytes.len() >= 16).then_some(info)
}

/// Encodes DEVICE_GET_REGION_INFO, without room for capabilities in the answer.
pub(super) fn region_info(index: u32) -> Vec<u8> {
    Fields::default().long(32).long(0).long(index).long(0).quad(0).quad(0).0
}

/// Description of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RegionInfo {
    /// True if the region can be read.
    pub(super) readable: bool,
    /// True if the region can be written.
    pub(super) writable: bool,
    /// Size in bytes.
    pub(super) size: u64,
}

/// Decodes the answer to DEVICE_GET_REGION_INFO for region `index`.
pub(super) fn parse_region_info(bytes: &[u8], index: u32) -> Option<RegionInfo> {
    let flags = long(bytes, 4);
    let info = RegionInfo { readable: flags & 1 != 0, writable: flags & 2 != 0, size: quad(bytes, 16) };
    (bytes.len() >= 32 && long(bytes, 8) == index).then_some(info)
}

/// Encodes DEVICE_GET_IRQ_INFO.
pub(super) fn irq_info(index: u32) -> Vec<u8> {
    Fields::default().long(16).long(0).long(index).long(0).0
}

/// Decodes the answer to DEVICE_GET_IRQ_INFO for kind `index`: the number of interrupts that can be signalled by eventfds.
pub(super) fn parse_irq_info(bytes: &[u8], index: u32) -> Option<u32> {
    let by_event = long(bytes, 4) & 1 != 0;
    (bytes.len() >= 16 && long(bytes, 8) == index).then(|| if by_event { long(bytes, 12) } else { 0 })
}

/// Encodes DEVICE_SET_IRQS for `count` interrupts of a kind, from `start` on. Their eventfds are sent with the message as descriptors.
pub(super) fn enable_irqs(index: u32, start: u32, count: u32) -> Vec<u8> {
    const EVENTFD_TRIGGER: u32 = 1 << 2 | 1 << 5;
    Fields::default().long(20).long(EVENTFD_TRIGGER).long(index).long(start).long(count).0
}

/// Encodes DEVICE_SET_IRQS that disables all interrupts of a kind.
pub(super) fn disable_irqs(index: u32) -> Vec<u8> {
    const NONE_TRIGGER: u32 = 1 | 1 << 5;
    Fields::default().long(20).long(NONE_TRIGGER).long(index).long(0).long(0).0
}

/// Encodes REGION_READ, or the start of REGION_WRITE.
pub(super) fn region_access(region: u32, offset: u64, len: usize) -> Vec<u8> {
    Fields::default().quad(offset).long(region).long(count(len)).0
}

/// Returns the data in the answer to a REGION_READ of `len` bytes. The answer to a REGION_WRITE has no data. Returns `None` if the answer
/// does not match the request.
pub(super) fn parse_region_access(bytes: &[u8], region: u32, offset: u64, len: usize) -> Option<&[u8]> {
    let echoed = quad(bytes, 0) == offset && long(bytes, 8) == region && long(bytes, 12) == count(len);
    bytes.get(ACCESS..).filter(|_| echoed)
}

/// Decodes DMA_READ, or the start of DMA_WRITE: address and length. Returns `None` if the length exceeds [`MOST_DATA`].
pub(super) fn parse_dma_access(bytes: &[u8]) -> Option<(u64, usize)> {
    let len = usize::try_from(quad(bytes, 8)).ok().filter(|len| *len <= MOST_DATA)?;
    (bytes.len() >= ACCESS).then(|| (quad(bytes, 0), len))
}

/// Encodes the payload of the answer to DMA_WRITE, or the start of the payload of the answer to DMA_READ.
pub(super) fn dma_access(iova: u64, len: usize) -> Vec<u8> {
    Fields::default().quad(iova).quad(len as u64).0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_have_the_layout_of_the_specification() {
        let header = Header::request(0x0102, Command::DmaMap, 32).encode();
        assert_eq!(header, [2, 1, 2, 0, 48, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let map = dma_map(DmaFlags { read: true, write: true }, 0x1000, 0x2000, 0x3000);
        assert_eq!(map[..16], [32, 0, 0, 0, 3, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0]);
        assert_eq!((quad(&map, 16), quad(&map, 24), map.len()), (0x2000, 0x3000, 32));
        let unmap = dma_unmap(0x2000, 0x3000);
        assert_eq!((long(&unmap, 0), quad(&unmap, 8), quad(&unmap, 16), unmap.len()), (24, 0x2000, 0x3000, 24));
        let irqs = enable_irqs(MSIX_IRQS, 8, 3);
        assert_eq!([0, 4, 8, 12, 16].map(|at| long(&irqs, at)), [20, 0x24, 2, 8, 3]);
        assert_eq!([4, 8, 12, 16].map(|at| long(&disable_irqs(MSI_IRQS), at)), [0x21, 1, 0, 0]);
        assert_eq!(region_access(7, 4, 2), [4, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(version(0, 1, "{}"), [0, 0, 1, 0, b'{', b'}', 0]);
        assert_eq!(long(&region_info(5), 8), 5);
        assert_eq!(long(&irq_info(2), 8), 2);
    }

    #[test]
    fn header_survives_encoding_and_decoding() {
        for kind in [
            Kind::Command { no_reply: false },
            Kind::Command { no_reply: true },
            Kind::Reply { refused: None },
            Kind::Reply { refused: Some(22) },
        ] {
            let header = Header { id: 7, command: 99, kind, payload: 1000 };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
        let request = Header::request(3, Command::Reset, 0);
        assert_eq!(request.answer(Some(1), 0).kind, Kind::Reply { refused: Some(1) });
    }

    #[test]
    fn impossible_headers_are_refused() {
        let mut bytes = Header::request(0, Command::Version, 0).encode();
        for (size, fits) in [(0u32, false), (15, false), (16, true), (count(LONGEST), true), (u32::MAX, false)] {
            bytes[4..8].copy_from_slice(&size.to_ne_bytes());
            assert_eq!(Header::decode(&bytes).is_ok(), fits, "{size}");
        }
        bytes[4..8].copy_from_slice(&16u32.to_ne_bytes());
        bytes[8] = 2;
        assert!(Header::decode(&bytes).unwrap_err().contains("type 2"));
    }

    #[test]
    fn short_or_mismatched_answers_are_rejected() {
        assert!(parse_device_info(&[0; 15]).is_none());
        assert!(parse_region_info(&[0; 31], 0).is_none());
        assert!(parse_region_info(&[0; 32], 1).is_none());
        assert!(parse_irq_info(&[0; 15], 0).is_none());
        assert!(parse_irq_info(&[0; 16], 2).is_none());
        assert!(parse_version(&[0; 3]).is_none());
        assert_eq!(parse_version(&[0, 0, 1, 0]), Some((0, 1, "")));
        assert!(parse_version(&[0, 0, 1, 0, 0xff, 0]).is_none());
        let mut read = region_access(0, 8, 4);
        read.extend([1, 2, 3, 4]);
        assert_eq!(parse_region_access(&read, 0, 8, 4), Some(&[1, 2, 3, 4][..]));
        for (region, offset, len) in [(1, 8, 4), (0, 4, 4), (0, 8, 2)] {
            assert!(parse_region_access(&read, region, offset, len).is_none());
        }
        assert!(parse_dma_access(&[0; 15]).is_none());
        assert_eq!(parse_dma_access(&dma_access(9, MOST_DATA)), Some((9, MOST_DATA)));
        assert!(parse_dma_access(&dma_access(9, MOST_DATA + 1)).is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..80), index in 0u32..9) {
            if let Some(header) = bytes.first_chunk() {
                prop_assert!(Header::decode(header).is_ok_and(|header| header.payload <= ACCESS + MOST_DATA) || Header::decode(header).is_err());
            }
            let _ = (parse_version(&bytes), parse_device_info(&bytes), parse_region_info(&bytes, index));
            let _ = (parse_irq_info(&bytes, index), parse_region_access(&bytes, index, 0, 4));
            prop_assert!(parse_dma_access(&bytes).is_none_or(|(_, len)| len <= MOST_DATA));
        }
    }
}
