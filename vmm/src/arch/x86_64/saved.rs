// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saved state of a VM's processors: vCPUs with CPUID and time stamp counters, interrupt controllers, clock.

use std::ops::RangeInclusive;

use devices::state::StateError;
use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::clock::{self, ClockState};
use super::irqchip::IrqchipState;
use super::saved_cpuid::SavedCpuid;
pub use super::tsc::LeadingCounter;
use super::tsc::TscState;
use super::vcpu_state::{UnwritableMsr, VcpuState};
use crate::kvm::{KvmError, KvmVm};

/// Version of [`ProcessorsState`] that this program writes, and the only version that it reads.
const VERSION: u32 = 1;

/// Saved vCPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
#[serde(deny_unknown_fields)]
struct SavedVcpu {
    cpuid: SavedCpuid,
    tsc: TscState,
    registers: VcpuState,
}

/// Saved vCPUs, and the state that they share.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessorsState {
    version: u32,
    /// Guest clock when the VM was paused.
    clock: ClockState,
    /// Host's time of day when the counters were read.
    realtime_ns: u64,
    vcpus: Vec<SavedVcpu>,
    /// Numbers of the vCPUs, in ascending order. Empty if the numbers are 0, 1, 2 and so on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    numbers: Vec<u32>,
    irqchip: IrqchipState,
}

/// Access to the vCPUs by number.
pub trait Vcpus {
    /// Returns the numbers of all vCPUs, in ascending order.
    fn numbers(&self) -> Vec<u32>;
    /// Returns the CPUID that was set for vCPU `number`. KVM's own copy is not used, because some of its bits change with the guest's
    /// actions.
    fn cpuid(&self, number: u32) -> &CpuId;
    /// Calls `then` with vCPU `number`, which is not running.
    fn with<R>(&self, number: u32, then: impl FnOnce(&VcpuFd) -> R) -> R;
}

impl ProcessorsState {
    /// Reads the state of paused vCPUs. `clock` is the guest's clock when the vCPUs were paused.
    pub fn save(vm: &KvmVm, vcpus: &impl Vcpus, clock: ClockState) -> Result<Self, KvmError> {
        let mut numbers = vcpus.numbers();
        let counters = numbers.iter().map(|number| {
            let counter = vcpus.with(*number, TscState::save);
            counter.map_err(|error| error.of_vcpu(*number))
        });
        let counters = counters.collect::<Result<Vec<_>, _>>()?;
        let realtime_ns = counters.first().map_or_else(clock::realtime_ns, |(_, realtime)| *realtime);
        let save = |(number, (tsc, realtime)): (&u32, (TscState, u64))| {
            vcpus.with(*number, |vcpu| {
                Ok(SavedVcpu {
                    cpuid: SavedCpuid::new(vcpus.cpuid(*number)),
                    tsc: tsc.back(realtime, realtime_ns),
                    registers: VcpuState::save(&vm.kvm, &vm.fd, vcpu).map_err(|error| error.of_vcpu(*number))?,
                })
            })
        };
        let vcpus = numbers.iter().zip(counters).map(save).collect::<Result<Vec<_>, KvmError>>()?;
        if numbers.iter().copied().eq(0..) {
            numbers.clear();
        }
        Ok(Self { version: VERSION, clock, realtime_ns, vcpus, numbers, irqchip: IrqchipState::save(&vm.fd)? })
    }

    /// Validates the state before a VM is built: its version, the number of vCPUs, and their numbers. In the configuration, the VM
    /// boots with `vcpus.start()` vCPUs and has at most `vcpus.end()`. The state must have all vCPUs with numbers below
    /// `vcpus.start()`, and only numbers below `vcpus.end()`.
    ///
    /// # Errors
    /// The state breaks one of these rules.
    pub fn check(&self, vcpus: &RangeInclusive<u32>) -> Result<(), StateError> {
        if self.version != VERSION {
            return Err(StateError::Version { kind: "processors", wanted: VERSION, found: self.version });
        }
        let (least, most) = (*vcpus.start(), *vcpus.end());
        let count = u32::try_from(self.vcpus.len()).unwrap_or(u32::MAX);
        if count < least {
            return Err(StateError::rule(
                "vcpus",
                format!(
                    "the saved VM has {count} vCPUs, but the configuration boots {least} vCPUs: restore with the configuration that was saved"
                ),
            ));
        }
        if count > most {
            return Err(StateError::rule(
                "vcpus",
                format!(
                    "the saved VM has {count} vCPUs, but the configuration allows at most {most}: restore with the configuration that was saved"
                ),
            ));
        }
        if self.numbers.is_empty() {
            return Ok(());
        }
        let refuse = |rule: String| Err(StateError::rule("numbers", rule));
        if self.numbers.len() != self.vcpus.len() {
            return refuse(format!(
                "the saved VM has {count} vCPUs, but {} vCPU numbers: restore from an unmodified snapshot",
                self.numbers.len()
            ));
        }
        if self.numbers.iter().zip(self.numbers.iter().skip(1)).any(|(one, next)| one >= next) {
            return refuse(
                "the saved vCPU numbers are not in ascending order: restore from an unmodified snapshot".into(),
            );
        }
        if let Some(number) = self.numbers.last().filter(|number| **number >= most) {
            return refuse(format!(
                "the saved VM has vCPU {number}, but the configuration allows only vCPU numbers below {most}: restore with the configuration that was saved"
            ));
        }
        if let Some(missing) =
            (0..least).zip(&self.numbers).find_map(|(wanted, has)| (wanted != *has).then_some(wanted))
        {
            return refuse(format!(
                "the saved VM has no vCPU {missing}, but the configuration boots {least} vCPUs: restore with the configuration that was saved"
            ));
        }
        Ok(())
    }

    /// Returns the numbers of the vCPUs, in ascending order.
    pub fn numbers(&self) -> Vec<u32> {
        if self.numbers.is_empty() { (0..).take(self.vcpus.len()).collect() } else { self.numbers.clone() }
    }

    /// Returns a state with `vcpus` vCPUs, for tests.
    #[cfg(test)]
    pub(crate) fn example(vcpus: usize) -> Self {
        Self {
            version: VERSION,
            clock: ClockState::default(),
            realtime_ns: 0,
            vcpus: vec![SavedVcpu::default(); vcpus],
            numbers: Vec::new(),
            irqchip: IrqchipState::default(),
        }
    }

    /// Returns the saved CPUID of vCPU `number`, if this host supports everything in it. `host` is the CPUID that a new vCPU would get.
    ///
    /// # Errors
    /// The saved VM has no such vCPU, or the host does not support the saved CPUID.
    pub fn cpuid(&self, number: u32, host: &CpuId) -> Result<CpuId, KvmError> {
        let saved = self.numbers().into_iter().zip(&self.vcpus).find(|(saved, _)| *saved == number);
        let (_, saved) =
            saved.ok_or_else(|| StateError::rule("vcpus", format!("the saved VM has no vCPU {number}")))?;
        Ok(saved.cpuid.for_host(host).map_err(StateError::of(&format!("vCPU {number}")))?)
    }

    /// Returns the guest's width of physical addresses in bits.
    pub fn physical_bits(&self) -> Option<u8> {
        self.vcpus.first().and_then(|vcpu| vcpu.cpuid.physical_bits())
    }

    /// Returns the guest's clock when the VM was paused.
    pub fn clock(&self) -> ClockState {
        self.clock
    }

    /// Restores the state of vCPUs, the clock and the interrupt controllers. The vCPUs must have the saved CPUID, and must not have run.
    /// Devices that raise interrupts must be restored after this call. Returns the time stamp counter that vCPUs added later must follow.
    pub fn restore(&self, vm: &KvmVm, vcpus: &impl Vcpus) -> Result<Option<LeadingCounter>, KvmError> {
        // The clock is restored first: if the guest has enabled KVM's clock page, KVM writes the page while registers are set.
        self.clock.catch_up(&vm.fd)?;
        let numbers = self.numbers();
        let mut first = None;
        for (number, saved) in numbers.iter().zip(&self.vcpus) {
            let set = vcpus.with(*number, |vcpu| saved.tsc.restore(&vm.kvm, vcpu, self.realtime_ns, first));
            let set = set.map_err(|error| error.of_vcpu(*number))?;
            first = first.or(Some((saved.tsc, set)));
        }
        for (number, saved) in numbers.iter().zip(&self.vcpus) {
            vcpus.with(*number, |vcpu| {
                let restored = saved.registers.restore(&vm.kvm, &vm.fd, vcpu, UnwritableMsr::Refuse);
                restored.map_err(|error| error.of_vcpu(*number))
            })?;
        }
        self.irqchip.restore(&vm.fd)?;
        Ok(first.map(|(tsc, offset)| LeadingCounter::new(tsc, offset)))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::{Duration, Instant};

    use carom_api::config::CpusConfig;

    use super::super::cpuid::CpuidTemplate;
    use super::super::irqchip::vm_for_test;
    use super::super::msr;
    use super::*;

    /// vCPUs of a VM that does not run.
    struct Machine {
        vm: KvmVm,
        vcpus: Vec<RefCell<VcpuFd>>,
        cpuids: Vec<CpuId>,
    }

    impl Vcpus for Machine {
        fn numbers(&self) -> Vec<u32> {
            (0..).take(self.vcpus.len()).collect()
        }
        fn cpuid(&self, number: u32) -> &CpuId {
            &self.cpuids[number as usize]
        }
        fn with<R>(&self, number: u32, then: impl FnOnce(&VcpuFd) -> R) -> R {
            then(&self.vcpus[number as usize].borrow())
        }
    }

    /// Creates a VM with two vCPUs, for the state `saved` if given. If the host has no KVM, prints the reason and returns `None`.
    fn machine(saved: Option<&ProcessorsState>) -> Option<Machine> {
        let vm = vm_for_test()?;
        let template = CpuidTemplate::new(&vm.kvm, &CpusConfig::with_count(2)).unwrap();
        let cpuids = (0..2).map(|id| {
            let host = template.for_vcpu(id).unwrap();
            saved.map_or(Ok(host.clone()), |saved| saved.cpuid(id, &host)).unwrap()
        });
        let cpuids: Vec<CpuId> = cpuids.collect();
        let vcpus = (0..).zip(&cpuids).map(|(id, cpuid)| {
            let vcpu = vm.create_vcpu(id).unwrap();
            vcpu.set_cpuid2(cpuid).unwrap();
            RefCell::new(vcpu)
        });
        Some(Machine { vcpus: vcpus.collect(), cpuids, vm })
    }

    fn save(machine: &Machine) -> ProcessorsState {
        let clock = ClockState::save(&machine.vm.fd).unwrap();
        ProcessorsState::save(&machine.vm, machine, clock).unwrap()
    }

    /// Creates a VM whose vCPUs are not in their power-on state.
    fn lived() -> Option<Machine> {
        let machine = machine(None)?;
        for (index, vcpu) in machine.vcpus.iter().enumerate() {
            let vcpu = vcpu.borrow();
            let mut regs = vcpu.get_regs().unwrap();
            (regs.rax, regs.rip) = (0x1234_5678_9abc_def0 + index as u64, 0x10_0000);
            vcpu.set_regs(&regs).unwrap();
            let mut sregs = vcpu.get_sregs().unwrap();
            sregs.cr2 = 0xdead_0000 + index as u64;
            vcpu.set_sregs(&sregs).unwrap();
            let lstar =
                kvm_bindings::kvm_msr_entry { index: 0xc000_0082, data: 0xffff_ffff_8100_0000, ..Default::default() };
            assert!(msr::write(&vcpu, lstar).unwrap());
            let mut xsave = super::super::ioctl::xsave(&machine.vm.fd, &vcpu).unwrap();
            // XMM0, and the bit that marks it as modified.
            xsave[160..176].fill(0x5a);
            xsave[512] |= 0b11;
            super::super::ioctl::set_xsave(&machine.vm.fd, &vcpu, &xsave).unwrap();
        }
        Some(machine)
    }

    /// Returns the fields that must be equal in two states that were read at different times.
    fn still(state: &ProcessorsState) -> serde_json::Value {
        let mut value = serde_json::to_value(state).unwrap();
        for field in ["clock", "realtime_ns"] {
            value[field] = serde_json::Value::Null;
        }
        for vcpu in value["vcpus"].as_array_mut().unwrap() {
            vcpu["tsc"]["value"] = 0.into();
            vcpu["tsc"]["offset"] = 0.into();
            // HV_X64_MSR_VP_RUNTIME: the run time of the vCPU, which KVM keeps counting.
            vcpu["registers"]["msrs"].as_array_mut().unwrap().retain(|msr| msr["index"] != 0x4000_0010);
        }
        value
    }

    #[test]
    fn restored_processors_are_those_that_were_saved() {
        let Some(old) = lived() else { return };
        let saved = save(&old);
        let text = serde_json::to_string(&saved).unwrap();
        let read: ProcessorsState = serde_json::from_str(&text).unwrap();
        read.check(&(2..=2)).unwrap();
        let new = machine(Some(&read)).unwrap();
        read.restore(&new.vm, &new).unwrap();
        assert_eq!(still(&save(&new)), still(&saved));
        assert!(text.contains(&"5a".repeat(16)), "the state of SSE");
    }

    fn timed<T>(step: impl FnOnce() -> T) -> (T, Duration) {
        let start = Instant::now();
        let outcome = step();
        (outcome, start.elapsed())
    }

    #[test]
    fn counters_continue_and_stay_in_step() {
        let Some(old) = lived() else { return };
        let (saved, save_time) = timed(|| save(&old));
        std::thread::sleep(Duration::from_millis(200));
        let new = machine(Some(&saved)).unwrap();
        let (_, restore_time) = timed(|| saved.restore(&new.vm, &new).unwrap());
        let (after, last_time) = timed(|| save(&new));
        // Each step accesses the clock and the counters one after the other. Between two accesses, the host may run other threads. So the
        // time between two accesses can be as long as the whole step.
        let tolerance = 0.1 + (save_time + restore_time + last_time).as_secs_f64();
        let passed = Duration::from_nanos(after.realtime_ns - saved.realtime_ns).as_secs_f64();
        for (before, after) in saved.vcpus.iter().zip(&after.vcpus) {
            let ticks = after.tsc.value.wrapping_sub(before.tsc.value);
            let seconds = Duration::from_millis(ticks / u64::from(before.tsc.khz.max(1))).as_secs_f64();
            assert!((seconds - passed).abs() < tolerance, "{seconds} s of {passed} s");
        }
        let apart = |state: &ProcessorsState| {
            let offset = |index: usize| state.vcpus[index].tsc.offset;
            offset(0).zip(offset(1)).map(|(one, other)| one.wrapping_sub(other))
        };
        // If the host's own counter is unstable, KVM may change the offsets. In this case, the offsets are not compared.
        if apart(&save(&old)) == apart(&saved) {
            assert_eq!(apart(&after), apart(&saved));
        }
        // The clock and the counters were not read at the same time. So this check uses the time of day that was saved with the clock.
        let passed = Duration::from_nanos(after.clock.realtime_ns - saved.clock.realtime_ns).as_secs_f64();
        let clock = Duration::from_nanos(after.clock.ns.wrapping_sub(saved.clock.ns)).as_secs_f64();
        assert!((clock - passed).abs() < tolerance, "the clock advanced by {clock} s in {passed} s");
    }

    #[test]
    fn vcpus_that_do_not_match_the_configuration_are_refused() {
        let check = |vcpus: usize, numbers: &[u32]| {
            let state = ProcessorsState { numbers: numbers.to_vec(), ..ProcessorsState::example(vcpus) };
            state.check(&(2..=4)).map(|()| state.numbers()).map_err(|error| error.to_string())
        };
        assert_eq!((check(2, &[]), check(4, &[])), (Ok(vec![0, 1]), Ok(vec![0, 1, 2, 3])));
        assert_eq!((check(3, &[0, 1, 3]), check(2, &[0, 1])), (Ok(vec![0, 1, 3]), Ok(vec![0, 1])));
        for (vcpus, numbers, wanted) in [
            (
                1,
                &[][..],
                "vcpus: the saved VM has 1 vCPUs, but the configuration boots 2 vCPUs: restore with the configuration that was saved",
            ),
            (5, &[], "vcpus: the saved VM has 5 vCPUs, but the configuration allows at most 4"),
            (3, &[0, 1], "numbers: the saved VM has 3 vCPUs, but 2 vCPU numbers"),
            (3, &[0, 1, 1], "numbers: the saved vCPU numbers are not in ascending order"),
            (3, &[0, 1, 4], "numbers: the saved VM has vCPU 4, but the configuration allows only vCPU numbers below 4"),
            (
                3,
                &[0, 2, 3],
                "numbers: the saved VM has no vCPU 1, but the configuration boots 2 vCPUs: restore with the configuration that was saved",
            ),
            (2, &[u32::MAX - 1, u32::MAX], "numbers: the saved VM has vCPU 4294967295"),
        ] {
            assert!(check(vcpus, numbers).unwrap_err().starts_with(wanted), "{wanted}");
        }
    }

    #[test]
    fn impossible_state_is_refused() {
        let Some(old) = lived() else { return };
        let good = serde_json::to_value(save(&old)).unwrap();
        let refusal = |path: &str, value: serde_json::Value| -> String {
            let mut spoiled = good.clone();
            *spoiled.pointer_mut(path).unwrap() = value;
            let state: ProcessorsState = match serde_json::from_value(spoiled) {
                Ok(state) => state,
                Err(error) => return error.to_string(),
            };
            if let Err(error) = state.check(&(2..=2)) {
                return error.to_string();
            }
            let new = machine(None).unwrap();
            state.restore(&new.vm, &new).unwrap_err().to_string()
        };
        let cases: [(&str, serde_json::Value, &str); 8] = [
            ("/version", 2.into(), "version 2"),
            ("/vcpus", serde_json::json!([]), "has 0 vCPUs, but the configuration boots 2 vCPUs"),
            ("/vcpus/0/registers/regs", "00".into(), "has 1 bytes instead of 144"),
            ("/vcpus/1/registers/xsave", "00".repeat(1 << 16).into(), "set a vCPU's extended state (vCPU 1): "),
            ("/vcpus/0/registers/xsave", "ff".repeat(4096).into(), "set a vCPU's extended state"),
            ("/vcpus/0/registers/nested", "ff".repeat(64).into(), "vCPU 0: nested: "),
            ("/irqchip", serde_json::json!([good["irqchip"][0], good["irqchip"][0], good["irqchip"][0]]), "irqchip"),
            ("/vcpus/0/registers/sregs", "ff".repeat(312).into(), "set a vCPU's special registers"),
        ];
        for (path, value, wanted) in cases {
            let error = refusal(path, value);
            assert!(error.contains(wanted), "{path}: {error}");
        }
    }
}
