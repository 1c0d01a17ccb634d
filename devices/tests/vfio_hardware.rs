// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO passthrough with real devices: an NVMe drive and QEMU's `edu`, whose DMA engine the test steers.
//!
//! They run where `CAROM_NVME` and `CAROM_EDU` name such devices bound to vfio-pci, as in the rig:
//! `scripts/rig -- <this test's executable> --test-threads=1`, built with the feature `rig`. `CAROM_IOMMUFD=on` has them go by IOMMUFD instead of
//! groups and containers, and needs a kernel that has it: `scripts/rig --kernel iommufd`.

#![expect(clippy::unwrap_used, reason = "a test ends there")]

use std::any::Any;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devices::pci::{PciDevice, regs};
use devices::platform::{HostRange, MemorySlots, MsiAllocator, MsiMessage, MsiVectors};
use devices::ram::Ram;
use devices::shown::ShownMemory;
use devices::vfio::{DmaSpace, HostIommu, VfioMapper, VfioPciDevice, VfioPciError, map_guest_ram};
use devices::virtio::iommu::RamView;
use iommu_bounce::spec::Status;
use iommu_bounce::test_utils::{self, TestRam};
use iommu_bounce::{DmaMapper, Engine, EngineConfig, GuestRam, MapError, Permissions, UnmapError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const PAGE: u64 = 4096;

fn sysfs(variable: &str) -> PathBuf {
    let name = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} names no device"));
    Path::new("/sys/bus/pci/devices").join(name)
}

struct Vectors(Vec<EventFd>);

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
struct Platform {
    vectors: Mutex<Vec<Arc<Vectors>>>,
    slots: Mutex<Vec<(u64, HostRange)>>,
}

impl MsiAllocator for Platform {
    fn allocate(&self, count: u16) -> io::Result<Arc<dyn MsiVectors>> {
        let vectors = Arc::new(Vectors((0..count).map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect()));
        self.vectors.lock().unwrap().push(vectors.clone());
        Ok(vectors)
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

struct Device {
    platform: Arc<Platform>,
    device: VfioPciDevice,
    space: DmaSpace,
    host: Arc<HostIommu>,
}

/// Whether the tests go by IOMMUFD.
fn by_iommufd() -> bool {
    std::env::var_os("CAROM_IOMMUFD").is_some_and(|value| value == "on")
}

fn host() -> Arc<HostIommu> {
    Arc::new(if by_iommufd() { HostIommu::iommufd(None).unwrap() } else { HostIommu::containers(None) })
}

fn open(variable: &str) -> Device {
    open_by(&host(), variable)
}

fn open_by(host: &Arc<HostIommu>, variable: &str) -> Device {
    let platform = Arc::new(Platform::default());
    open_with(host, variable, platform.clone(), platform)
}

/// A device whose BARs are shown in these slots.
fn open_with(host: &Arc<HostIommu>, variable: &str, platform: Arc<Platform>, slots: Arc<dyn MemorySlots>) -> Device {
    let space = host.new_space().unwrap();
    let device = VfioPciDevice::open("vfio0", &sysfs(variable), &space, platform.clone(), slots).unwrap();
    Device { platform, device, space, host: host.clone() }
}

impl Device {
    /// The mapper of the device's address space; `endpoint` is its name there.
    fn mapper(&self, endpoint: u32, memory: impl Any + Send) -> VfioMapper {
        self.host.mapper(self.space.clone(), endpoint, &self.device, memory).unwrap()
    }
    fn config(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.device.read_config(offset, &mut data);
        u32::from_le_bytes(data)
    }
    fn command(&self, command: u16) {
        self.device.write_config(regs::COMMAND, &command.to_le_bytes());
    }
    fn capability(&self, id: u8) -> Option<u16> {
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
    fn register(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.device.read_bar(0, offset, &mut data);
        u32::from_le_bytes(data)
    }
    fn set_register(&self, offset: u64, value: u32) {
        self.device.write_bar(0, offset, &value.to_le_bytes());
    }
}

/// The `edu` device: its DMA engine copies between an IOVA and a buffer of one page in the device.
struct Edu(Device);

impl Edu {
    const BUFFER: u32 = 0x4_0000;

    fn open() -> Self {
        Self::open_by(&host(), "CAROM_EDU")
    }

    fn open_by(host: &Arc<HostIommu>, variable: &str) -> Self {
        let edu = Self(open_by(host, variable));
        edu.0.command(regs::COMMAND_MEMORY | regs::COMMAND_BUS_MASTER);
        edu
    }

    /// Copies half a page from `iova` into the device, or back. (QEMU 7.2 ends when a copy reaches the buffer's end.)
    fn copy(&self, iova: u32, into_device: bool) {
        self.copy_bytes(iova, into_device, 2048);
    }

    fn copy_bytes(&self, iova: u32, into_device: bool, len: u32) {
        let (from, to) = if into_device { (iova, Self::BUFFER) } else { (Self::BUFFER, iova) };
        for (register, value) in [(0x80, from), (0x84, 0), (0x88, to), (0x8c, 0), (0x90, len), (0x94, 0)] {
            self.0.set_register(register, value);
        }
        self.0.set_register(0x98, if into_device { 1 } else { 3 });
        let end = Instant::now() + Duration::from_secs(20);
        while self.0.register(0x98) & 1 != 0 {
            assert!(Instant::now() < end, "edu does not finish");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Four pages of memory; page n holds the byte n + 1.
fn memory() -> Ram {
    let memory = Ram::from_ranges(&[(GuestAddress(0), 4 * 4096)]).unwrap();
    for page in 0..4 {
        memory.write_slice(&[page + 1; 4096], GuestAddress(u64::from(page) * PAGE)).unwrap();
    }
    memory
}

/// The half of a page that the device copies.
fn page(memory: &Ram, number: u64) -> Vec<u8> {
    let mut data = vec![0; 2048];
    memory.read_slice(&mut data, GuestAddress(number * PAGE)).unwrap();
    data
}

fn map(
    mapper: &mut VfioMapper,
    memory: &Ram,
    iova: u64,
    number: u64,
    permissions: Permissions,
) -> Result<(), MapError> {
    mapper.map(iova, memory.get_slice(GuestAddress(number * PAGE), 4096).unwrap(), permissions)
}

#[test]
fn nvme_shows_itself_and_its_registers() {
    let nvme = open("CAROM_NVME");
    assert_eq!(nvme.config(regs::REVISION) >> 8, 0x01_0802, "class code of NVMe");
    assert_eq!(nvme.config(regs::INTERRUPT_LINE) >> 8 & 0xff, 0, "no INTx");
    assert!(nvme.capability(regs::CAP_MSIX).is_some());
    assert_eq!(nvme.config(regs::BAR0) & !0xf, 0, "the host's address is hidden");
    let bar = nvme.device.bars()[0];
    nvme.device.assign_bar(0, 0x40_0000_0000);
    nvme.command(regs::COMMAND_MEMORY);
    assert_eq!(nvme.device.bar_address(0), Some(0x40_0000_0000));
    // Version register, by an access that traps and through the memory slot.
    let version = nvme.register(8);
    assert!((0x1_0000..0x3_0000).contains(&version), "NVMe version {version:#x}");
    nvme.device.bar_moved(0, 0x40_0000_0000).unwrap();
    let slots = nvme.platform.slots.lock().unwrap().clone();
    assert!(!slots.is_empty());
    assert!(slots.iter().map(|(_, host)| host.len as u64).sum::<u64>() < bar.size, "the table's page traps");
    let (_, host) = slots.iter().find(|(gpa, _)| *gpa == 0x40_0000_0000).unwrap();
    // SAFETY: The device keeps the range mapped; it is a register that reads have no effect on.
    let seen = unsafe { std::ptr::read_volatile((host.address + 8) as *const u32) };
    assert_eq!(seen, version);
    // The guest's decoding goes off; the slot stays and must not fault.
    nvme.command(0);
    // SAFETY: As above.
    let seen = unsafe { std::ptr::read_volatile((host.address + 8) as *const u32) };
    assert_eq!(seen, version);
    let pm = nvme.capability(regs::CAP_PM).unwrap();
    nvme.device.write_config(pm + 4, &[3, 0]);
    // SAFETY: As above; the guest has put the device to sleep.
    let seen = unsafe { std::ptr::read_volatile((host.address + 8) as *const u32) };
    assert_eq!(seen, version);
    nvme.device.reset().unwrap();
    assert_eq!(nvme.register(8), version);
}

#[test]
fn msix_can_be_turned_on_and_off() {
    let nvme = open("CAROM_NVME");
    let control = nvme.capability(regs::CAP_MSIX).unwrap() + 2;
    for _ in 0..2 {
        nvme.device.write_config(control, &[0, 0xc0]);
        nvme.device.write_config(control, &[0, 0x80]);
        let interrupts = std::fs::read_to_string("/proc/interrupts").unwrap();
        assert!(interrupts.contains("vfio-msix[0]"), "the host delivers:\n{interrupts}");
        nvme.device.write_config(control, &[0, 0]);
        assert!(!std::fs::read_to_string("/proc/interrupts").unwrap().contains("vfio-msix"));
    }
}

#[test]
fn msi_reaches_its_event() {
    let edu = Edu::open();
    let msi = edu.0.capability(regs::CAP_MSI).unwrap();
    edu.0.device.write_config(msi + 2, &[1, 0]);
    edu.0.set_register(0x60, 1);
    let vectors = edu.0.platform.vectors.lock().unwrap()[0].clone();
    let end = Instant::now() + Duration::from_secs(10);
    while vectors.0[0].read().is_err() {
        assert!(Instant::now() < end, "no interrupt");
        std::thread::sleep(Duration::from_millis(5));
    }
    edu.0.set_register(0x64, 1);
    edu.0.device.write_config(msi + 2, &[0, 0]);
    edu.0.set_register(0x60, 1);
    std::thread::sleep(Duration::from_millis(200));
    assert!(vectors.0[0].read().is_err(), "interrupt after MSI was turned off");
}

#[test]
fn dma_reaches_what_is_mapped_as_it_is_mapped() {
    let edu = Edu::open();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    let limits = mapper.limits();
    println!("{limits:x?}");
    assert_ne!(limits.page_size_mask & PAGE, 0);
    assert!(!limits.iova_ranges.iter().any(|range| range.contains(&0xfee0_0000)), "the MSI window is reserved");
    let both = Permissions::READ | Permissions::WRITE;
    map(&mut mapper, &memory, 0x10_0000, 0, both).unwrap();
    map(&mut mapper, &memory, 0x10_1000, 1, Permissions::READ).unwrap();
    map(&mut mapper, &memory, 0x10_2000, 2, Permissions::WRITE).unwrap();
    // Page 0 to page 2.
    edu.copy(0x10_0000, true);
    edu.copy(0x10_2000, false);
    assert_eq!(page(&memory, 2), [1; 2048]);
    // Page 1 can be read, not written.
    edu.copy(0x10_1000, true);
    edu.copy(0x10_0000, false);
    assert_eq!(page(&memory, 0), [2; 2048]);
    memory.write_slice(&[9; 4096], GuestAddress(0)).unwrap();
    edu.copy(0x10_0000, true);
    edu.copy(0x10_1000, false);
    assert_eq!(page(&memory, 1), [2; 2048], "written in spite of READ alone");
    // What was never mapped, and what is no longer.
    edu.copy(0x10_3000, false);
    assert_eq!(page(&memory, 3), [4; 2048]);
    mapper.unmap(0x10_2000, PAGE).unwrap();
    edu.copy(0x10_2000, false);
    assert_eq!(page(&memory, 2), [1; 2048], "written after unmap");
    // Without bus mastering there is no DMA.
    edu.0.command(regs::COMMAND_MEMORY);
    memory.write_slice(&[7; 4096], GuestAddress(0)).unwrap();
    edu.copy(0x10_0000, false);
    assert_eq!(page(&memory, 0), [7; 2048], "written without bus mastering");
}

#[test]
fn unmap_takes_whole_mappings_only() {
    let edu = Edu::open();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    let slice = memory.get_slice(GuestAddress(0), 8192).unwrap();
    mapper.map(0x10_0000, slice, Permissions::READ).unwrap();
    map(&mut mapper, &memory, 0x10_2000, 2, Permissions::READ).unwrap();
    assert!(matches!(map(&mut mapper, &memory, 0x10_1000, 3, Permissions::READ), Err(MapError::Exists)));
    assert!(matches!(mapper.unmap(0x10_0000, PAGE), Err(UnmapError::NotMapped)));
    assert!(matches!(mapper.unmap(0x20_0000, PAGE), Err(UnmapError::NotMapped)));
    mapper.unmap(0x10_0000, 3 * PAGE).unwrap();
    assert!(matches!(mapper.map(0x10_0001, slice, Permissions::READ), Err(MapError::Host(_))));
}

#[test]
fn limit_on_mappings_is_no_resources() {
    if by_iommufd() {
        // There is no such limit: only memory counts.
        return;
    }
    let parameter = "/sys/module/vfio_iommu_type1/parameters/dma_entry_limit";
    let before = std::fs::read_to_string(parameter).unwrap();
    std::fs::write(parameter, "2").unwrap();
    let edu = Edu::open();
    std::fs::write(parameter, before.trim()).unwrap();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    assert_eq!(mapper.limits().max_mappings, Some(2));
    for number in 0..2 {
        map(&mut mapper, &memory, 0x10_0000 + number * PAGE, number, Permissions::READ).unwrap();
    }
    let third = map(&mut mapper, &memory, 0x20_0000, 2, Permissions::READ);
    assert!(matches!(third, Err(MapError::NoResources)));
    mapper.unmap(0x10_0000, PAGE).unwrap();
    map(&mut mapper, &memory, 0x20_0000, 2, Permissions::READ).unwrap();
}

/// This thread without the right to lock more memory than the limit, and the limit lowered, until this is dropped.
struct LockedMemoryLimit {
    limit: Rlimit,
    capabilities: CapabilitySets,
}

impl LockedMemoryLimit {
    fn lower_to(bytes: u64) -> Self {
        let limit = getrlimit(Resource::Memlock);
        let capabilities = rustix::thread::capabilities(None).unwrap();
        setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), maximum: limit.maximum }).unwrap();
        let effective = capabilities.effective - CapabilitySet::IPC_LOCK;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..capabilities }).unwrap();
        Self { limit, capabilities }
    }
}

impl Drop for LockedMemoryLimit {
    fn drop(&mut self) {
        rustix::thread::set_capabilities(None, self.capabilities).unwrap();
        setrlimit(Resource::Memlock, self.limit).unwrap();
    }
}

#[test]
fn limit_on_locked_memory_is_no_resources_and_changes_nothing_else() {
    let edu = Edu::open();
    let memory = memory();
    let mut mapper = edu.0.mapper(7, memory.clone());
    let both = Permissions::READ | Permissions::WRITE;
    let limit = LockedMemoryLimit::lower_to(2 * PAGE);
    for number in 0..2 {
        map(&mut mapper, &memory, 0x10_0000 + number * PAGE, number, both).unwrap();
    }
    for _ in 0..3 {
        let third = map(&mut mapper, &memory, 0x20_0000, 2, both);
        assert!(matches!(third, Err(MapError::NoResources)), "{third:?}");
    }
    // What was mapped works, what was refused does not.
    edu.copy(0x10_0000, true);
    edu.copy(0x10_1000, false);
    edu.copy(0x20_0000, false);
    assert_eq!(page(&memory, 1), [1; 2048]);
    assert_eq!(page(&memory, 2), [3; 2048]);
    // What is unmapped makes room.
    mapper.unmap(0x10_1000, PAGE).unwrap();
    map(&mut mapper, &memory, 0x20_0000, 2, both).unwrap();
    edu.copy(0x20_0000, false);
    assert_eq!(page(&memory, 2), [1; 2048]);
    drop(limit);
    map(&mut mapper, &memory, 0x10_1000, 1, both).unwrap();
}

#[test]
fn guest_ram_is_mapped_at_itself_until_the_mapping_goes() {
    let edu = Edu::open();
    let memory = memory();
    let mapping = map_guest_ram(&edu.0.space, &memory).unwrap();
    edu.copy(0, true);
    edu.copy(0x3000, false);
    assert_eq!(page(&memory, 3), [1; 2048]);
    drop(mapping);
    edu.copy(0x2000, false);
    assert_eq!(page(&memory, 2), [3; 2048]);
}

#[test]
fn second_user_of_a_device_is_told_that_it_is_busy() {
    let edu = Edu::open();
    let platform = Arc::new(Platform::default());
    let other = host().new_space().unwrap();
    let error = VfioPciDevice::open("vfio1", &sysfs("CAROM_EDU"), &other, platform.clone(), platform).err().unwrap();
    assert!(matches!(error, VfioPciError::Busy { .. }) && error.is_user_error(), "{error}");
    drop(edu);
    Edu::open();
}

/// Two edu devices behind an engine. Domain n, 1 or 2, maps page n - 1, which holds the byte n, at `SOURCE` and page n + 1 at
/// `TARGET`, as soon as it has an endpoint.
struct Pair {
    edus: [Edu; 2],
    engine: Engine,
    ram: Arc<TestRam>,
}

impl Pair {
    const SOURCE: u32 = 0x10_0000;
    const TARGET: u32 = 0x20_0000;

    fn open() -> Self {
        let host = host();
        let edus = ["CAROM_EDU", "CAROM_EDU2"].map(|variable| Edu::open_by(&host, variable));
        let ram = Arc::new(TestRam::new(&[(0, 4 * 4096)]));
        let config = EngineConfig { input_range: 0..=0xffff_ffff, ..Default::default() };
        let mut engine = Engine::new(config, ram.clone(), None).unwrap();
        for (endpoint, edu) in (1..).zip(&edus) {
            engine.add_endpoint(endpoint, Box::new(edu.0.mapper(endpoint, ram.clone()))).unwrap();
        }
        engine.accept_features(engine.features());
        let pair = Self { edus, engine, ram };
        pair.fill(0, 1);
        pair.fill(1, 2);
        pair
    }

    fn fill(&self, page: u64, byte: u8) {
        self.ram.slice(page * PAGE, PAGE).unwrap().copy_from(&[byte; 4096]);
    }

    fn request(&mut self, request: &[u8]) {
        let mut reply = [0xff; 4];
        assert_eq!(self.engine.handle(request, &mut reply), 4);
        assert_eq!(reply[0], 0, "{request:x?}");
    }

    fn attach(&mut self, endpoint: u32, domain: u32) {
        self.request(&test_utils::attach(endpoint, domain));
    }

    fn detach(&mut self, endpoint: u32, domain: u32) {
        self.request(&test_utils::detach(endpoint, domain));
    }

    fn map(&mut self, domain: u32) {
        for (iova, page) in [(Self::SOURCE, domain - 1), (Self::TARGET, domain + 1)] {
            let (start, gpa) = (u64::from(iova), u64::from(page) * PAGE);
            self.request(&test_utils::map(domain, start, start + PAGE - 1, gpa, 3));
        }
    }

    /// The byte that `endpoint` brings from `SOURCE` to `TARGET`, and the domain in whose page it arrives.
    fn carried(&self, endpoint: u32) -> Option<(u8, u32)> {
        self.fill(2, 0);
        self.fill(3, 0);
        let edu = &self.edus[endpoint as usize - 1];
        edu.copy(Self::SOURCE, true);
        edu.copy(Self::TARGET, false);
        let arrived = |domain: u32| {
            let mut data = [0; 2048];
            self.ram.slice(u64::from(domain + 1) * PAGE, 2048).unwrap().copy_to(&mut data);
            assert_eq!(data, [data[0]; 2048]);
            (data[0] != 0).then_some((data[0], domain))
        };
        let all: Vec<_> = [1, 2].into_iter().filter_map(arrived).collect();
        assert!(all.len() < 2, "it reaches both domains");
        all.first().copied()
    }

    /// Each endpoint reaches the domain that it is in, and nothing else.
    fn assert_in(&self, domains: [Option<u32>; 2]) {
        for (endpoint, domain) in (1..).zip(domains) {
            let wanted = domain.map(|domain| (u8::try_from(domain).unwrap(), domain));
            assert_eq!(self.carried(endpoint), wanted, "endpoint {endpoint} of {domains:?}");
        }
    }
}

#[test]
fn device_reaches_registers_of_another_while_the_guest_sees_them() {
    const BAR: u64 = 0xc000_0000;
    const REGISTERS: u64 = 0x30_0000;
    let host = host();
    let edu = Edu::open_by(&host, "CAROM_EDU");
    let platform = Arc::new(Platform::default());
    let shown = Arc::new(ShownMemory::new(platform.clone()));
    let peer = open_with(&host, "CAROM_EDU2", platform, shown.clone());
    peer.command(regs::COMMAND_MEMORY);
    peer.device.bar_moved(0, BAR).unwrap();

    let memory = Arc::new(memory());
    let ram = Arc::new(RamView::new(memory.clone(), Some(shown.clone())));
    let config = EngineConfig { input_range: 0..=0xffff_ffff, ..Default::default() };
    let engine = Arc::new(Mutex::new(Engine::new(config, ram, None).unwrap()));
    engine.lock().unwrap().add_endpoint(1, Box::new(edu.0.mapper(1, memory.clone()))).unwrap();
    let features = engine.lock().unwrap().features();
    engine.lock().unwrap().accept_features(features);
    let revoking = engine.clone();
    shown.set_revoke(Box::new(move |gpa, len| revoking.lock().unwrap().revoke_device_memory(gpa, len)));

    let status = |request: &[u8]| {
        let mut reply = [0xff; 4];
        assert_eq!(engine.lock().unwrap().handle(request, &mut reply), 4);
        reply[0]
    };
    let map_registers = |bar| test_utils::map(1, REGISTERS, REGISTERS + PAGE - 1, bar, 2 | 4);
    assert_eq!(status(&test_utils::attach(1, 1)), 0);
    assert_eq!(status(&test_utils::map(1, 0x10_0000, 0x10_0fff, 0, 1)), 0);
    if by_iommufd() {
        // IOMMUFD maps no memory of devices: `--platform iommufd=on` does not offer it.
        assert_eq!(status(&map_registers(BAR)), Status::DevErr as u8);
        return;
    }
    assert_eq!(status(&map_registers(BAR)), 0);
    // What is written to the peer's register 4 is read back from it inverted.
    let write = |value: u32| {
        memory.write_obj(value, GuestAddress(0)).unwrap();
        edu.copy_bytes(0x10_0000, true, 4);
        edu.copy_bytes(0x30_0004, false, 4);
        peer.register(4)
    };
    assert_eq!(write(0x1234_5678), !0x1234_5678);
    peer.command(0);
    peer.command(regs::COMMAND_MEMORY);
    assert_eq!(write(0x5555_0000), !0x1234_5678, "it had ceased to answer, and was not mapped again");
    let unmap_registers = test_utils::unmap(1, REGISTERS, REGISTERS + PAGE - 1);
    assert_eq!((status(&unmap_registers), status(&map_registers(BAR))), (0, 0));
    assert_eq!(write(0x1234_5678), !0x1234_5678);
    peer.device.bar_released(0).unwrap();
    assert_eq!(write(0x5555_0000), !0x1234_5678, "the guest does not see it any more");
    peer.device.bar_moved(0, 2 * BAR).unwrap();
    assert_eq!(write(0x5555_0000), !0x1234_5678, "it was not mapped again");
    assert_ne!(status(&map_registers(2 * BAR)), 0, "the driver has not removed the mapping");
    assert_eq!(status(&unmap_registers), 0);
    assert_ne!(status(&map_registers(BAR)), 0, "it is not there any more");
    assert_eq!(status(&map_registers(2 * BAR)), 0);
    assert_eq!(write(0x0f0f_0f0f), !0x0f0f_0f0f);
}

#[test]
fn mapping_of_a_domain_is_one_call_by_iommufd() {
    let mut pair = Pair::open();
    pair.attach(1, 1);
    pair.attach(2, 1);
    pair.map(1);
    pair.assert_in([Some(1), Some(1)]);
    let calls = if by_iommufd() { 2 } else { 4 };
    assert_eq!(pair.engine.counters().host_maps, calls);
    pair.request(&test_utils::unmap(1, 0, u64::MAX >> 32));
    assert_eq!(pair.engine.counters().host_unmaps, calls);
    pair.assert_in([None, None]);
}

#[test]
fn endpoints_come_together_and_part_in_any_order() {
    let mut pair = Pair::open();
    pair.assert_in([None, None]);
    pair.attach(1, 1);
    pair.map(1);
    pair.assert_in([Some(1), None]);
    pair.attach(2, 1);
    pair.assert_in([Some(1), Some(1)]);
    // The one whose address space the domain has used goes first.
    pair.detach(1, 1);
    pair.assert_in([None, Some(1)]);
    pair.attach(1, 2);
    pair.map(2);
    pair.assert_in([Some(2), Some(1)]);
    // From domain to domain without a DETACH.
    pair.attach(2, 2);
    pair.assert_in([Some(2), Some(2)]);
    pair.attach(2, 1);
    pair.map(1);
    pair.assert_in([Some(2), Some(1)]);
    pair.attach(1, 1);
    pair.assert_in([Some(1), Some(1)]);
    pair.engine.reset();
    pair.engine.accept_features(pair.engine.features());
    pair.assert_in([None, None]);
    pair.attach(2, 2);
    pair.map(2);
    pair.assert_in([None, Some(2)]);
    pair.attach(1, 2);
    pair.detach(2, 2);
    pair.assert_in([Some(2), None]);
    assert_eq!(pair.engine.counters().stuck_ranges, 0);
    assert_eq!(pair.engine.counters().host_errors, 0);
}

#[test]
fn device_that_is_closed_leaves_the_other_its_domain() {
    let mut pair = Pair::open();
    pair.attach(1, 1);
    pair.attach(2, 1);
    pair.map(1);
    drop(pair.engine.remove_endpoint(1).unwrap());
    let [first, second] = pair.edus;
    let host = first.0.host.clone();
    drop(first);
    let again = Edu::open_by(&host, "CAROM_EDU");
    pair.edus = [again, second];
    let mapper = pair.edus[0].0.mapper(1, pair.ram.clone());
    pair.engine.add_endpoint(1, Box::new(mapper)).unwrap();
    pair.assert_in([None, Some(1)]);
    pair.attach(1, 1);
    pair.assert_in([Some(1), Some(1)]);
}
