// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Port I/O accesses that caused a vCPU's exit.

use std::slice::ChunksExactMut;

use kvm_bindings::KVM_EXIT_IO;
use kvm_ioctls::VcpuFd;

/// Returns the accesses of the exit that `vcpu` has just made, one after the other. For exits other than port I/O, the result is empty.
///
/// Each access has one, two or four bytes. All accesses are at the same port. A string instruction (`rep ins`) makes many accesses in one
/// exit. kvm-ioctls returns the bytes of all accesses as one slice, without the number of accesses.
pub fn port_accesses(vcpu: &mut VcpuFd) -> ChunksExactMut<'_, u8> {
    let run = vcpu.get_kvm_run();
    if run.exit_reason != KVM_EXIT_IO {
        return <&mut [u8]>::default().chunks_exact_mut(1);
    }
    // SAFETY: The exit reason shows that the kernel wrote this field, which contains only numbers.
    let io = unsafe { run.__bindgen_anon_1.io };
    let size = usize::from(io.size.max(1));
    let start = std::ptr::from_mut(run).cast::<u8>();
    let Ok(offset) = usize::try_from(io.data_offset) else { return <&mut [u8]>::default().chunks_exact_mut(1) };
    // SAFETY: The kernel's offset is from the start of `kvm_run` and lies in the same mapping (Documentation/virt/kvm/api.rst,
    // KVM_EXIT_IO).
    let first = unsafe { start.add(offset) };
    // SAFETY: All `count` times `size` bytes are in that mapping, which lives as long as the vCPU. The vCPU is borrowed while the
    // slice exists, so the vCPU does not run, and nothing else accesses the bytes.
    let data = unsafe { std::slice::from_raw_parts_mut(first, io.count as usize * size) };
    data.chunks_exact_mut(size)
}
