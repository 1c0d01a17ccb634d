// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Root bus of each segment: its functions, and access to their configuration space and BARs.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use log::error;
use serde::{Deserialize, Serialize};

use super::claims::Claims;
use super::host_bridge::{HostBridge, HostBridgeKind};
use super::split::aligned_pieces;
use super::{BarWindows, PciAddress, PciDevice, PciError, regs};
use crate::platform::AddressSpace;
use crate::state::{DeviceState, StateError};
use crate::sync::lock;

/// Number of devices on a bus.
const DEVICES: usize = 32;

/// Functions of a bus, by device number.
type Functions = [Option<Arc<dyn PciDevice>>; DEVICES];

/// Saved state of one function, and its address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionState {
    /// Segment.
    #[serde(default)]
    pub segment: u16,
    /// Device number on the root bus.
    pub device: u8,
    /// Name of the function.
    pub id: String,
    /// State of the function.
    pub state: DeviceState,
}

impl FunctionState {
    /// Returns the address of the function.
    pub fn address(&self) -> PciAddress {
        PciAddress::on_segment(self.segment, self.device)
    }
}

/// Root buses of all segments. Each root bus is bus 0 of its segment. Each bus has a host bridge, and room for 32 devices with one function
/// each, including the host bridge.
///
/// The guest accesses the buses through [`super::Ecam`] and [`super::ConfigPorts`]. If a write to configuration space enables or moves a
/// BAR, the bus claims or moves a range in the [`AddressSpace`]. The bus does this *during the write*, on the vCPU's thread. So an
/// `AddressSpace` must allow [`AddressSpace::insert`] and [`AddressSpace::remove`] from within a [`crate::platform::BusDevice`] call.
pub struct PciRoot {
    functions: RwLock<Vec<Functions>>,
    /// Claims of the BARs of each segment.
    claims: Vec<Mutex<Claims>>,
}

impl PciRoot {
    /// Creates one bus for each entry of `windows`. Entry n is for segment n. At first, each bus has only a host bridge of kind `bridge`.
    /// Functions claim their BARs in `space`, within the windows of their segment. The windows of segments must not overlap. The bus keeps
    /// only a weak reference to `space`, because `space` refers to the bus after the [`super::Ecam`] was inserted.
    pub fn new(
        space: Arc<dyn AddressSpace>,
        windows: Vec<BarWindows>,
        bridge: HostBridgeKind,
    ) -> Result<Self, PciError> {
        let bus = |(segment, _): (u16, _)| {
            let mut functions: Functions = Default::default();
            functions[0] = Some(Arc::new(HostBridge::new(bridge, segment)));
            functions
        };
        let functions = (0..).zip(&windows).map(bus).collect();
        let claims = windows.into_iter().map(|windows| Claims::new(&space, windows).map(Mutex::new));
        Ok(Self { functions: RwLock::new(functions), claims: claims.collect::<Result<_, _>>()? })
    }

    /// Returns the number of segments.
    pub fn segments(&self) -> u16 {
        u16::try_from(self.claims.len()).unwrap_or(u16::MAX)
    }

    /// Adds `device` at `address` and assigns its BARs. The guest sees a BAR once the function's command register enables its decoding.
    pub fn add(&self, address: PciAddress, device: Arc<dyn PciDevice>) -> Result<(), PciError> {
        let (segment, number) = self.place(address).ok_or(PciError::NoSuchPlace(address))?;
        // Lock the claims before the functions, as `remove` does. While the claims are locked, no other function can get this address.
        let mut claims = lock(&self.claims[segment]);
        if let Some(occupant) = self.function(address) {
            return Err(PciError::Occupied { address, by: occupant.id().to_string() });
        }
        claims.assign(address.device, &device)?;
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        functions[segment][number] = Some(device);
        Ok(())
    }

    /// Removes the function at `address` from the bus. After this, the address does not respond, the guest does not see the BARs, and the
    /// addresses of the BARs are free. Returns `None` if no function is at `address`, or if the function is a host bridge, which always
    /// stays.
    ///
    /// An access that a vCPU has begun may still be in progress after this call, and holds a reference to the function. The function is
    /// closed when its last reference is dropped.
    pub fn remove(&self, address: PciAddress) -> Option<Arc<dyn PciDevice>> {
        let (segment, number) = self.place(address).filter(|(_, number)| *number != 0)?;
        let mut claims = lock(&self.claims[segment]);
        let function = self.functions.write().unwrap_or_else(PoisonError::into_inner)[segment][number].take()?;
        claims.release(address.device);
        Some(function)
    }

    /// Returns all functions with their addresses, in ascending order, including the host bridges.
    pub fn devices(&self) -> Vec<(PciAddress, Arc<dyn PciDevice>)> {
        let buses = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        let of_bus = |(segment, functions)| {
            let at = move |(device, f): (u8, &Option<_>)| Some((PciAddress::on_segment(segment, device), f.clone()?));
            (0..).zip::<&Functions>(functions).filter_map(at)
        };
        (0..).zip(buses.iter()).flat_map(of_bus).collect()
    }

    /// Returns the lowest free address of segment 0.
    pub fn free_address(&self) -> Option<PciAddress> {
        let buses = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        let mut places = (0..).map(PciAddress::on_root_bus).zip(buses.first()?);
        places.find(|(_, f)| f.is_none()).map(|(address, _)| address)
    }

    /// Reads configuration space of the function at `address`, in any width and alignment. If no function has this address, all bytes read
    /// as ones. Bytes beyond the 4096 bytes of configuration space also read as ones.
    pub fn read_config(&self, address: PciAddress, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        let Some(function) = self.function(address) else { return };
        for (at, piece) in accesses(offset, data.len()) {
            function.read_config(at, &mut data[piece]);
        }
    }

    /// Writes configuration space of the function at `address`, in any width and alignment, and updates its BARs. Does nothing if no
    /// function has this address. Ignores bytes beyond the 4096 bytes of configuration space.
    pub fn write_config(&self, address: PciAddress, offset: u16, data: &[u8]) {
        let Some(function) = self.function(address) else { return };
        for (at, piece) in accesses(offset, data.len()) {
            function.write_config(at, &data[piece]);
        }
        if let Some(claims) = self.claims_at(address) {
            lock(claims).follow(address.device);
        }
    }

    /// Resets every function to its state at power-on, with its BARs at their assigned addresses. If the reset of a function fails, the
    /// other functions are still reset. Returns the first error. Call this function with all vCPUs stopped.
    ///
    /// The function with the highest address is reset first. The IOMMU has a low address, and may expect that the devices behind the IOMMU
    /// do no DMA when it is reset.
    pub fn reset(&self) -> io::Result<()> {
        let mut outcome = Ok(());
        for (address, function) in self.devices().into_iter().rev() {
            if let Err(error) = function.reset() {
                error!("{}: cannot reset the device: {error}", function.id());
                outcome = outcome.and(Err(error));
            }
            if let Some(claims) = self.claims_at(address) {
                let mut claims = lock(claims);
                claims.send_home(address.device);
                claims.follow(address.device);
            }
        }
        outcome
    }

    /// Pauses every function. The function with the highest address is paused first. The IOMMU has a low address, and must serve the
    /// devices behind the IOMMU until these devices are paused.
    pub fn pause(&self) {
        self.devices().iter().rev().for_each(|(_, function)| function.pause());
    }

    /// Lets every function continue, in ascending order of the addresses.
    pub fn resume(&self) {
        self.devices().iter().for_each(|(_, function)| function.resume());
    }

    /// Returns the state of all functions. Call this function while all vCPUs are stopped and all functions are paused.
    ///
    /// # Errors
    /// A function cannot be saved. The error names the function.
    pub fn save(&self) -> Result<Vec<FunctionState>, StateError> {
        let save = |(address, function): &(PciAddress, Arc<dyn PciDevice>)| {
            let checked = self.claims_at(*address).map_or(Ok(()), |claims| lock(claims).check(address.device));
            let state = checked.and_then(|()| function.save()).map_err(StateError::of(function.id()))?;
            Ok(FunctionState { segment: address.segment, device: address.device, id: function.id().into(), state })
        };
        self.devices().iter().map(save).collect()
    }

    /// Restores `states` into functions that were just created or reset and are paused, and claims the addresses of their BARs. The
    /// function with the lowest address is restored first. The IOMMU has a low address, and the devices behind the IOMMU need its mappings.
    ///
    /// # Errors
    /// The functions differ from the saved functions, or the saved state of a function is invalid. The bus can then only be
    /// [reset](PciRoot::reset).
    pub fn restore(&self, states: &[FunctionState]) -> Result<(), StateError> {
        let devices = self.devices();
        let here: Vec<(PciAddress, &str)> =
            devices.iter().map(|(address, function)| (*address, function.id())).collect();
        let saved: Vec<(PciAddress, &str)> = states.iter().map(|state| (state.address(), state.id.as_str())).collect();
        if here != saved {
            let rule = format!(
                "this VM has {}, but the saved state has {}: restore with the configuration that was saved",
                list(&here),
                list(&saved)
            );
            return Err(StateError::rule("functions", rule));
        }
        for ((address, function), state) in devices.iter().zip(states) {
            let follow = || self.claims_at(*address).map_or(Ok(()), |claims| lock(claims).restore(address.device));
            let restored = function.restore(&state.state).and_then(|()| follow());
            restored.map_err(StateError::of(function.id()))?;
        }
        Ok(())
    }

    /// Returns segment and device number as indices, if a function can have this address.
    fn place(&self, address: PciAddress) -> Option<(usize, usize)> {
        let (segment, number) = (usize::from(address.segment), usize::from(address.device));
        let on_bus = address == PciAddress::on_segment(address.segment, address.device);
        (on_bus && number < DEVICES && segment < self.claims.len()).then_some((segment, number))
    }

    fn claims_at(&self, address: PciAddress) -> Option<&Mutex<Claims>> {
        self.claims.get(usize::from(address.segment))
    }

    /// Returns the function at `address`. No lock is held after the return, so calls to the function may take long.
    fn function(&self, address: PciAddress) -> Option<Arc<dyn PciDevice>> {
        let (segment, number) = self.place(address)?;
        self.functions.read().unwrap_or_else(PoisonError::into_inner)[segment][number].clone()
    }
}

/// Lists functions by name and address.
fn list(functions: &[(PciAddress, &str)]) -> String {
    let names: Vec<String> = functions.iter().map(|(address, id)| format!("{id} at {address}")).collect();
    names.join(", ")
}

/// Splits the access of `len` bytes at `offset` into accesses of one, two or four bytes. Returns the offset of each part, and its range in
/// the data. Leaves out parts beyond configuration space.
fn accesses(offset: u16, len: usize) -> impl Iterator<Item = (u16, std::ops::Range<usize>)> {
    aligned_pieces(offset.into(), len).map_while(move |piece| {
        let at = usize::from(offset) + piece.start;
        let end = at + piece.len();
        (end <= usize::from(regs::CONFIG_SIZE)).then_some((u16::try_from(at).ok()?, piece))
    })
}
