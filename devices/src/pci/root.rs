// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The root bus of each segment: which function sits where, and the way to its configuration space and BARs.

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

/// Devices on a bus.
const DEVICES: usize = 32;

/// The functions of a bus, by device number.
type Functions = [Option<Arc<dyn PciDevice>>; DEVICES];

/// Saved state of one function, and where it sits.
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
    /// What it is.
    pub state: DeviceState,
}

impl FunctionState {
    /// Where the function sits.
    pub fn address(&self) -> PciAddress {
        PciAddress::on_segment(self.segment, self.device)
    }
}

/// PCI bus 0 of each segment with its host bridge: 32 devices of one function each.
///
/// The buses are reached through [`super::Ecam`] and [`super::ConfigPorts`]. A write to configuration space that enables
/// or moves a BAR claims or moves a range in the [`AddressSpace`] *during that access*, on the vCPU's thread: an
/// `AddressSpace` must allow [`AddressSpace::insert`] and [`AddressSpace::remove`] from within a
/// [`crate::platform::BusDevice`] call.
pub struct PciRoot {
    functions: RwLock<Vec<Functions>>,
    /// Those of each segment.
    claims: Vec<Mutex<Claims>>,
}

impl PciRoot {
    /// A bus for each of `windows`, segment by segment, with nothing but its host bridge, a `bridge`. Functions claim their BARs in `space`
    /// within the windows of their segment, which must be apart from those of others. It keeps no reference to `space`, which
    /// holds one to the bus once [`super::Ecam`] is in it.
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

    /// How many segments there are.
    pub fn segments(&self) -> u16 {
        u16::try_from(self.claims.len()).unwrap_or(u16::MAX)
    }

    /// Puts `device` at `address` and assigns its BARs; they become visible to the guest once decoding is enabled in
    /// the function's command register.
    pub fn add(&self, address: PciAddress, device: Arc<dyn PciDevice>) -> Result<(), PciError> {
        let (segment, number) = self.place(address).ok_or(PciError::NoSuchPlace(address))?;
        // Claims first, as in `reset`; held so that two functions cannot be added to one place.
        let mut claims = lock(&self.claims[segment]);
        if let Some(occupant) = self.function(address) {
            return Err(PciError::Occupied { address, by: occupant.id().to_string() });
        }
        claims.assign(address.device, &device)?;
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        functions[segment][number] = Some(device);
        Ok(())
    }

    /// Takes the function at `address` off the bus: from then on nothing answers there, its BARs are out of the guest's
    /// view and their places free. `None` if there is none, and for a host bridge, which stays. An access that a vCPU
    /// has begun already may end later; the function is closed once that and all other holders have let go of it.
    pub fn remove(&self, address: PciAddress) -> Option<Arc<dyn PciDevice>> {
        let (segment, number) = self.place(address).filter(|(_, number)| *number != 0)?;
        let mut claims = lock(&self.claims[segment]);
        let function = self.functions.write().unwrap_or_else(PoisonError::into_inner)[segment][number].take()?;
        claims.release(address.device);
        Some(function)
    }

    /// All functions with their addresses, in ascending order, the host bridges included.
    pub fn devices(&self) -> Vec<(PciAddress, Arc<dyn PciDevice>)> {
        let buses = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        let of_bus = |(segment, functions)| {
            let at = move |(device, f): (u8, &Option<_>)| Some((PciAddress::on_segment(segment, device), f.clone()?));
            (0..).zip::<&Functions>(functions).filter_map(at)
        };
        (0..).zip(buses.iter()).flat_map(of_bus).collect()
    }

    /// The lowest address of segment 0 that no function sits at.
    pub fn free_address(&self) -> Option<PciAddress> {
        let buses = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        let mut places = (0..).map(PciAddress::on_root_bus).zip(buses.first()?);
        places.find(|(_, f)| f.is_none()).map(|(address, _)| address)
    }

    /// Reads configuration space of the function at `address`, in any width and alignment. Where there is no function,
    /// or beyond the 4096 bytes, the bytes are all ones.
    pub fn read_config(&self, address: PciAddress, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        let Some(function) = self.function(address) else { return };
        for (at, piece) in accesses(offset, data.len()) {
            function.read_config(at, &mut data[piece]);
        }
    }

    /// Writes configuration space of the function at `address`, in any width and alignment, and lets its BARs follow.
    /// Where there is no function, or beyond the 4096 bytes, nothing happens.
    pub fn write_config(&self, address: PciAddress, offset: u16, data: &[u8]) {
        let Some(function) = self.function(address) else { return };
        for (at, piece) in accesses(offset, data.len()) {
            function.write_config(at, &data[piece]);
        }
        if let Some(claims) = self.claims_at(address) {
            lock(claims).follow(address.device);
        }
    }

    /// Puts every function back to its state at power-on, its BARs where they were assigned. All are reset, whatever
    /// fails; the first failure is returned. To be called with all vCPUs stopped.
    ///
    /// The highest address goes first: the IOMMU has a low one, and may rely on the devices behind it being quiet.
    pub fn reset(&self) -> io::Result<()> {
        let mut outcome = Ok(());
        for (address, function) in self.devices().into_iter().rev() {
            if let Err(error) = function.reset() {
                error!("{}: reset failed: {error}", function.id());
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

    /// Pauses every function, the highest first: the IOMMU has a low address, and serves those behind it to the last.
    pub fn pause(&self) {
        self.devices().iter().rev().for_each(|(_, function)| function.pause());
    }

    /// Lets every function go on, the lowest first.
    pub fn resume(&self) {
        self.devices().iter().for_each(|(_, function)| function.resume());
    }

    /// What all functions are. Called with all vCPUs stopped and all functions paused.
    ///
    /// # Errors
    /// A function cannot be saved; its name is in the error.
    pub fn save(&self) -> Result<Vec<FunctionState>, StateError> {
        let save = |(address, function): &(PciAddress, Arc<dyn PciDevice>)| {
            let checked = self.claims_at(*address).map_or(Ok(()), |claims| lock(claims).check(address.device));
            let state = checked.and_then(|()| function.save()).map_err(StateError::of(function.id()))?;
            Ok(FunctionState { segment: address.segment, device: address.device, id: function.id().into(), state })
        };
        self.devices().iter().map(save).collect()
    }

    /// Makes the functions, which were just made or reset and are paused, what `states` says, and claims the places of their
    /// BARs. The lowest address goes first: the IOMMU has a low one, and those behind it need what it maps.
    ///
    /// # Errors
    /// The functions are others than those that were saved, or what of a state is refused. The bus is good for
    /// [`PciRoot::reset`] only then.
    pub fn restore(&self, states: &[FunctionState]) -> Result<(), StateError> {
        let devices = self.devices();
        let here: Vec<(PciAddress, &str)> =
            devices.iter().map(|(address, function)| (*address, function.id())).collect();
        let saved: Vec<(PciAddress, &str)> = states.iter().map(|state| (state.address(), state.id.as_str())).collect();
        if here != saved {
            let rule = format!("must be those of this VM: {}, not {}", list(&here), list(&saved));
            return Err(StateError::rule("functions", rule));
        }
        for ((address, function), state) in devices.iter().zip(states) {
            let follow = || self.claims_at(*address).map_or(Ok(()), |claims| lock(claims).restore(address.device));
            let restored = function.restore(&state.state).and_then(|()| follow());
            restored.map_err(StateError::of(function.id()))?;
        }
        Ok(())
    }

    /// Segment and device number as indices, if a function can sit there.
    fn place(&self, address: PciAddress) -> Option<(usize, usize)> {
        let (segment, number) = (usize::from(address.segment), usize::from(address.device));
        let on_bus = address == PciAddress::on_segment(address.segment, address.device);
        (on_bus && number < DEVICES && segment < self.claims.len()).then_some((segment, number))
    }

    fn claims_at(&self, address: PciAddress) -> Option<&Mutex<Claims>> {
        self.claims.get(usize::from(address.segment))
    }

    /// The function at `address`. No lock is held once it is returned, so the function may take its time.
    fn function(&self, address: PciAddress) -> Option<Arc<dyn PciDevice>> {
        let (segment, number) = self.place(address)?;
        self.functions.read().unwrap_or_else(PoisonError::into_inner)[segment][number].clone()
    }
}

/// Functions by name and address.
fn list(functions: &[(PciAddress, &str)]) -> String {
    let names: Vec<String> = functions.iter().map(|(address, id)| format!("{id} at {address}")).collect();
    names.join(", ")
}

/// The accesses of one, two or four bytes that make up the one at `offset`, as offset and place in its data; those
/// beyond configuration space are left out.
fn accesses(offset: u16, len: usize) -> impl Iterator<Item = (u16, std::ops::Range<usize>)> {
    aligned_pieces(offset.into(), len).map_while(move |piece| {
        let at = usize::from(offset) + piece.start;
        let end = at + piece.len();
        (end <= usize::from(regs::CONFIG_SIZE)).then_some((u16::try_from(at).ok()?, piece))
    })
}
