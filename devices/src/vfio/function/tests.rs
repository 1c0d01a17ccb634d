// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of a whole passed-through function, on top of a fake host function.

mod intx;
mod kept;

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvError, Sender, TryRecvError};
use std::thread;
use std::time::Duration;

use super::fake::{Event, FakeAllocator, FakeFunction, FakeLine, FakeSlots};
use super::host_function::IrqKind;
use super::vfio_pci_device::VfioPciDevice;
use crate::pci::{Bar, BarKind, CONTROL_ENABLE, PciDevice, regs};
use crate::platform::{HostListener, HostNotice, MsiMessage, MsiVectors, SharedLine};
use crate::vfio::error::VfioPciError;

const MEM64: u32 = 4;
const HOME: u64 = 0x40_0000_0000;
const DECODE: [u8; 2] = [2, 0];

struct Machine {
    host: FakeFunction,
    device: VfioPciDevice,
    msi: FakeAllocator,
    line: Arc<FakeLine>,
    slots: Arc<FakeSlots>,
}

fn machine(host: &FakeFunction) -> Machine {
    let (msi, slots) = (FakeAllocator::default(), Arc::new(FakeSlots::default()));
    let line = Arc::new(FakeLine::default());
    let device = VfioPciDevice::assemble(
        "vfio0",
        "0000:00:05.0",
        Box::new(host.clone()),
        &msi,
        Some(line.clone()),
        slots.clone(),
    )
    .unwrap();
    host.events();
    Machine { host: host.clone(), device, msi, line, slots }
}

fn assemble(host: &FakeFunction, line: Option<Arc<FakeLine>>) -> Result<VfioPciDevice, VfioPciError> {
    let (msi, slots) = (FakeAllocator::default(), Arc::new(FakeSlots::default()));
    let line = line.map(|line| line as Arc<dyn SharedLine>);
    VfioPciDevice::assemble("vfio0", "0000:00:05.0", Box::new(host.clone()), &msi, line, slots)
}

fn refusal(host: &FakeFunction) -> VfioPciError {
    assemble(host, None).err().unwrap()
}

/// Creates a function much like an emulated NVMe drive. The function has one 64-bit BAR of 16 KiB, with the MSI-X table at 0x2000 and the
/// pending bits at 0x3000. Its capabilities are MSI-X at 0x40, PCI Express at 0x80 and power management at 0x60.
fn nvme() -> FakeFunction {
    let host = FakeFunction::new(4096, &[(0, MEM64, 0x4000)], (0, 65));
    host.list(0x40);
    host.set(0x40, &[regs::CAP_MSIX, 0x80, 64, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0]);
    host.set(0x80, &[regs::CAP_EXPRESS, 0x60]);
    host.set(0x60, &[regs::CAP_PM, 0, 3, 0, 0, 0, 0, 0]);
    host.set(regs::INTERRUPT_PIN, &[1]);
    host.set(regs::HEADER_TYPE, &[0x80]);
    host
}

/// Creates a function with an MSI capability at 0x50. The capability has 4 vectors, a 64-bit address and mask bits.
fn with_msi() -> FakeFunction {
    let host = FakeFunction::new(256, &[(0, 0, 0x10_0000)], (4, 0));
    host.list(0x50);
    host.set(0x50, &[regs::CAP_MSI, 0, 0x84, 1]);
    host
}

fn read<const N: usize>(device: &VfioPciDevice, offset: u16) -> [u8; N] {
    let mut data = [0; N];
    device.read_config(offset, &mut data);
    data
}

fn dword(device: &VfioPciDevice, offset: u16) -> u32 {
    u32::from_le_bytes(read(device, offset))
}

/// Walks the standard capability list as a guest does.
fn walk(device: &VfioPciDevice) -> Vec<(u8, u16)> {
    let mut list = Vec::new();
    let mut at = u16::from(read::<1>(device, regs::CAPABILITIES)[0]);
    while at != 0 {
        let [id, next] = read(device, at);
        list.push((id, at));
        assert!(list.len() <= 48, "the guest's list loops: {list:x?}");
        at = next.into();
    }
    list
}

/// Walks the extended capability list as a guest does.
fn walk_extended(device: &VfioPciDevice) -> Vec<(u16, u16)> {
    let mut list = Vec::new();
    let mut at = regs::EXTENDED;
    while at != 0 {
        let header = dword(device, at);
        if header != 0 {
            list.push((u16::try_from(header & 0xffff).unwrap(), at));
        }
        assert!(list.len() <= 960, "the guest's list loops");
        at = u16::try_from(header >> 20).unwrap();
    }
    list
}

#[test]
fn guest_bar_writes_never_reach_the_host() {
    let m = machine(&nvme());
    assert_eq!(m.device.bars(), [Bar { index: 0, kind: BarKind::Memory64 { prefetchable: false }, size: 0x4000 }]);
    m.device.assign_bar(0, HOME);
    assert_eq!(dword(&m.device, regs::BAR0), 4);
    assert_eq!(dword(&m.device, regs::BAR0 + 4), 0x40);
    m.device.write_config(regs::BAR0, &[0xff; 4]);
    m.device.write_config(regs::BAR0 + 4, &[0xff; 4]);
    assert_eq!(dword(&m.device, regs::BAR0), 0xffff_c004);
    assert_eq!(dword(&m.device, regs::BAR0 + 4), 0xffff_ffff);
    assert_eq!(m.host.events(), []);
}

#[test]
fn host_keeps_decoding_whatever_the_guest_writes() {
    let m = machine(&nvme());
    m.device.assign_bar(0, HOME);
    assert_eq!(m.device.bar_address(0), None);
    m.device.write_config(regs::COMMAND, &[6, 4]);
    assert_eq!(m.device.bar_address(0), Some(HOME));
    m.device.write_config(regs::COMMAND, &[0, 0]);
    assert_eq!(m.device.bar_address(0), None);
    assert_eq!(m.host.events(), [Event::Config(regs::COMMAND, vec![6, 4]), Event::Config(regs::COMMAND, vec![2, 0])]);
    assert_eq!(read(&m.device, regs::COMMAND), [0, 0]);
}

#[test]
fn host_only_registers_are_hidden() {
    let host = nvme();
    host.set(regs::ROM_BAR, &[1, 0, 0, 0xfe]);
    let m = machine(&host);
    assert_eq!(read(&m.device, regs::INTERRUPT_PIN), [0]);
    assert_eq!(read(&m.device, regs::HEADER_TYPE), [0]);
    assert_eq!(dword(&m.device, regs::ROM_BAR), 0);
    m.device.write_config(regs::ROM_BAR, &[0xff; 4]);
    assert_eq!(dword(&m.device, regs::ROM_BAR), 0);
    m.device.write_config(regs::INTERRUPT_LINE, &[11]);
    assert_eq!(read(&m.device, regs::INTERRUPT_LINE), [11]);
    assert_eq!(m.host.events(), []);
}

#[test]
fn power_state_is_the_guests_own() {
    let m = machine(&nvme());
    assert_eq!(read(&m.device, 0x64), [8]);
    m.device.write_config(0x64, &[3, 0]);
    assert_eq!(read(&m.device, 0x64), [11]);
    assert_eq!(m.host.get(0x64), 0);
}

#[test]
fn broken_capability_list_terminates() {
    let host = nvme();
    host.set(0x61, &[0x40]);
    assert_eq!(walk(&machine(&host).device), [(regs::CAP_MSIX, 0x40), (regs::CAP_EXPRESS, 0x80), (regs::CAP_PM, 0x60)]);
    host.set(0x81, &[0x10]);
    assert_eq!(walk(&machine(&host).device), [(regs::CAP_MSIX, 0x40), (regs::CAP_EXPRESS, 0x80)]);
    host.list(0x20);
    let m = machine(&host);
    assert_eq!(walk(&m.device), []);
    assert_eq!(read::<1>(&m.device, regs::STATUS)[0] & 0x10, 0);
}

#[test]
fn invalid_capability_is_hidden_with_its_body() {
    let cases: [(&str, u16, &[u8]); 5] = [
        ("table beyond the BAR", 0x44, &[0, 0x3c, 0, 0]),
        ("table in a missing BAR", 0x44, &[1, 0, 0, 0]),
        ("pending bits in no BAR", 0x48, &[7, 0, 0, 0]),
        ("more vectors than VFIO serves", 0x42, &[0xff, 0x7]),
        ("too short before the next capability", 0x41, &[0x48]),
    ];
    for (what, offset, bytes) in cases {
        let host = nvme();
        host.set(offset, bytes);
        let m = machine(&host);
        assert!(!walk(&m.device).iter().any(|(id, _)| *id == regs::CAP_MSIX), "{what}");
        assert_eq!(read::<4>(&m.device, 0x40), [0; 4], "{what}");
        assert!(m.msi.0.lock().unwrap().is_empty(), "{what}");
        m.device.write_config(0x42, &[0, 0x80]);
        assert_eq!(m.host.events(), [], "{what}");
    }
}

#[test]
fn extended_list_skips_hidden_capabilities() {
    let host = nvme();
    let header = |id: u32, next: u32| (id | (1 << 16) | (next << 20)).to_le_bytes();
    host.set(0x100, &header(0x10, 0x140));
    host.set(0x140, &header(0x01, 0x200));
    host.set(0x200, &header(0x0f, 0x240));
    host.set(0x204, &[0xff; 4]);
    host.set(0x240, &header(0x19, 0x300));
    host.set(0x300, &header(0x15, 0x140));
    let m = machine(&host);
    assert_eq!(walk_extended(&m.device), [(0, 0x100), (0x01, 0x140), (0x19, 0x240)]);
    assert_eq!(dword(&m.device, 0x204), 0);
    m.device.write_config(0x204, &[1; 4]);
    m.device.write_config(0x308, &[1; 4]);
    assert_eq!(m.host.events(), []);
}

#[test]
fn conventional_device_has_no_extended_space() {
    let m = machine(&with_msi());
    assert_eq!(walk_extended(&m.device), []);
    assert_eq!(dword(&m.device, 0xffc), 0);
    m.device.write_config(0xffc, &[1; 4]);
    assert_eq!(m.host.events(), []);
}

#[test]
fn impossible_devices_are_refused() {
    let bridge = nvme();
    bridge.set(regs::HEADER_TYPE, &[0x81]);
    let error = refusal(&bridge);
    assert!(matches!(error, VfioPciError::Bridge { header_type: 1, .. }) && error.is_user_error());
    for bars in [[(0, MEM64, 0x4001)], [(5, MEM64, 0x1000)], [(0, 0, 1 << 32)], [(1, 1, 1 << 20)], [(0, 6, 0x1000)]] {
        assert!(matches!(refusal(&FakeFunction::new(256, &bars, (0, 0))), VfioPciError::Nonsense { .. }), "{bars:?}");
    }
    assert!(matches!(refusal(&FakeFunction::new(64, &[], (0, 0))), VfioPciError::Nonsense { .. }));
}

#[test]
fn msix_is_routed_by_the_guests_table_and_delivered_by_vfio() {
    let m = machine(&nvme());
    let vectors = m.msi.0.lock().unwrap()[0].clone();
    // Linux first enables MSI-X with all vectors masked, then writes the table, then unmasks the vectors.
    m.device.write_config(0x42, &[0, 0xc0]);
    assert_eq!(m.host.events(), [Event::Enable(IrqKind::Msix, 1)]);
    m.device.write_bar(0, 0x2010, &0xfee0_1000u32.to_le_bytes());
    m.device.write_bar(0, 0x2018, &0x42u32.to_le_bytes());
    m.device.write_bar(0, 0x201c, &0u32.to_le_bytes());
    assert_eq!(m.host.events(), [Event::Disable(IrqKind::Msix), Event::Enable(IrqKind::Msix, 2)]);
    assert_eq!(vectors.routes.lock().unwrap()[1], None);
    m.device.write_config(0x42, &[0, 0x80]);
    assert_eq!(vectors.routes.lock().unwrap()[1], Some(MsiMessage { address: 0xfee0_1000, data: 0x42 }));
    let mut entry = [0; 16];
    m.device.read_bar(0, 0x2010, &mut entry);
    assert_eq!(entry[..4], 0xfee0_1000u32.to_le_bytes());
    assert_eq!(m.host.events(), []);
    m.device.write_config(0x40, &[0, 0, 0, 0]);
    assert_eq!(m.host.events(), [Event::Disable(IrqKind::Msix)]);
    assert!(vectors.routes.lock().unwrap().iter().all(Option::is_none));
    assert_eq!(read(&m.device, 0x42), [64, 0]);
}

/// Masks or unmasks MSI-X vector `vector`.
fn mask_vector(m: &Machine, vector: u64, masked: bool) {
    m.device.write_bar(0, 0x2000 + vector * 16 + 12, &u32::from(masked).to_le_bytes());
}

#[test]
fn host_vectors_grow_with_unmasking_and_no_interrupt_is_lost() {
    let m = machine(&nvme());
    let vectors = m.msi.0.lock().unwrap()[0].clone();
    let fired = |vector: u16| vectors.event(vector).unwrap().read().unwrap_or(0);
    let more = |count| [Event::Disable(IrqKind::Msix), Event::Enable(IrqKind::Msix, count)];
    mask_vector(&m, 0, false);
    m.device.write_config(0x42, &[0, 0x80]);
    assert_eq!(m.host.events(), [Event::Enable(IrqKind::Msix, 1)]);

    mask_vector(&m, 1, false);
    assert_eq!(m.host.events(), more(2));
    assert_eq!((fired(0), fired(1)), (1, 0), "the old vector fires once, because its interrupt may have been lost");
    mask_vector(&m, 4, false);
    assert_eq!(m.host.events(), more(8));
    // VFIO already delivers these vectors, and does not stop delivering a vector that becomes masked.
    for (vector, masked) in [(7, false), (7, true), (4, true), (4, false)] {
        mask_vector(&m, vector, masked);
    }
    assert_eq!(m.host.events(), []);
    mask_vector(&m, 64, false);
    assert_eq!(m.host.events(), more(65));

    // When MSI-X is enabled again, VFIO delivers only as many vectors as the unmasked vectors need.
    mask_vector(&m, 64, true);
    m.device.write_config(0x42, &[0, 0]);
    m.device.write_config(0x42, &[0, 0x80]);
    assert_eq!(m.host.events(), more(8));
}

#[test]
fn old_vectors_keep_working_if_the_host_has_no_more() {
    let m = machine(&nvme());
    mask_vector(&m, 1, false);
    m.device.write_config(0x42, &[0, 0x80]);
    assert_eq!(m.host.events(), [Event::Enable(IrqKind::Msix, 2)]);
    m.host.0.vectors_left.store(3, Ordering::Relaxed);

    mask_vector(&m, 2, false);
    assert_eq!(m.host.events(), [Event::Disable(IrqKind::Msix), Event::Enable(IrqKind::Msix, 2)]);
    m.host.0.vectors_left.store(4, Ordering::Relaxed);
    mask_vector(&m, 2, false);
    assert_eq!(m.host.events(), [Event::Disable(IrqKind::Msix), Event::Enable(IrqKind::Msix, 4)]);
}

#[test]
fn access_across_the_table_border_is_split() {
    let m = machine(&nvme());
    let mut data = [0; 8];
    m.device.read_bar(0, 0x1ffc, &mut data);
    assert_eq!(data, [0xfc, 0xfd, 0xfe, 0xff, 0, 0, 0, 0]);
    m.device.write_bar(0, 0x1ffc, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(m.host.events(), [Event::Region(0, 0x1ffc, vec![1, 2, 3, 4])]);
    let end = 0x2000 + 65 * 16;
    m.device.write_bar(0, end - 4, &[1; 8]);
    assert_eq!(m.host.events(), [Event::Region(0, end, vec![1; 4])]);
    m.device.write_bar(0, 0x3000, &[1; 8]);
    m.device.read_bar(0, 0x3000, &mut data);
    assert_eq!((data, m.host.events()), ([0; 8], vec![]));
}

#[test]
fn msi_follows_count_masks_and_enable() {
    let m = machine(&with_msi());
    let vectors = m.msi.0.lock().unwrap()[0].clone();
    assert_eq!(read(&m.device, 0x52), [0x84, 1]);
    m.device.write_config(0x54, &0xfee0_1003u32.to_le_bytes());
    m.device.write_config(0x5c, &[0x47, 0]);
    m.device.write_config(0x60, &[0b10, 0, 0, 0]);
    assert_eq!(m.host.events(), []);
    m.device.write_config(0x52, &[0x11, 0]);
    assert_eq!(m.host.events(), [Event::Enable(IrqKind::Msi, 2)]);
    let message = |data| Some(MsiMessage { address: 0xfee0_1000, data });
    assert_eq!(*vectors.routes.lock().unwrap(), [message(0x46), None, None, None]);
    m.device.write_config(0x60, &[0]);
    assert_eq!(*vectors.routes.lock().unwrap(), [message(0x46), message(0x47), None, None]);
    // The guest asks for more vectors than the device has.
    m.device.write_config(0x52, &[0x71, 0]);
    assert_eq!(m.host.events(), [Event::Disable(IrqKind::Msi), Event::Enable(IrqKind::Msi, 4)]);
    assert_eq!(vectors.routes.lock().unwrap()[3], message(0x47));
    m.device.write_config(0x52, &[0, 0]);
    assert_eq!(m.host.events(), [Event::Disable(IrqKind::Msi)]);
    assert_eq!(*vectors.routes.lock().unwrap(), [None; 4]);
}

#[test]
fn device_has_one_kind_of_interrupt_at_a_time() {
    let host = nvme();
    let both = FakeFunction::new(4096, &[(0, MEM64, 0x4000)], (1, 65));
    *both.0.config.lock().unwrap() = host.0.config.lock().unwrap().clone();
    both.set(0x61, &[0xa0]);
    both.set(0xa0, &[regs::CAP_MSI, 0, 0x80, 0]);
    let m = machine(&both);
    m.device.write_config(0xa2, &[1, 0]);
    m.device.write_config(0x42, &[0, 0x80]);
    m.device.write_config(0xa2, &[0, 0]);
    let enable = |kind, count| Event::Enable(kind, count);
    let events = [enable(IrqKind::Msi, 1), Event::Disable(IrqKind::Msi), enable(IrqKind::Msix, 1)];
    assert_eq!(m.host.events(), events);
}

#[test]
fn bar_is_visible_around_the_msix_table_once() {
    let m = machine(&nvme());
    m.device.bar_moved(0, HOME).unwrap();
    assert_eq!(m.slots.visible(), [(HOME, 0x2000)]);
    m.device.bar_moved(0, HOME).unwrap();
    assert_eq!(m.slots.made(), 1);
    m.device.bar_moved(0, HOME + 0x4000).unwrap();
    assert_eq!(m.slots.visible(), [(HOME + 0x4000, 0x2000)]);
    m.device.bar_released(0).unwrap();
    assert_eq!(m.slots.visible(), []);
    m.device.bar_moved(0, HOME).unwrap();
    drop(m.device);
    assert_eq!(m.slots.visible(), []);
}

#[test]
fn bar_traps_when_slots_run_out() {
    let mut host = FakeFunction::new(256, &[(0, 0, 0x8000)], (0, 0));
    Arc::get_mut(&mut host.0).unwrap().regions[0].mappable = vec![(0, 0x1000), (0x4000, 0x1000)];
    let m = machine(&host);
    *m.slots.most.lock().unwrap() = Some(1);
    m.device.bar_moved(0, HOME).unwrap_err();
    assert_eq!(m.slots.visible(), []);
    *m.slots.most.lock().unwrap() = None;
    m.device.bar_moved(0, HOME).unwrap();
    assert_eq!(m.slots.visible(), [(HOME, 0x1000), (HOME + 0x4000, 0x1000)]);
}

#[test]
fn reset_stops_dma_and_interrupts_and_keeps_the_assigned_bars() {
    let m = machine(&nvme());
    m.device.assign_bar(0, HOME);
    m.device.write_config(regs::COMMAND, &[6, 0]);
    m.device.write_config(regs::BAR0 + 4, &[0x41, 0, 0, 0]);
    m.device.write_config(0x42, &[0, 0x80]);
    m.device.write_config(0x64, &[3, 0]);
    m.host.events();
    m.device.reset().unwrap();
    let quiet = Event::Config(regs::COMMAND, DECODE.to_vec());
    assert_eq!(m.host.events(), [quiet.clone(), Event::Disable(IrqKind::Msix), Event::Reset, quiet]);
    assert_eq!(m.device.bar_address(0), None);
    assert_eq!(dword(&m.device, regs::BAR0 + 4), 0x40);
    assert_eq!(read(&m.device, 0x42), [64, 0]);
    assert_eq!(read(&m.device, 0x64), [8]);
    // MSI-X works again after the guest enables it.
    m.device.write_config(0x42, &CONTROL_ENABLE.to_le_bytes());
    assert_eq!(m.host.events(), [Event::Enable(IrqKind::Msix, 1)]);
}

/// Forwards each notice to a test, with the device's name and host address.
struct Listener(Sender<(String, String, HostNotice)>);

impl HostListener for Listener {
    fn notify(&self, id: &str, host: &str, notice: HostNotice) {
        self.0.send((id.into(), host.into(), notice)).unwrap();
    }
}

#[test]
fn notices_are_forwarded_while_a_listener_exists() {
    let host = nvme();
    host.offer(IrqKind::Error);
    host.offer(IrqKind::Request);
    let m = machine(&host);
    assert!(!host.signal(IrqKind::Error), "no listener yet");
    let (sender, notices) = mpsc::channel();
    m.device.watch(Arc::new(Listener(sender))).unwrap();
    assert_eq!(host.events(), [Event::Enable(IrqKind::Error, 1), Event::Enable(IrqKind::Request, 1)]);
    let next = || notices.recv_timeout(Duration::from_secs(60)).unwrap();
    let notice_of = |notice| ("vfio0".to_string(), "0000:00:05.0".to_string(), notice);
    for _ in 0..2 {
        assert!(host.signal(IrqKind::Request));
        assert_eq!(next(), notice_of(HostNotice::Requested));
    }
    assert!(host.signal(IrqKind::Error));
    assert_eq!(next(), notice_of(HostNotice::Failed));
    // A reset affects only the device's own interrupts, not the notices.
    m.device.reset().unwrap();
    assert!(!host.events().iter().any(|event| matches!(event, Event::Disable(_))));
    assert!(host.signal(IrqKind::Error));
    assert_eq!(next(), notice_of(HostNotice::Failed));

    m.device.unwatch();
    assert!(host.signal(IrqKind::Error) && host.signal(IrqKind::Request));
    // The listener was dropped with the thread, and forwarded nothing more.
    assert_eq!(notices.recv(), Err(RecvError));
}

#[test]
fn device_without_host_notices_is_not_watched() {
    for (kind, notice) in [(IrqKind::Error, HostNotice::Failed), (IrqKind::Request, HostNotice::Requested)] {
        let host = nvme();
        host.offer(kind);
        let m = machine(&host);
        let (sender, notices) = mpsc::channel();
        m.device.watch(Arc::new(Listener(sender))).unwrap();
        assert_eq!(host.events(), [Event::Enable(kind, 1)]);
        assert!(host.signal(kind));
        assert_eq!(notices.recv_timeout(Duration::from_secs(60)).unwrap().2, notice);
        // Dropping the device also drops the listener.
        drop(m);
        assert_eq!(notices.recv(), Err(RecvError));
    }
    let m = machine(&nvme());
    let (sender, notices) = mpsc::channel();
    m.device.watch(Arc::new(Listener(sender))).unwrap();
    assert_eq!((m.host.events(), notices.try_recv()), (vec![], Err(TryRecvError::Disconnected)));
}

#[test]
fn reset_of_reclaimed_device_succeeds_but_open_is_refused() {
    let host = nvme();
    host.offer(IrqKind::Request);
    let m = machine(&host);
    let (sender, notices) = mpsc::channel();
    m.device.watch(Arc::new(Listener(sender))).unwrap();
    m.device.write_config(regs::COMMAND, &[6, 0]);
    host.0.held.store(true, Ordering::Relaxed);
    assert!(host.signal(IrqKind::Request));
    notices.recv_timeout(Duration::from_secs(60)).unwrap();
    host.events();
    m.device.reset().unwrap();
    assert_eq!((host.get(regs::COMMAND), m.device.bar_address(0)), (2, None));
    assert!(!host.events().contains(&Event::Reset));
    assert!(m.device.is_held());
    let error = refusal(&host);
    assert!(error.to_string().contains("cannot reset 0000:00:05.0"), "{error}");
    host.0.held.store(false, Ordering::Relaxed);
    m.device.reset().unwrap();
    assert!(!m.device.is_held() && host.events().contains(&Event::Reset));
}

#[test]
fn reset_waits_for_host_hold_and_fails_if_it_persists() {
    let m = machine(&nvme());
    m.host.0.held.store(true, Ordering::Relaxed);
    let host = m.host.0.clone();
    let release = thread::spawn(move || {
        thread::sleep(Duration::from_millis(200));
        host.held.store(false, Ordering::Relaxed);
    });
    m.device.reset().unwrap();
    release.join().unwrap();
    assert!(m.host.events().contains(&Event::Reset));

    // The host has not asked this process to close the device, so the reset must fail.
    m.host.0.held.store(true, Ordering::Relaxed);
    m.host.events();
    assert_eq!(m.device.reset().unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(!m.host.events().contains(&Event::Reset));
}

#[test]
fn rejected_notice_leaves_the_other_notice_working() {
    let host = nvme();
    host.offer(IrqKind::Error);
    host.offer(IrqKind::Request);
    host.0.refused.lock().unwrap().push(IrqKind::Request);
    let m = machine(&host);
    let (sender, notices) = mpsc::channel();
    m.device.watch(Arc::new(Listener(sender))).unwrap();
    assert!(host.signal(IrqKind::Error) && !host.signal(IrqKind::Request));
    assert_eq!(notices.recv_timeout(Duration::from_secs(60)).unwrap().2, HostNotice::Failed);
}

mod hostile {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

        /// For any configuration space and any guest writes, the guest's capability lists must have an end. The host's BARs and their
        /// decoding must not change.
        #[test]
        fn random_space_and_random_writes_are_survived(
            space in prop::collection::vec(any::<u8>(), 4096),
            links in prop::collection::vec((0x40u16..0x100, 0u8..=255), 0..12),
            writes in prop::collection::vec((0u16..1024, any::<u32>(), 0u32..3), 0..60),
            irqs in (0u32..40, 0u32..3000),
        ) {
            let host = FakeFunction::new(4096, &[(0, MEM64, 0x4000), (2, 0, 0x1000), (4, 1, 0x20)], irqs);
            host.set(0x40, &space[0x40..]);
            for (at, value) in links {
                host.set(at, &[value]);
            }
            host.list(space[regs::CAPABILITIES as usize]);
            host.set(regs::INTERRUPT_PIN, &space[..1]);
            host.offer(IrqKind::Intx);
            let m = machine(&host);
            walk(&m.device);
            walk_extended(&m.device);
            let bars = host.0.config.lock().unwrap()[0x10..0x2c].to_vec();
            for (at, value, width) in writes {
                let len = 1 << width;
                m.device.write_config(at * 4, &value.to_le_bytes()[..len]);
                m.device.write_bar(0, (u64::from(at) * 16) & !3, &value.to_le_bytes()[..len]);
            }
            walk(&m.device);
            walk_extended(&m.device);
            prop_assert_eq!(&host.0.config.lock().unwrap()[0x10..0x2c], &bars[..]);
            prop_assert_eq!(host.get(regs::COMMAND) & 3, 3);
            m.device.reset().unwrap();
            prop_assert_eq!(host.get(regs::COMMAND) & 7, 3);
            let has_pin = read(&m.device, regs::INTERRUPT_PIN) != [0];
            prop_assert_eq!(m.line.connected(), u32::from(has_pin));
        }
    }
}
