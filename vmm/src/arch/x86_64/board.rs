// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The board: devices that are not on a bus, with their addresses and interrupt lines.

use std::io::{self, Write};
use std::sync::Arc;

use devices::acpi::cpu_hotplug::{self, CpuHotplug, Numbers};
use devices::acpi::generation_notice::{self, GenerationNotice};
use devices::acpi::memory_devices::{self, MemoryDevice, MemoryDevices};
use devices::acpi::pm_timer::{self, PmTimer};
use devices::acpi::power::{self, PowerRegisters, PowerRequest};
use devices::pc::cmos::{self, Cmos};
use devices::pc::control_port::{self, ControlPort};
use devices::pc::keyboard_reset::{self, KeyboardReset};
use devices::pc::serial::{self, SerialPort};
use devices::pci::{ConfigPorts, HotplugBank, HotplugRegisters, PciRoot};
use devices::platform::{AddressSpace, BusDevice, Space};
use devices::state::{DeviceState, StateError};
use thiserror::Error;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::layout::{
    ACPI_EVENT_IRQ, ACPI_PORTS, CMOS_PORTS, CONTROL_PORT, CPU_HOTPLUG_IRQ, CPU_HOTPLUG_PORTS, GENERATION_ID_IRQ,
    GENERATION_ID_PORT, KEYBOARD_COMMAND_PORT, LOW_MEMORY_END, MEMORY_DEVICE_IRQ, MEMORY_DEVICE_PORTS, PCI_HOTPLUG_IRQ,
    PM_TIMER_PORTS, SERIAL_IRQ, SERIAL_PORT, pci_hotplug_ports,
};
use crate::address_space::IoMap;
use crate::kvm::KvmVm;
use crate::kvm::line::KvmLine;
use crate::mailbox::{GuestEvent, Mailbox};

/// Error from setting up a device of the board.
#[derive(Debug, Error)]
#[error("cannot {what}: {source}")]
pub struct BoardError {
    /// Step that failed, as a verb: "place the serial port".
    pub what: &'static str,
    /// The kernel's error.
    pub source: io::Error,
}

/// Places the registers of a device at ports.
fn at_ports<D: BusDevice + 'static>(
    io_map: &IoMap,
    what: &'static str,
    (base, len): (u64, u64),
    device: D,
) -> Result<Arc<D>, BoardError> {
    let device = Arc::new(device);
    let placed = io_map.insert(Space::Port, base, len, device.clone());
    placed.map(|()| device).map_err(|source| BoardError { what, source })
}

/// Creates an event that raises an interrupt line.
fn line_event(kvm: &KvmVm, what: &'static str, number: u32) -> Result<EventFd, BoardError> {
    let fail = |source| BoardError { what, source };
    let event = EventFd::new(EFD_NONBLOCK).map_err(fail)?;
    kvm.fd.register_irqfd(&event, number).map_err(|error| fail(error.into()))?;
    Ok(event)
}

/// Builder that adds the devices of a board to the guest's I/O addresses, and connects their interrupts and events.
struct Places<'a> {
    io_map: &'a IoMap,
    kvm: &'a KvmVm,
    mailbox: &'a Arc<Mailbox>,
}

impl Places<'_> {
    /// Returns an interrupt line.
    fn line(&self, number: u32) -> Box<KvmLine> {
        Box::new(KvmLine::new(self.kvm.fd.clone(), number))
    }

    /// Returns a function that leaves an event in the mailbox.
    fn leaver(&self, event: fn() -> GuestEvent) -> Box<dyn Fn() + Send + Sync> {
        let mailbox = self.mailbox.clone();
        Box::new(move || mailbox.leave(event()))
    }

    /// Places the ACPI sleep and reset registers, and the reset command of the keyboard controller.
    fn power_registers(&self) -> Result<(), BoardError> {
        let what = "place the ACPI registers";
        let keyboard = KeyboardReset::new(self.leaver(|| GuestEvent::Reset));
        at_ports(self.io_map, what, (KEYBOARD_COMMAND_PORT, keyboard_reset::REGISTERS_LEN), keyboard)?;
        let mailbox = self.mailbox.clone();
        let registers = PowerRegisters::new(move |request| {
            mailbox.leave(match request {
                PowerRequest::PowerOff => GuestEvent::PowerOff,
                PowerRequest::Reset => GuestEvent::Reset,
            });
        });
        at_ports(self.io_map, what, (ACPI_PORTS, power::REGISTERS_LEN), registers).map(drop)
    }

    /// Places CMOS and the ACPI timer, which only firmware needs.
    fn firmware_devices(&self, ram_size: u64) -> Result<FirmwareDevices, BoardError> {
        let what = "place the firmware's clocks";
        let low_end = ram_size.min(LOW_MEMORY_END);
        let cmos = Cmos::new(low_end, ram_size - low_end);
        Ok(FirmwareDevices {
            cmos: at_ports(self.io_map, what, (CMOS_PORTS, cmos::REGISTERS_LEN), cmos)?,
            pm_timer: at_ports(self.io_map, what, (PM_TIMER_PORTS, pm_timer::REGISTERS_LEN), PmTimer::default())?,
        })
    }

    /// Places the registers of PCI hotplug. The control thread closes a device that the guest ejects.
    fn hotplug_registers(&self, pci: &Arc<PciRoot>) -> Result<Arc<HotplugRegisters>, BoardError> {
        let line = self.line(PCI_HOTPLUG_IRQ);
        let registers = Arc::new(HotplugRegisters::new(pci.clone(), line, self.leaver(|| GuestEvent::Left)));
        for segment in 0..pci.segments() {
            let ports = (pci_hotplug_ports(segment), HotplugRegisters::LEN);
            at_ports(self.io_map, "place the hot-plug registers", ports, HotplugBank::new(registers.clone(), segment))?;
        }
        Ok(registers)
    }

    /// Places the registers of processor hotplug. `wanted` is the number of processors in the configuration. `present` contains the numbers
    /// of the processors that the VM has now. The control thread closes a processor that the guest ejects.
    fn processors(&self, (wanted, present): (u32, Numbers)) -> Result<Arc<CpuHotplug>, BoardError> {
        let left = self.leaver(|| GuestEvent::Left);
        let registers = CpuHotplug::new(wanted, present, self.line(CPU_HOTPLUG_IRQ), left);
        let ports = (CPU_HOTPLUG_PORTS, cpu_hotplug::REGISTERS_LEN);
        at_ports(self.io_map, "place the registers of processors", ports, registers)
    }

    /// Places the registers of memory devices. `devices` are the memory devices that the VM already has.
    fn memory_devices(&self, devices: Vec<MemoryDevice>) -> Result<Arc<MemoryDevices>, BoardError> {
        let registers = MemoryDevices::new(devices, self.line(MEMORY_DEVICE_IRQ));
        let ports = (MEMORY_DEVICE_PORTS, memory_devices::REGISTERS_LEN);
        at_ports(self.io_map, "place the registers of memory devices", ports, registers)
    }

    /// Places the register that reports a new VM Generation ID.
    fn generation_notice(&self) -> Result<Arc<GenerationNotice>, BoardError> {
        let register = GenerationNotice::new(self.line(GENERATION_ID_IRQ));
        let ports = (GENERATION_ID_PORT, generation_notice::REGISTER_LEN);
        at_ports(self.io_map, "place the register of the VM Generation ID", ports, register)
    }

    /// Places the ports of PCI configuration space, for guests that do not use ECAM.
    fn config_ports(&self, root: &Arc<PciRoot>) -> Result<Arc<ConfigPorts>, BoardError> {
        let ports = ConfigPorts::new(root.clone(), self.leaver(|| GuestEvent::Reset));
        at_ports(self.io_map, "place PCI configuration space", (ConfigPorts::BASE, ConfigPorts::SIZE), ports)
    }
}

/// Devices that only firmware needs.
struct FirmwareDevices {
    /// CMOS clock and CMOS memory.
    cmos: Arc<Cmos>,
    /// ACPI timer.
    pm_timer: Arc<PmTimer>,
}

/// Configuration of a board.
pub struct BoardConfig {
    /// True if the VM boots firmware.
    pub firmware: bool,
    /// Bytes of RAM at boot.
    pub ram_size: u64,
    /// Number of vCPUs in the configuration, and the numbers of the vCPUs that the VM has now. `None` if vCPUs cannot be added and removed.
    pub processors: Option<(u32, Numbers)>,
    /// RAM that was added. `None` if RAM cannot be added.
    pub memory_devices: Option<Vec<MemoryDevice>>,
    /// True if the VM has a VM Generation ID.
    pub generation_id: bool,
}

/// Devices that are not on a bus.
pub struct Board {
    /// System control port B.
    control_port: Arc<ControlPort>,
    /// Ports of PCI configuration space.
    config_ports: Arc<ConfigPorts>,
    /// Registers of PCI hot plug.
    pub hotplug: Arc<HotplugRegisters>,
    /// Registers of processor hotplug, if vCPUs can be added and removed.
    pub processors: Option<Arc<CpuHotplug>>,
    /// Registers of memory devices, if RAM can be added.
    pub memory_devices: Option<Arc<MemoryDevices>>,
    /// Register that reports a new VM Generation ID, if the VM has an ID. The register's state is not saved, because each restore sets the
    /// register.
    pub generation_notice: Option<Arc<GenerationNotice>>,
    /// Event that raises the interrupt line of ACPI events.
    power_button: EventFd,
    /// First serial port, if the VM has one.
    serial: Option<Arc<SerialPort>>,
    /// Devices that firmware needs, if the VM boots firmware.
    for_firmware: Option<FirmwareDevices>,
}

/// Device whose state is saved and restored.
trait Saved {
    fn save(&self) -> Result<DeviceState, StateError>;
    fn restore(&self, state: &DeviceState) -> Result<(), StateError>;
}

macro_rules! saved {
    ($($device:ty),*) => {$(
        impl Saved for $device {
            fn save(&self) -> Result<DeviceState, StateError> {
                <$device>::save(self)
            }
            fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
                <$device>::restore(self, state)
            }
        }
    )*};
}

saved!(Cmos, ControlPort, ConfigPorts, CpuHotplug, HotplugRegisters, MemoryDevices, PmTimer, SerialPort);

impl Board {
    /// Places all devices except the serial port. If the guest asks for a reset or a power-off, the devices leave a note in `mailbox`.
    ///
    /// # Errors
    /// KVM rejects an interrupt line, or the process has reached its limit of open files.
    pub fn new(
        io_map: &IoMap,
        kvm: &KvmVm,
        pci: &Arc<PciRoot>,
        mailbox: &Arc<Mailbox>,
        config: BoardConfig,
    ) -> Result<Self, BoardError> {
        let places = Places { io_map, kvm, mailbox };
        let BoardConfig { firmware, ram_size, processors, memory_devices, generation_id } = config;
        places.power_registers()?;
        let control_port = (CONTROL_PORT, control_port::REGISTERS_LEN);
        Ok(Self {
            control_port: at_ports(io_map, "place the control port", control_port, ControlPort::default())?,
            config_ports: places.config_ports(pci)?,
            hotplug: places.hotplug_registers(pci)?,
            processors: processors.map(|processors| places.processors(processors)).transpose()?,
            memory_devices: memory_devices.map(|devices| places.memory_devices(devices)).transpose()?,
            generation_notice: generation_id.then(|| places.generation_notice()).transpose()?,
            power_button: line_event(kvm, "connect the power button's interrupt", ACPI_EVENT_IRQ)?,
            serial: None,
            for_firmware: firmware.then(|| places.firmware_devices(ram_size)).transpose()?,
        })
    }

    /// Places the first serial port and connects its interrupt line. The guest's output is written to `output`.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn add_serial_port(
        &mut self,
        io_map: &IoMap,
        kvm: &KvmVm,
        output: Box<dyn Write + Send>,
    ) -> Result<Arc<SerialPort>, BoardError> {
        let interrupt = line_event(kvm, "connect the serial port's interrupt", SERIAL_IRQ)?;
        let ports = (SERIAL_PORT, serial::REGISTERS_LEN);
        let port = at_ports(io_map, "place the serial port", ports, SerialPort::new(interrupt, output))?;
        self.serial = Some(port.clone());
        Ok(port)
    }

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// The event cannot be written.
    pub fn press_power_button(&self) -> Result<(), BoardError> {
        self.power_button.write(1).map_err(|source| BoardError { what: "press the power button", source })
    }

    /// Returns all devices with their names, in the order in which their states are saved.
    fn all(&self) -> Vec<(&'static str, &dyn Saved)> {
        let mut all: Vec<(&str, &dyn Saved)> = vec![
            ("control port", &*self.control_port),
            ("PCI configuration ports", &*self.config_ports),
            ("PCI hot plug", &*self.hotplug),
        ];
        all.extend(self.processors.as_deref().map(|processors| ("processors", processors as &dyn Saved)));
        all.extend(self.memory_devices.as_deref().map(|devices| ("memory devices", devices as &dyn Saved)));
        all.extend(self.serial.as_deref().map(|serial| ("serial", serial as &dyn Saved)));
        if let Some(FirmwareDevices { cmos, pm_timer }) = &self.for_firmware {
            all.extend([("CMOS", &**cmos as &dyn Saved), ("ACPI timer", &**pm_timer)]);
        }
        all
    }

    /// Resets the board's devices to their power-on state. Does not reset the registers for hotplug of PCI devices, processors and memory:
    /// the VM resets these registers earlier. All vCPUs must be stopped. Call this before the interrupt controllers are restored.
    pub fn reset(&self) {
        self.control_port.reset();
        // The address register is cleared by a write, as a guest would clear it.
        self.config_ports.write(0, &[0; 4]);
        if let Some(notice) = &self.generation_notice {
            notice.reset();
        }
        if let Some(serial) = &self.serial {
            serial.reset();
        }
        // The ACPI timer needs no reset, because the guest cannot write to it.
        if let Some(FirmwareDevices { cmos, .. }) = &self.for_firmware {
            cmos.reset();
        }
    }

    /// Saves the devices. All vCPUs must be stopped.
    ///
    /// # Errors
    /// A PCI device is being removed.
    pub fn save(&self) -> Result<Vec<DeviceState>, StateError> {
        self.all().into_iter().map(|(_, device)| device.save()).collect()
    }

    /// Restores the devices from `states`. Before this call, the interrupt controllers must be restored, and all PCI functions must be on
    /// the bus.
    ///
    /// # Errors
    /// The VM has other devices than the saved VM, or a state is invalid.
    pub fn restore(&self, states: &[DeviceState]) -> Result<(), StateError> {
        let all = self.all();
        if all.len() != states.len() {
            let rule = format!(
                "the saved VM has {} platform devices, but this VM has {}: restore with the configuration that was saved",
                states.len(),
                all.len()
            );
            return Err(StateError::rule("platform", rule));
        }
        let restore =
            |((name, device), state): ((&str, &dyn Saved), _)| device.restore(state).map_err(StateError::of(name));
        all.into_iter().zip(states).try_for_each(restore)
    }
}

#[cfg(test)]
mod tests {
    use carom_api::VmConfig;
    use devices::pci::HostBridgeKind;
    use devices::platform::InterruptLine;

    use super::*;
    use crate::address_space::IoMapOwner;
    use crate::arch::layout::GIB;
    use crate::arch::segments::windows;

    struct NoLine;

    impl InterruptLine for NoLine {
        fn set(&self, _active: bool) -> io::Result<()> {
            Ok(())
        }
    }

    fn made() -> Board {
        let windows = windows(&VmConfig::default(), &(256 * GIB..=512 * GIB - 1));
        let io_map = IoMapOwner::new();
        let root = Arc::new(PciRoot::new(io_map.clone(), windows, HostBridgeKind::Generic).unwrap());
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        Board {
            control_port: Arc::default(),
            config_ports: Arc::new(ConfigPorts::new(root.clone(), Box::new(|| {}))),
            hotplug: Arc::new(HotplugRegisters::new(root, Box::new(NoLine), Box::new(|| {}))),
            processors: None,
            memory_devices: None,
            generation_notice: Some(Arc::new(GenerationNotice::new(Box::new(NoLine)))),
            power_button: EventFd::new(EFD_NONBLOCK).unwrap(),
            serial: Some(Arc::new(SerialPort::new(interrupt, Box::new(io::sink())))),
            for_firmware: Some(FirmwareDevices { cmos: Arc::new(Cmos::new(GIB, 0)), pm_timer: Arc::default() }),
        }
    }

    #[test]
    fn reset_clears_everything_that_the_guest_wrote_to_ports() {
        // The ACPI timer's state is last in the list. The test does not compare this state, because a reset does not stop the timer.
        let states = |devices: &Board| devices.save().unwrap()[..5].to_vec();
        let (used, new) = (made(), states(&made()));
        let write = |device: &dyn BusDevice, offset, data: &[u8]| device.write(offset, data);
        write(&*used.control_port, 0, &[3]);
        write(&*used.config_ports, 0, &0x8000_1234u32.to_le_bytes());
        write(&**used.serial.as_ref().unwrap(), 7, &[0x5a]);
        write(&*used.for_firmware.as_ref().unwrap().cmos, 0, &[0x0a]);
        let changed = states(&used).iter().zip(&new).filter(|(used, new)| used != new).count();
        assert_eq!(changed, 4);
        used.reset();
        assert_eq!(states(&used), new);
    }
}
