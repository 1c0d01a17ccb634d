// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host devices for the tests.

use std::any::Any;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devices::pci::{PciDevice, regs};
use devices::platform::{HostRange, MemorySlots, MsiAllocator, MsiMessage, MsiVectors, SharedLine};
use devices::ram::Ram;
use devices::vfio::{DmaSpace, HostIommu, VfioMapper, VfioPciDevice};
use iommu_bounce::{DmaMapper, MapError, Permissions};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub(crate) const PAGE: u64 = 4096;

pub(crate) fn sysfs(variable: &str) -> PathBuf {
    let name = std::env::var(variable)
        .unwrap_or_else(|_| panic!("set {variable} to the address of a PCI device, as scripts/rig does"));
    Path::new("/sys/bus/pci/devices").join(name)
}

pub(crate) struct Vectors(pub(crate) Vec<EventFd>);

impl MsiVectors for Vectors {
    fn count(&self) -> u16 {
        u16::try_from(self.0.len()).unwrap()
    }
    fn event(&self, vector: u16) -> Option<&EventFd> {
        self.0.get(usize::from(vector))
    }
    fn route(&self, _: u16, _: Option<MsiMessage>) -> io::Result<()> {
        Ok(())
    }
    fn trigger(&self, _: u16) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Default)]
pub(crate) struct Platform {
    pub(crate) vectors: Mutex<Vec<Arc<Vectors>>>,
    pub(crate) slots: Mutex<Vec<(u64, HostRange)>>,
    /// Events of the connected device, if any. The first event raises the line. The second event reports that the guest has served the
    /// interrupt.
    pub(crate) line: Mutex<Option<(EventFd, EventFd)>>,
}

impl MsiAllocator for Platform {
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>> {
        let vectors = Arc::new(Vectors((0..count).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect()));
        self.vectors.lock().unwrap().push(vectors.clone());
        Ok(vectors)
    }
}

impl SharedLine for Platform {
    fn number(&self) -> u8 {
        20
    }
    fn connect(&self, raise: &EventFd, served: &EventFd) -> io::Result<()> {
        *self.line.lock().unwrap() = Some((raise.try_clone()?, served.try_clone()?));
        Ok(())
    }
    fn disconnect(&self, _: &EventFd) -> io::Result<()> {
        self.line.lock().unwrap().take().map(drop).ok_or(io::ErrorKind::NotFound.into())
    }
}

impl MemorySlots for Platform {
    unsafe fn insert(&self, gpa: u64, host: HostRange, _: bool) -> io::Result<u32> {
        let mut slots = self.slots.lock().unwrap();
        slots.push((gpa, host));
        Ok(u32::try_from(slots.len() - 1).unwrap())
    }
    fn remove(&self, _: u32) -> io::Result<()> {
        Ok(())
    }
}

pub(crate) struct Device {
    pub(crate) platform: Arc<Platform>,
    pub(crate) device: VfioPciDevice,
    pub(crate) space: DmaSpace,
    pub(crate) host: Arc<HostIommu>,
}

/// True if the tests use IOMMUFD.
pub(crate) fn by_iommufd() -> bool {
    std::env::var_os("CAROM_IOMMUFD").is_some_and(|value| value == "on")
}

pub(crate) fn host() -> Arc<HostIommu> {
    Arc::new(if by_iommufd() { HostIommu::iommufd(None).unwrap() } else { HostIommu::containers(None) })
}

pub(crate) fn open(variable: &str) -> Device {
    open_by(&host(), variable)
}

pub(crate) fn open_by(host: &Arc<HostIommu>, variable: &str) -> Device {
    let platform = Arc::new(Platform::default());
    open_with(host, variable, platform.clone(), platform)
}

/// Opens a device that registers its BARs with `slots`.
pub(crate) fn open_with(
    host: &Arc<HostIommu>,
    variable: &str,
    platform: Arc<Platform>,
    slots: Arc<dyn MemorySlots>,
) -> Device {
    let space = host.new_space().unwrap();
    let (msi, line) = (platform.clone(), Some(platform.clone() as Arc<dyn SharedLine>));
    let device = VfioPciDevice::open("vfio0", &sysfs(variable), &space, msi, line, slots).unwrap();
    Device { platform, device, space, host: host.clone() }
}

impl Device {
    /// Returns the mapper of the device's address space. `endpoint` is the ID of the device's endpoint.
    pub(crate) fn mapper(&self, endpoint: u32, memory: impl Any + Send) -> VfioMapper {
        self.host.mapper(self.space.clone(), endpoint, &self.device, memory).unwrap()
    }
    pub(crate) fn config(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.device.read_config(offset, &mut data);
        u32::from_le_bytes(data)
    }
    pub(crate) fn command(&self, command: u16) {
        self.device.write_config(regs::COMMAND, &command.to_le_bytes());
    }
    pub(crate) fn capability(&self, id: u8) -> Option<u16> {
        let mut at = self.config(regs::CAPABILITIES) & 0xff;
        while at != 0 {
            let [found, next, ..] = self.config(u16::try_from(at).unwrap()).to_le_bytes();
            if found == id {
                return Some(u16::try_from(at).unwrap());
            }
            at = next.into();
        }
        None
    }
    pub(crate) fn register(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.device.read_bar(0, offset, &mut data);
        u32::from_le_bytes(data)
    }
    pub(crate) fn set_register(&self, offset: u64, value: u32) {
        self.device.write_bar(0, offset, &value.to_le_bytes());
    }
}

/// `edu` device. Its DMA engine copies between an IOVA and a buffer of one page in the device.
pub(crate) struct Edu(pub(crate) Device);

impl Edu {
    pub(crate) const BUFFER: u32 = 0x4_0000;

    pub(crate) fn open() -> Self {
        Self::open_by(&host(), "CAROM_EDU")
    }

    pub(crate) fn open_by(host: &Arc<HostIommu>, variable: &str) -> Self {
        let edu = Self(open_by(host, variable));
        edu.0.command(regs::COMMAND_MEMORY | regs::COMMAND_BUS_MASTER);
        edu
    }

    /// Copies half a page from `iova` into the device, or from the device to `iova`. A whole page is not possible, because QEMU 7.2 aborts
    /// if a copy reaches the end of the buffer.
    pub(crate) fn copy(&self, iova: u32, into_device: bool) {
        self.copy_bytes(iova, into_device, 2048);
    }

    pub(crate) fn copy_bytes(&self, iova: u32, into_device: bool, len: u32) {
        self.begin_copy(iova, into_device, len);
        self.wait();
    }

    /// Starts a copy. The device needs a tenth of a second for the copy.
    pub(crate) fn begin_copy(&self, iova: u32, into_device: bool, len: u32) {
        let (from, to) = if into_device { (iova, Self::BUFFER) } else { (Self::BUFFER, iova) };
        for (register, value) in [(0x80, from), (0x84, 0), (0x88, to), (0x8c, 0), (0x90, len), (0x94, 0)] {
            self.0.set_register(register, value);
        }
        self.0.set_register(0x98, if into_device { 1 } else { 3 });
    }

    /// Waits until the copy is complete.
    pub(crate) fn wait(&self) {
        let end = Instant::now() + Duration::from_secs(60);
        while self.0.register(0x98) & 1 != 0 {
            assert!(Instant::now() < end, "the edu device did not finish a copy within 60 s");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Creates four pages of memory. Page n holds the byte n + 1.
pub(crate) fn memory() -> Arc<Ram> {
    let memory = Ram::from_ranges(&[(GuestAddress(0), 4 * 4096)]).unwrap();
    for page in 0..4 {
        memory.write_slice(&[page + 1; 4096], GuestAddress(u64::from(page) * PAGE)).unwrap();
    }
    Arc::new(memory)
}

/// Returns the first half of a page, which is the part that [`Edu::copy`] copies.
pub(crate) fn page(memory: &Ram, number: u64) -> Vec<u8> {
    let mut data = vec![0; 2048];
    memory.read_slice(&mut data, GuestAddress(number * PAGE)).unwrap();
    data
}

pub(crate) fn map(
    mapper: &mut VfioMapper,
    memory: &Ram,
    iova: u64,
    number: u64,
    permissions: Permissions,
) -> Result<(), MapError> {
    mapper.map(iova, memory.get_slice(GuestAddress(number * PAGE), 4096).unwrap(), permissions)
}
