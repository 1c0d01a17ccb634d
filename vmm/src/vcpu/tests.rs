// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of instructions whose device accesses KVM completes in several pieces. In each run, the vCPU is ordered to pause or stop during
//! one piece, or during every piece.
//!
//! The device itself gives the order, on the vCPU's thread. So the order arrives exactly during the chosen piece.

use std::sync::{MutexGuard, OnceLock};

use carom_api::config::{CpusConfig, MemoryConfig};
use devices::platform::{AddressSpace, BusDevice};
use devices::ram::Ram;
use kvm_bindings::kvm_regs;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::address_space::{Access, IoMapOwner, SlotMemory};
use crate::arch::cpuid::CpuidTemplate;
use crate::arch::irqchip::vm_for_test;
use crate::arch::registers::{Entry, set_entry, write_tables};
use crate::arch::vcpu_state::{UnwritableMsr, VcpuState};
use crate::kvm::KvmVm;
use crate::kvm::slots::KvmSlots;
use crate::memory;

/// Address of the code.
const CODE: u64 = 0x20_0000;
/// Memory that a program reads, and memory that it writes.
const SOURCE: u64 = 0x30_0000;
const TARGET: u64 = 0x30_1000;
/// Registers of the board: two pages.
const BOARD: u64 = 0xd000_0000;
const BOARD_LEN: u64 = 0x2000;
/// Port of the board. Each read returns the next number.
const PORT: u64 = 0x500;
/// Port that a program writes to at its end.
const END_PORT: u64 = 0x80;
/// CR4.OSFXSR and CR4.OSXMMEXCPT: enable SSE instructions.
const CR4_SSE: u64 = 3 << 9;
/// Number of bytes at [`SOURCE`], and at [`TARGET`], that the tests compare.
const COMPARED: usize = 256;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Piece of an access, as the board sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Read(u64, Vec<u8>),
    Write(u64, Vec<u8>),
    PortRead(Vec<u8>),
    PortWrite(Vec<u8>),
}

#[derive(Default)]
struct BoardState {
    memory: Vec<u8>,
    next_number: u8,
    pieces: Vec<Piece>,
    ended: bool,
}

/// Device with memory and ports, which gives orders to its vCPU.
struct Board {
    state: Mutex<BoardState>,
    vcpu: OnceLock<Arc<Shared>>,
    /// Order that the board gives during piece number `at`. If `at` is `None`, the board gives the order during every piece.
    order: Order,
    at: Option<usize>,
}

impl Board {
    fn note(&self, piece: Piece) {
        let mut state = lock(&self.state);
        let number = state.pieces.len();
        state.pieces.push(piece);
        drop(state);
        if self.at.is_none_or(|at| at == number) {
            self.give(self.order);
        }
    }

    fn give(&self, order: Order) {
        if let Some(shared) = self.vcpu.get() {
            shared.handshake.give(order);
        }
    }
}

struct Registers(Arc<Board>);

impl BusDevice for Registers {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let at = usize::try_from(offset).unwrap();
        data.copy_from_slice(&lock(&self.0.state).memory[at..at + data.len()]);
        self.0.note(Piece::Read(offset, data.to_vec()));
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let at = usize::try_from(offset).unwrap();
        lock(&self.0.state).memory[at..at + data.len()].copy_from_slice(data);
        self.0.note(Piece::Write(offset, data.to_vec()));
    }
}

struct Port(Arc<Board>);

impl BusDevice for Port {
    fn read(&self, _: u64, data: &mut [u8]) {
        for byte in &mut *data {
            let mut state = lock(&self.0.state);
            state.next_number = state.next_number.wrapping_add(1);
            *byte = state.next_number;
        }
        self.0.note(Piece::PortRead(data.to_vec()));
    }

    fn write(&self, _: u64, data: &[u8]) {
        self.0.note(Piece::PortWrite(data.to_vec()));
    }
}

struct End(Arc<Board>);

impl BusDevice for End {
    fn read(&self, _: u64, _: &mut [u8]) {}

    fn write(&self, _: u64, _: &[u8]) {
        lock(&self.0.state).ended = true;
        self.0.give(Order::Pause);
    }
}

/// Short program with its initial registers.
struct Program {
    name: &'static str,
    code: &'static [u8],
    regs: kvm_regs,
    /// Number of pieces that KVM completes before it can return to the guest. For a string instruction that writes to the board, KVM can
    /// return between words.
    unit: usize,
}

/// Results of a program that a pause or stop must not change.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    pieces: Vec<Piece>,
    ended: bool,
    /// Bytes of the board's registers that the program changed, with their offsets.
    written: Vec<(usize, u8)>,
    source: Vec<u8>,
    target: Vec<u8>,
    event: Option<GuestEvent>,
}

fn programs() -> Vec<Program> {
    let regs = |rsi, rdi, rcx| kvm_regs {
        rsi,
        rdi,
        rcx,
        rax: 0x1122_3344,
        rbx: TARGET,
        rdx: PORT,
        rsp: BOARD + 0x800,
        ..Default::default()
    };
    let end_of_page = BOARD + 0xffe;
    let program = |name, unit, code, regs| Program { name, code, regs, unit };
    vec![
        program(
            "movups xmm0, [esi]; movups [edi], xmm0: store",
            ALL,
            &[0x0f, 0x10, 6, 0x0f, 0x11, 7],
            regs(SOURCE, BOARD, 0),
        ),
        program("movups: load", ALL, &[0x0f, 0x10, 6, 0x0f, 0x11, 7], regs(BOARD, TARGET, 0)),
        program("movups: load and store", 2, &[0x0f, 0x10, 6, 0x0f, 0x11, 7], regs(BOARD, BOARD + 0x100, 0)),
        program("movups: store across pages", ALL, &[0x0f, 0x10, 6, 0x0f, 0x11, 7], regs(SOURCE, end_of_page, 0)),
        program("mov eax, [esi]; mov [ebx], eax: load across pages", ALL, &[0x8b, 6, 0x89, 3], regs(end_of_page, 0, 0)),
        program("mov [edi], eax: store across pages", ALL, &[0x89, 7], regs(0, end_of_page, 0)),
        program("rep movsd: from registers", ALL, &[0xf3, 0xa5], regs(BOARD, TARGET, 4)),
        program("rep movsb: from registers", ALL, &[0xf3, 0xa4], regs(BOARD + 1, TARGET, 3)),
        program("rep movsd: to registers", 1, &[0xf3, 0xa5], regs(SOURCE, BOARD, 4)),
        program("rep movsd: between registers", 2, &[0xf3, 0xa5], regs(BOARD, BOARD + 0x100, 4)),
        program("rep stosd", 1, &[0xf3, 0xab], regs(0, BOARD, 4)),
        program("rep lodsd; mov [ebx], eax", ALL, &[0xf3, 0xad, 0x89, 3], regs(BOARD, 0, 4)),
        program("repe cmpsd; sete [ebx]", ALL, &[0xf3, 0xa7, 0x0f, 0x94, 3], regs(BOARD, BOARD + 0x1000, 2)),
        program("rep insd: to memory", ALL, &[0xf3, 0x6d], regs(0, TARGET, 4)),
        program("rep insb: to memory", ALL, &[0xf3, 0x6c], regs(0, TARGET, 3)),
        program("rep insd: to registers", ALL, &[0xf3, 0x6d], regs(0, BOARD, 4)),
        program("rep outsd: from memory", 1, &[0xf3, 0x6f], regs(SOURCE, 0, 4)),
        program("rep outsw: from memory", 1, &[0xf3, 0x66, 0x6f], regs(SOURCE, 0, 3)),
        program("rep outsd: from registers", 2, &[0xf3, 0x6f], regs(BOARD, 0, 4)),
        program("add [edi], eax", ALL, &[0x01, 7], regs(0, BOARD, 0)),
        program("lock add [edi], eax", ALL, &[0xf0, 0x01, 7], regs(0, BOARD, 0)),
        program("xchg [edi], eax; mov [ebx], eax", ALL, &[0x87, 7, 0x89, 3], regs(0, BOARD, 0)),
        program("push [esi]: both in registers", ALL, &[0xff, 0x36], regs(BOARD, 0, 0)),
    ]
}

fn bytes(step: usize) -> impl Iterator<Item = u8> {
    (0..usize::MAX).map(move |at| (at.wrapping_mul(step) + 3).to_le_bytes()[0])
}

/// Returns the initial contents of the board's registers. Both pages are equal, so that `cmps` finds no difference.
fn board_bytes() -> impl Iterator<Item = u8> {
    bytes(7).take(usize::try_from(BOARD_LEN).unwrap())
}

/// VM with one vCPU and the board.
struct Rig {
    kvm: KvmVm,
    ram: Arc<Ram>,
    board: Arc<Board>,
    mailbox: Arc<Mailbox>,
    initial: VcpuState,
    vcpu: Option<Vcpu>,
    io_map: IoMapOwner,
}

impl Rig {
    /// Creates a VM that is ready to run the program. The board gives `order` in piece `at` of its accesses, or in each piece.
    fn new(program: &Program, order: Order, at: Option<usize>) -> Option<Self> {
        let kvm = vm_for_test()?;
        let ram = memory::create(&MemoryConfig { size: 4 << 20, ..Default::default() }).unwrap();
        memory::show(&ram, &KvmSlots::new(kvm.fd.clone(), 8)).unwrap();
        let code = [program.code, &[0xe6, 0x80, 0xeb, 0xfe]].concat();
        ram.write_slice(&code, GuestAddress(CODE)).unwrap();
        write_tables(&ram).unwrap();
        ram.write_slice(&bytes(5).take(COMPARED).collect::<Vec<u8>>(), GuestAddress(SOURCE)).unwrap();

        let fd = kvm.create_vcpu(0).unwrap();
        let cpus = CpusConfig::default();
        fd.set_cpuid2(&CpuidTemplate::new(&kvm.kvm, &cpus).unwrap().for_vcpu(0).unwrap()).unwrap();
        let initial = VcpuState::save(&kvm.kvm, &kvm.fd, &fd).unwrap();
        set_entry(&fd, Entry::Pvh(CODE)).unwrap();
        let mut sregs = fd.get_sregs().unwrap();
        sregs.cr4 |= CR4_SSE;
        fd.set_sregs(&sregs).unwrap();
        fd.set_regs(&kvm_regs { rip: CODE, rflags: 2, ..program.regs }).unwrap();

        let state = Mutex::new(BoardState { memory: board_bytes().collect(), ..Default::default() });
        let board = Arc::new(Board { state, vcpu: OnceLock::new(), order, at });
        let io_map = IoMapOwner::new();
        let registers = Arc::new(Registers(board.clone()));
        io_map.insert(Space::Memory, BOARD, BOARD_LEN, registers).unwrap();
        io_map.insert(Space::Port, PORT, 4, Arc::new(Port(board.clone()))).unwrap();
        io_map.insert(Space::Port, END_PORT, 1, Arc::new(End(board.clone()))).unwrap();
        let of_event = board.clone();
        // Any event of the guest also pauses the vCPU, so that a failure ends the run.
        let mailbox = Arc::new(Mailbox::new(Box::new(move || of_event.give(Order::Pause))));
        let vcpu = Vcpu::spawn(0, None, Arc::new(Mutex::new(fd)), Arc::clone(&io_map), mailbox.clone()).unwrap();
        assert!(board.vcpu.set(vcpu.shared.clone()).is_ok());
        Some(Self { kvm, ram, board, mailbox, initial, vcpu: Some(vcpu), io_map })
    }

    /// Runs the program to its end. In each pause, the vCPU is saved, reset to power-on and restored.
    fn run(&self) {
        let vcpu = self.vcpu.as_ref().unwrap();
        let is_over = || lock(&self.board.state).ended || vcpu.shared.halted.load(Ordering::Acquire);
        while !is_over() {
            vcpu.resume();
            vcpu.wait_paused();
            vcpu.with_fd(|fd| {
                let (kvm, vm) = (&self.kvm.kvm, &self.kvm.fd);
                let saved = VcpuState::save(kvm, vm, fd).unwrap();
                self.initial.restore(kvm, vm, fd, UnwritableMsr::Leave).unwrap();
                saved.restore(kvm, vm, fd, UnwritableMsr::Leave).unwrap();
            });
        }
    }

    /// Runs the program until its vCPU is ordered to stop, or to its end.
    fn run_until_stopped(&mut self) {
        let vcpu = self.vcpu.take().unwrap();
        vcpu.resume();
        // The thread stops by itself during an access, or is paused at the end.
        vcpu.wait_paused();
        drop(vcpu);
    }

    fn outcome(&self) -> Outcome {
        let read = |at: u64| {
            let mut bytes = vec![0; COMPARED];
            self.ram.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            bytes
        };
        let state = lock(&self.board.state);
        let written = state.memory.iter().zip(board_bytes()).enumerate().filter(|(_, (is, was))| **is != *was);
        Outcome {
            pieces: state.pieces.clone(),
            ended: state.ended,
            written: written.map(|(at, (byte, _))| (at, *byte)).collect(),
            source: read(SOURCE),
            target: read(TARGET),
            event: self.mailbox.take().1,
        }
    }
}

/// Runs a program and returns its outcome. Returns `None` without KVM.
fn run(program: &Program, order: Order, at: Option<usize>) -> Option<Outcome> {
    let rig = Rig::new(program, order, at)?;
    rig.run();
    Some(rig.outcome())
}

/// Value of [`Program::unit`] for a program whose pieces KVM must all complete before it can return to the guest.
const ALL: usize = usize::MAX / 2;
/// Value of [`Board::at`] that is no piece's number, so that the board gives no order.
const NEVER: Option<usize> = Some(usize::MAX);

#[test]
fn access_in_pieces_is_whole_when_paused_in_any_piece() {
    for program in programs() {
        let Some(calm) = run(&program, Order::Pause, NEVER) else { return };
        assert!(calm.ended && calm.event.is_none() && calm.pieces.len() > 1, "{}: {calm:?}", program.name);
        for at in (0..calm.pieces.len()).map(Some).chain([None]) {
            let paused = run(&program, Order::Pause, at).unwrap();
            assert_eq!(paused, calm, "{}, paused in piece {at:?}", program.name);
        }
    }
}

#[test]
fn removed_vcpu_first_completes_its_access() {
    for program in programs() {
        let Some(calm) = run(&program, Order::Pause, NEVER) else { return };
        for at in 0..calm.pieces.len() {
            let mut rig = Rig::new(&program, Order::Stop, Some(at)).unwrap();
            rig.run_until_stopped();
            let stopped = rig.outcome();
            let done = stopped.pieces.len();
            let least = ((at / program.unit + 1).saturating_mul(program.unit)).min(calm.pieces.len());
            assert!(done >= least, "{}, stopped in piece {at}: {stopped:?}", program.name);
            assert!(calm.pieces.starts_with(&stopped.pieces), "{}: {stopped:?}", program.name);
        }
    }
}

#[test]
fn failure_while_an_access_completes_is_reported() {
    // lret reads two words from its stack, which is in the board's registers. Then KVM's emulator fails, because it does not support a
    // return to another privilege level.
    let regs = kvm_regs { rsp: BOARD, ..Default::default() };
    let program = Program { name: "lret", code: &[0xcb], regs, unit: ALL };
    let Some(rig) = Rig::new(&program, Order::Pause, Some(0)) else { return };
    lock(&rig.board.state).memory[..8].copy_from_slice(&[0, 0, 0x20, 0, 0x13, 0, 0, 0]);
    let vcpu = rig.vcpu.as_ref().unwrap();
    vcpu.resume();
    vcpu.wait_paused();
    let outcome = rig.outcome();
    assert_eq!(outcome.pieces.len(), 2, "{outcome:?}");
    let is_failure =
        matches!(&outcome.event, Some(GuestEvent::Failed(why)) if why.contains("KVM cannot run the guest"));
    assert!(is_failure, "{outcome:?}");
    // Before a reset, the vCPU does not run, even if it is ordered to run.
    vcpu.resume();
    vcpu.pause();
    vcpu.wait_paused();
    assert_eq!(rig.outcome(), Outcome { event: None, ..outcome });
    assert!(vcpu.shared.halted.load(Ordering::Acquire));
}

/// First lost address of [`LostMemory`].
const LOST: u64 = 0xe000_0000;
/// Slots whose memory is lost from [`LOST`] on.
struct LostMemory;

impl SlotMemory for LostMemory {
    fn access(&self, address: u64, _: Access<'_>) -> Result<bool, Loss> {
        if address < LOST { Ok(false) } else { Err(self.loss(address)) }
    }

    fn loss(&self, address: u64) -> Loss {
        Loss { address: None, gpa: Some(address), cause: Cause::Missing }
    }
}

#[test]
fn instruction_that_reads_lost_memory_reaches_no_device() {
    let regs = kvm_regs { rsi: LOST, rdi: BOARD, rcx: 4, rdx: PORT, ..Default::default() };
    for (name, code) in [("rep movsd", &[0xf3, 0xa5][..]), ("rep outsd", &[0xf3, 0x6f]), ("push [esi]", &[0xff, 0x36])]
    {
        let regs = kvm_regs { rsp: BOARD + 0x800, ..regs };
        let program = Program { name, code, regs, unit: ALL };
        let Some(rig) = Rig::new(&program, Order::Pause, NEVER) else { return };
        let slots = Arc::new(LostMemory);
        rig.io_map.set_slots(&slots);
        rig.run();
        let outcome = rig.outcome();
        let is_lost =
            matches!(&outcome.event, Some(GuestEvent::Failed(why)) if why.contains("guest-physical 0xe0000000"));
        assert!(is_lost && outcome.pieces.is_empty() && !outcome.ended, "{name}: {outcome:?}");
    }
}
