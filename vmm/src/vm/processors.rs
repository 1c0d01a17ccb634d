// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vCPUs of the guest, and parked vCPUs. KVM cannot remove a vCPU, so a vCPU that the guest has released is parked without a thread
//! until it is added again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use devices::sandbox::HostCpus;
use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;
use log::{info, warn};

use super::Vm;
use crate::address_space::IoMap;
use crate::arch::cpuid;
use crate::arch::registers::set_mtrr_write_back;
use crate::arch::saved::{LeadingCounter, Vcpus};
use crate::arch::vcpu_state::{UnwritableMsr, VcpuState};
use crate::error::VmError;
use crate::kvm::{KvmError, KvmVm};
use crate::mailbox::Mailbox;
use crate::vcpu::Vcpu;

/// vCPU that was created in KVM.
struct Made {
    fd: Arc<Mutex<VcpuFd>>,
    /// CPUID of the vCPU.
    cpuid: CpuId,
    /// State of the vCPU at power-on.
    initial: VcpuState,
}

impl Made {
    fn new(kvm: &KvmVm, number: u32, cpuid: CpuId) -> Result<Self, KvmError> {
        let fd = kvm.create_vcpu(number)?;
        fd.set_cpuid2(&cpuid).map_err(KvmError::call(format!("set the CPUID table of vCPU {number}")))?;
        let initial = VcpuState::save(&kvm.kvm, &kvm.fd, &fd)?;
        set_mtrr_write_back(&fd)?;
        Ok(Self { fd: Arc::new(Mutex::new(fd)), cpuid, initial })
    }

    /// Resets the vCPU to its power-on state. In this state, every vCPU except the boot processor waits until another vCPU starts it. The
    /// vCPU must not be running when this function is called.
    fn power_on(&self, kvm: &KvmVm) -> Result<(), KvmError> {
        let fd = self.fd.lock().unwrap_or_else(PoisonError::into_inner);
        self.initial.restore(&kvm.kvm, &kvm.fd, &fd, UnwritableMsr::Leave)?;
        set_mtrr_write_back(&fd)
    }
}

/// vCPU of the guest, with its thread.
struct Processor {
    vcpu: Vcpu,
    made: Made,
}

/// All vCPUs.
pub(super) struct Processors {
    /// vCPUs of the guest, by number.
    present: BTreeMap<u32, Processor>,
    /// Parked vCPUs, which the guest has released.
    parked: BTreeMap<u32, Made>,
    /// Time stamp counter that vCPUs added later must follow. It is set only in a restored guest.
    counter: Option<LeadingCounter>,
    /// Host CPUs of each vCPU, by vCPU number. A vCPU without an entry runs on any CPU.
    affinity: BTreeMap<u32, HostCpus>,
    io_map: Arc<IoMap>,
    mailbox: Arc<Mailbox>,
}

impl Processors {
    /// Creates vCPUs with these numbers and CPUID, paused and in their power-on state. These vCPUs, and vCPUs that are added later, run on
    /// the host CPUs in `affinity`.
    pub(super) fn new(
        kvm: &KvmVm,
        cpuids: Vec<(u32, CpuId)>,
        affinity: BTreeMap<u32, HostCpus>,
        io_map: Arc<IoMap>,
        mailbox: Arc<Mailbox>,
    ) -> Result<Self, VmError> {
        let (present, parked) = (BTreeMap::new(), BTreeMap::new());
        let mut processors = Self { present, parked, counter: None, affinity, io_map, mailbox };
        for (number, cpuid) in cpuids {
            processors.run(number, Made::new(kvm, number, cpuid)?)?;
        }
        // Wait only after all threads were started, so that the threads start in parallel.
        processors.present.values().for_each(|processor| processor.vcpu.wait_started());
        Ok(processors)
    }

    /// Starts the thread of the paused vCPU.
    fn run(&mut self, number: u32, made: Made) -> Result<(), VmError> {
        let cpus = self.affinity.get(&number).copied();
        let vcpu = Vcpu::spawn(number, cpus, made.fd.clone(), self.io_map.clone(), self.mailbox.clone());
        match vcpu {
            Ok(vcpu) => {
                self.present.insert(number, Processor { vcpu, made });
                Ok(())
            }
            Err(source) => {
                self.parked.insert(number, made);
                Err(VmError::Device { what: "start the thread of a vCPU", source })
            }
        }
    }

    /// Adds a paused vCPU to a guest that already has vCPUs. Reuses vCPU `number` if it is parked. Otherwise creates a new vCPU.
    fn bring(&mut self, kvm: &KvmVm, number: u32) -> Result<(), VmError> {
        let Some(made) = self.parked.remove(&number) else {
            let made = self.make(kvm, number)?;
            // KVM delivers INIT to a new vCPU only after its local APIC is registered. This call registers the APIC. Without the call, KVM
            // would register the APIC only when another APIC changes.
            made.power_on(kvm)?;
            return self.start(number, made);
        };
        if let Err(error) = made.power_on(kvm) {
            self.parked.insert(number, made);
            return Err(error.into());
        }
        self.start(number, made)
    }

    /// Starts the thread of the paused vCPU, and waits until the thread runs.
    fn start(&mut self, number: u32, made: Made) -> Result<(), VmError> {
        self.run(number, made)?;
        if let Some(processor) = self.present.get(&number) {
            processor.vcpu.wait_started();
        }
        Ok(())
    }

    fn make(&self, kvm: &KvmVm, number: u32) -> Result<Made, KvmError> {
        let missing = || KvmError::other(format!("create vCPU {number}"), "the VM has no vCPU whose CPUID it can copy");
        let first = self.present.values().next().ok_or_else(missing)?;
        let made = Made::new(kvm, number, cpuid::of_vcpu(&first.made.cpuid, number))?;
        if let Some(counter) = &self.counter {
            counter.lead(&kvm.kvm, &made.fd.lock().unwrap_or_else(PoisonError::into_inner))?;
        }
        Ok(made)
    }

    /// Ends the thread of a vCPU that the guest has released.
    fn park(&mut self, kvm: &KvmVm, number: u32) {
        let Some(Processor { vcpu, made }) = self.present.remove(&number) else { return };
        drop(vcpu);
        // Without this reset, the vCPU's timers and other state from the guest would stay active.
        if let Err(error) = made.power_on(kvm) {
            warn!("vCPU {number}: cannot reset the removed vCPU: {error}");
        }
        self.parked.insert(number, made);
    }

    /// Returns the guest's vCPUs, the boot processor first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Vcpu> {
        self.present.values().map(|processor| &processor.vcpu)
    }

    fn count(&self) -> u32 {
        u32::try_from(self.present.len()).unwrap_or(u32::MAX)
    }

    /// Stops all vCPUs.
    pub(super) fn stop(&self) {
        self.iter().for_each(Vcpu::pause);
        self.iter().for_each(Vcpu::wait_paused);
    }

    /// Resets all vCPUs to their power-on state. All vCPUs must be stopped.
    pub(super) fn reset(&self, kvm: &KvmVm) -> Result<(), KvmError> {
        self.present.values().try_for_each(|processor| {
            processor.made.power_on(kvm)?;
            processor.vcpu.forget_halt();
            Ok(())
        })
    }

    /// Makes the time stamp counters of vCPUs that are added later follow `counter`, the counter of the first vCPU.
    pub(super) fn follow(&mut self, counter: Option<LeadingCounter>) {
        self.counter = counter;
    }
}

impl Vcpus for Processors {
    fn numbers(&self) -> Vec<u32> {
        self.present.keys().copied().collect()
    }
    fn cpuid(&self, number: u32) -> &CpuId {
        &self.present[&number].made.cpuid
    }
    fn with<R>(&self, number: u32, then: impl FnOnce(&VcpuFd) -> R) -> R {
        self.present[&number].vcpu.with_fd(then)
    }
}

impl Vm {
    /// Sets the wanted number of vCPUs to `count`. Adds missing vCPUs, and asks the guest to release surplus vCPUs. New vCPUs run if `run`
    /// is set.
    pub(super) fn want_vcpus(&mut self, count: u32, run: bool) -> Result<(), VmError> {
        self.park_gone();
        let Some(registers) = self.board.processors.clone() else {
            return if count == 1 {
                Ok(())
            } else {
                Err(VmError::Guest(format!(
                    "the VM can have only one vCPU: set cpus.max_vcpus to at least {count} before boot"
                )))
            };
        };
        let has = self.processors.numbers();
        let missing: Vec<u32> = (0..count).filter(|number| !has.contains(number)).collect();
        let brought = missing.iter().try_for_each(|number| self.processors.bring(&self.kvm, *number));
        // Resume the new vCPUs before the guest is notified of them. A resumed vCPU waits until the guest starts it.
        if run && brought.is_ok() {
            self.processors.iter().filter(|vcpu| missing.contains(&vcpu.id())).for_each(Vcpu::resume);
        }
        let result = brought.and_then(|()| registers.want(count).map_err(VmError::VcpuLeaving));
        if result.is_err() {
            missing.iter().for_each(|number| self.processors.park(&self.kvm, *number));
            return result;
        }
        self.contents.tables.vcpus = count;
        self.parts.vcpus_changed(self.processors.count());
        Ok(())
    }

    /// Ends the threads of vCPUs that the guest has released.
    pub(super) fn park_gone(&mut self) {
        let gone = self.board.processors.as_ref().map(|registers| registers.take_gone()).unwrap_or_default();
        for number in gone {
            self.processors.park(&self.kvm, number);
            info!("vCPU {number} was removed");
            self.parts.vcpus_changed(self.processors.count());
        }
    }
}

#[cfg(test)]
mod tests {
    use carom_api::config::CpusConfig;

    use super::*;
    use crate::address_space::IoMapOwner;
    use crate::arch::cpuid::CpuidTemplate;
    use crate::arch::irqchip::vm_for_test;

    fn apic_id(processors: &Processors, number: u32) -> u32 {
        let leaf = processors.cpuid(number).as_slice().iter().find(|entry| entry.function == 1);
        leaf.map_or(u32::MAX, |entry| entry.ebx >> 24)
    }

    #[test]
    fn removed_vcpu_returns_in_its_power_on_state() {
        let Some(kvm) = vm_for_test() else { return };
        let template = CpuidTemplate::new(&kvm.kvm, &CpusConfig { max_vcpus: 4, ..CpusConfig::default() }).unwrap();
        let io_map = IoMapOwner::new();
        let mailbox = Arc::new(Mailbox::new(Box::new(|| {})));
        let cpuids = vec![(0, template.for_vcpu(0).unwrap())];
        let mut processors = Processors::new(&kvm, cpuids, BTreeMap::new(), Arc::clone(&io_map), mailbox).unwrap();
        let rax = |processors: &Processors| processors.with(3, |fd| fd.get_regs().unwrap().rax);
        for round in 0..3 {
            processors.bring(&kvm, 3).unwrap();
            assert_eq!((processors.numbers(), apic_id(&processors, 3)), (vec![0, 3], 3));
            assert_eq!(processors.cpuid(3).as_slice(), template.for_vcpu(3).unwrap().as_slice());
            // vCPU 3 waits until the first vCPU starts it. This never happens, because the first vCPU has nothing to run.
            processors.iter().filter(|vcpu| vcpu.id() == 3).for_each(Vcpu::resume);
            processors.stop();
            assert_eq!(rax(&processors), 0, "round {round}");
            processors.with(3, |fd| {
                let mut regs = fd.get_regs().unwrap();
                regs.rax = 5;
                fd.set_regs(&regs).unwrap();
            });
            if round < 2 {
                processors.park(&kvm, 3);
                assert_eq!((processors.numbers(), processors.parked.len()), (vec![0], 1));
            }
        }
        processors.reset(&kvm).unwrap();
        assert_eq!(rax(&processors), 0);
    }
}
