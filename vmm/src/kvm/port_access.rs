// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a vCPU that has left the guest for an I/O port wants there.

use std::slice::ChunksExactMut;

use kvm_bindings::KVM_EXIT_IO;
use kvm_ioctls::VcpuFd;

/// The accesses of the exit that `vcpu` has just made, one after the other, each of one, two or four bytes at the same port. A string
/// instruction (`rep ins`) makes many with one exit; kvm-ioctls gives their bytes as one slice and does not tell how many they are.
/// Empty if the exit was another one.
pub fn port_accesses(vcpu: &mut VcpuFd) -> ChunksExactMut<'_, u8> {
    let run = vcpu.get_kvm_run();
    if run.exit_reason != KVM_EXIT_IO {
        return <&mut [u8]>::default().chunks_exact_mut(1);
    }
    // SAFETY: The reason of the exit says that this is the field which the kernel wrote, and all of its bits are numbers.
    let io = unsafe { run.__bindgen_anon_1.io };
    let size = usize::from(io.size.max(1));
    let start = std::ptr::from_mut(run).cast::<u8>();
    let Ok(offset) = usize::try_from(io.data_offset) else { return <&mut [u8]>::default().chunks_exact_mut(1) };
    // SAFETY: The kernel says how far its bytes are from the start of `kvm_run`, in the same mapping
    // (Documentation/virt/kvm/api.rst, KVM_EXIT_IO).
    let first = unsafe { start.add(offset) };
    // SAFETY: All `count` times `size` bytes are in that mapping, which stays as long as the vCPU. The vCPU is borrowed as long as the
    // slice is there, so that it does not run, and nobody else touches them.
    let data = unsafe { std::slice::from_raw_parts_mut(first, io.count as usize * size) };
    data.chunks_exact_mut(size)
}
