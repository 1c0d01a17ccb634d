// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers of a vCPU at the entry of a kernel.

use devices::ram::Ram;
use kvm_bindings::{kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::layout::{BOOT_GDT, BOOT_IDT, BOOT_PML4, BOOT_STACK, PAGE_SIZE, PVH_START_INFO, ZERO_PAGE};
use super::msr;
use crate::kvm::KvmError;

/// Default MTRR type and its enable bit (Intel SDM volume 4, `IA32_MTRR_DEF_TYPE`).
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
/// MTRRs are enabled, and their default type is write-back. So the memory of bounce windows, which is in a BAR, is cached like RAM.
/// Registers that Linux maps with ioremap stay uncached, because of the page attribute table.
const MTRR_ENABLED_WRITE_BACK: u64 = (1 << 11) | 6;

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const PAGE_PRESENT_WRITABLE: u64 = 3;
const PAGE_LARGE: u64 = 1 << 7;

/// Entry point of the boot processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit entry of the Linux boot protocol (Documentation/arch/x86/boot.rst).
    Linux64(u64),
    /// 32-bit PVH entry (Xen's `docs/misc/pvh.pandoc`).
    Pvh(u64),
}

/// Sets the default MTRR type of a vCPU to write-back.
pub fn set_mtrr_write_back(vcpu: &VcpuFd) -> Result<(), KvmError> {
    let entry = kvm_msr_entry { index: MSR_MTRR_DEF_TYPE, data: MTRR_ENABLED_WRITE_BACK, ..Default::default() };
    msr::write(vcpu, entry).map(drop)
}

/// Prepares the boot processor to enter the kernel. [`write_tables`] writes the page tables and the descriptor table that this entry needs.
pub fn set_entry(vcpu: &VcpuFd, entry: Entry) -> Result<(), KvmError> {
    let mut sregs = vcpu.get_sregs().map_err(KvmError::call("read a vCPU's special registers"))?;
    let regs = match entry {
        Entry::Linux64(rip) => {
            long_mode(&mut sregs);
            kvm_regs { rflags: 2, rip, rsp: BOOT_STACK, rbp: BOOT_STACK, rsi: ZERO_PAGE, ..Default::default() }
        }
        Entry::Pvh(rip) => {
            protected_mode(&mut sregs);
            kvm_regs { rflags: 2, rip, rbx: PVH_START_INFO, ..Default::default() }
        }
    };
    vcpu.set_sregs(&sregs).map_err(KvmError::call("set a vCPU's special registers"))?;
    vcpu.set_regs(&regs).map_err(KvmError::call("set a vCPU's registers"))
}

/// Writes the boot processor's descriptor table and page tables, which map 1 GiB one to one with 2 MiB pages.
pub fn write_tables(memory: &Ram) -> Result<(), vm_memory::GuestMemoryError> {
    let mut tables = Vec::new();
    for (index, descriptor) in descriptors(true).into_iter().enumerate() {
        tables.push((BOOT_GDT + 8 * index as u64, descriptor));
    }
    tables.push((BOOT_IDT, 0));
    let (pdpt, pd) = (BOOT_PML4 + PAGE_SIZE, BOOT_PML4 + 2 * PAGE_SIZE);
    tables.push((BOOT_PML4, pdpt | PAGE_PRESENT_WRITABLE));
    tables.push((pdpt, pd | PAGE_PRESENT_WRITABLE));
    tables.extend((0..512).map(|i| (pd + 8 * i, (i << 21) | PAGE_PRESENT_WRITABLE | PAGE_LARGE)));
    tables.into_iter().try_for_each(|(address, value)| memory.write_obj(value, GuestAddress(address)))
}

/// Returns the null, code, data and task descriptors, at the selectors that the boot protocols define (0x10 and 0x18
/// for Linux).
fn descriptors(long: bool) -> [u64; 5] {
    let code = if long { 0x00af_9b00_0000_ffff } else { 0x00cf_9b00_0000_ffff };
    [0, 0, code, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff]
}

fn segment(selector: u16, type_: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: 1,
        s: 1,
        l: 0,
        g: 1,
        ..Default::default()
    }
}

fn flat_segments(sregs: &mut kvm_sregs) {
    let data = segment(0x18, 3);
    sregs.cs = segment(0x10, 11);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment { limit: 0x67, s: 0, db: 0, g: 0, ..segment(0x20, 11) };
    (sregs.gdt.base, sregs.gdt.limit) = (BOOT_GDT, 39);
    (sregs.idt.base, sregs.idt.limit) = (BOOT_IDT, 7);
}

fn protected_mode(sregs: &mut kvm_sregs) {
    flat_segments(sregs);
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    sregs.efer = 0;
}

fn long_mode(sregs: &mut kvm_sregs) {
    flat_segments(sregs);
    (sregs.cs.l, sregs.cs.db) = (1, 0);
    sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
    sregs.cr3 = BOOT_PML4;
    sregs.cr4 = CR4_PAE;
    sregs.efer = EFER_LME | EFER_LMA;
}
