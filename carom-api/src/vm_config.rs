// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Configuration of a VM in Cloud Hypervisor's terms, and the rules that concern the whole configuration.

use std::ops::Deref;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::{
    ConsoleMode, CpusConfig, LandlockConfig, MemoryConfig, NumaConfig, PayloadConfig, PciSegmentConfig, PlatformConfig,
    RateLimitGroupConfig, SerialConfig,
};
use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::{Field, Terms};
use crate::kinds::{
    BalloonConfig, ConsoleConfig, DeviceConfig, DiskConfig, FsConfig, IommuBounceConfig, KINDS, KindConfig, NetConfig,
    Number, PartConfig, PmemConfig, RngConfig, UserDeviceConfig, VsockConfig, for_each_kind,
};
use crate::limits::{SLOTS, Slots};
use crate::object;

macro_rules! define_vm_config {
    (
        lists { $($(#[$list_doc:meta])* $list:ident: $list_variant:ident($list_config:ident),)* }
        singles { $($(#[$single_doc:meta])* $single:ident: $single_variant:ident($single_config:ident),)* }
    ) => {
        /// Configuration of a VM.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
        pub struct VmConfig {
            /// Kernel or firmware to boot.
            #[serde(deserialize_with = "object::required")]
            pub payload: PayloadConfig,
            /// CPUs of the VM.
            #[serde(default, deserialize_with = "object::required")]
            pub cpus: CpusConfig,
            /// RAM of the VM.
            #[serde(default, deserialize_with = "object::required")]
            pub memory: MemoryConfig,
            $(
                $(#[$list_doc])*
                #[serde(default, deserialize_with = "object::list_or_null")]
                pub $list: Vec<$list_config>,
            )*
            /// NUMA nodes. If the list is empty, the guest has one node.
            #[serde(default, deserialize_with = "object::list_or_null")]
            pub numa: Vec<NumaConfig>,
            /// Shares of the BAR address space for each PCI segment.
            #[serde(default, deserialize_with = "object::list_or_null")]
            pub pci_segments: Vec<PciSegmentConfig>,
            /// Rate limits that several disks share.
            #[serde(default, deserialize_with = "object::list_or_null")]
            pub rate_limit_groups: Vec<RateLimitGroupConfig>,
            /// Platform options of the VM.
            #[serde(default, deserialize_with = "object::required")]
            pub platform: PlatformConfig,
            /// First serial port.
            #[serde(default, deserialize_with = "object::required")]
            pub serial: SerialConfig,
            /// True if the VM has a pvpanic device, which reports a panic of the guest kernel.
            #[serde(default)]
            pub pvpanic: bool,
            /// True if the program may access only the host files that the configuration names (Landlock).
            #[serde(default)]
            pub landlock_enable: bool,
            /// Host files that the program may access in addition to the files of the configuration, such as files of devices that are
            /// added later.
            #[serde(default, deserialize_with = "object::list_or_null")]
            pub landlock_rules: Vec<LandlockConfig>,
            /// True if the VM has a watchdog, which resets the guest if the guest stops reloading the watchdog's timer.
            #[serde(default)]
            pub watchdog: bool,
            $(
                $(#[$single_doc])*
                #[serde(default, deserialize_with = "object::or_null")]
                pub $single: Option<$single_config>,
            )*
        }

        impl VmConfig {
            /// Returns the devices, in the order of the registry.
            pub fn parts(&self) -> impl Iterator<Item = &dyn KindConfig> {
                let none = std::iter::empty::<&dyn KindConfig>();
                none
                    $(.chain(self.$list.iter().map(|part| part as &dyn KindConfig)))*
                    $(.chain(self.$single.iter().map(|part| part as &dyn KindConfig)))*
                    .filter(|part| part.is_there())
            }

            pub(crate) fn parts_mut(&mut self) -> impl Iterator<Item = &mut dyn KindConfig> {
                let none = std::iter::empty::<&mut dyn KindConfig>();
                none
                    $(.chain(self.$list.iter_mut().map(|part| part as &mut dyn KindConfig)))*
                    $(.chain(self.$single.iter_mut().map(|part| part as &mut dyn KindConfig)))*
                    .filter(|part| part.is_there())
            }

            /// Appends a device to the devices of its kind.
            ///
            /// # Errors
            /// The kind allows only one device, and the VM already has it.
            pub fn push(&mut self, part: PartConfig) -> Result<(), ConfigError> {
                match part {
                    $(PartConfig::$list_variant(part) => self.$list.push(part),)*
                    $(PartConfig::$single_variant(part) if self.$single.is_none() => self.$single = Some(part),)*
                    part => return Err(ConfigError::new(part.kind().field, "the VM already has such a device: remove the old device first")),
                }
                Ok(())
            }

            /// Removes and returns the device with this ID.
            pub fn remove(&mut self, id: &str) -> Option<PartConfig> {
                let is_it = |part: &dyn KindConfig| part.id() == Some(id);
                $(
                    if let Some(place) = self.$list.iter().position(|part| is_it(part)) {
                        return Some(PartConfig::$list_variant(self.$list.remove(place)));
                    }
                )*
                $(
                    if let Some(part) = self.$single.take_if(|part| is_it(part)) {
                        return Some(PartConfig::$single_variant(part));
                    }
                )*
                None
            }
        }
    };
}
for_each_kind!(define_vm_config);

impl VmConfig {
    /// Checks a configuration from a user, and fills in derived values.
    ///
    /// # Errors
    /// A rule does not hold.
    pub fn check(mut self) -> Result<CheckedConfig, ConfigError> {
        // Check the number of devices first, because later checks compare each device with all others. A client may send thousands
        // of devices.
        self.place_on_segments()?;
        self.check_slots()?;
        self.parts().try_for_each(|part| part.check_id())?;
        // This rule applies only when the VM is created, because devices can be added and removed while the VM runs.
        ensure_in_terms(
            self.iommu_bounce.is_none() || self.has_use_for_windows(),
            IommuBounceConfig::OPTION,
            |terms| format!("needs a device behind the virtio-iommu: {}", way_behind_iommu(terms)),
        )?;
        self.complete_and_check()
    }

    /// Checks a configuration that was a [`CheckedConfig`] before, but may have been changed since. Generated IDs are allowed.
    ///
    /// # Errors
    /// A rule does not hold.
    pub fn check_again(mut self) -> Result<CheckedConfig, ConfigError> {
        self.place_on_segments()?;
        self.check_slots()?;
        self.complete_and_check()
    }

    fn complete_and_check(mut self) -> Result<CheckedConfig, ConfigError> {
        self.cpus.complete();
        // A checked configuration always names a console, because a missing console in a request body means mode Tty.
        self.console.get_or_insert(ConsoleConfig::of(ConsoleMode::Off)).target().check()?;
        self.parts_mut().for_each(KindConfig::complete);
        let mut taken = self.ids();
        self.parts_mut().for_each(|part| name(part, &mut taken));
        self.serial.check()?;
        self.memory.check()?;
        self.cpus.check(&self.memory)?;
        NumaConfig::check_all(&self.numa, &self.cpus, &self.memory, &self.platform)?;
        self.payload.check()?;
        let segments = self.platform.num_pci_segments;
        ensure_in_terms(segments == 1 || self.payload.firmware.is_none(), PlatformConfig::NUM_PCI_SEGMENTS, |terms| {
            let firmware = PayloadConfig::FIRMWARE.name(terms);
            format!(
                "{segments} segments cannot be combined with {firmware}, because firmware assigns addresses in one segment only: use 1 segment, or boot a kernel"
            )
        })?;
        self.check_parts()?;
        ensure_in_terms(self.landlock_rules.is_empty() || self.landlock_enable, LandlockConfig::OPTION, |terms| {
            format!("has no effect without {}: add both, or leave both out", LandlockConfig::ENABLE.name(terms))
        })?;
        Ok(CheckedConfig(self))
    }

    /// Returns a copy to save in a snapshot. In the copy, `fds` of a network device has one -1 for each descriptor that another process
    /// passed.
    pub fn to_be_saved(&self) -> Self {
        let mut saved = self.clone();
        for net in &mut saved.net {
            net.fds = vec![-1; net.files.count().max(net.inherited.len())];
        }
        saved
    }

    /// Appends a device to the devices of its kind. Returns the device with its ID, which is generated if missing.
    ///
    /// # Errors
    /// The kind allows only one device, and the VM already has it.
    pub fn add(&mut self, mut part: PartConfig) -> Result<PartConfig, ConfigError> {
        part.complete();
        self.place(&mut *part);
        name(&mut *part, &mut self.ids());
        self.push(part.clone())?;
        Ok(part)
    }

    /// Returns the IDs of all devices that have an ID.
    fn ids(&self) -> Vec<String> {
        self.parts().filter_map(KindConfig::id).map(String::from).collect()
    }

    /// Checks that the segments of all devices exist. Puts each device behind the virtio-iommu if its segment is in `iommu_segments`.
    fn place_on_segments(&mut self) -> Result<(), ConfigError> {
        self.platform.check()?;
        for (place, segment) in self.pci_segments.iter().enumerate() {
            segment.check(&self.platform)?;
            let number = segment.pci_segment;
            let is_first = self.pci_segments[..place].iter().all(|other| other.pci_segment != number);
            ensure(is_first, PciSegmentConfig::PCI_SEGMENT, || format!("{number} is given twice: leave one out"))?;
        }
        for part in self.parts() {
            self.platform.check_segment(part.kind().field.key("pci_segment"), part.pci_segment())?;
        }
        let iommu_segments = std::mem::take(&mut self.platform.iommu_segments);
        self.parts_mut()
            .filter(|part| iommu_segments.contains(&part.pci_segment()))
            .for_each(KindConfig::put_behind_iommu);
        self.platform.iommu_segments = iommu_segments;
        Ok(())
    }

    /// Puts a device behind the virtio-iommu if its segment is in `iommu_segments`.
    fn place(&self, part: &mut dyn KindConfig) {
        if self.platform.iommu_segments.contains(&part.pci_segment()) {
            part.put_behind_iommu();
        }
    }

    /// Counts the devices that take a slot of this segment. Returns the number of devices behind the virtio-iommu, and the number of other
    /// devices.
    fn count(&self, segment: u16) -> (usize, usize) {
        let in_slots = self.parts().filter(|part| part.kind().takes_slot && part.pci_segment() == segment);
        let (behind, beside): (Vec<_>, Vec<_>) = in_slots.partition(|part| part.is_behind_iommu());
        (behind.len(), beside.len())
    }

    /// True if a device is behind the virtio-iommu.
    pub(crate) fn has_device_behind_iommu(&self) -> bool {
        self.parts().any(KindConfig::is_behind_iommu)
    }

    /// True if an existing or later device may use bounce windows. False if the VM has passed-through devices and no device is
    /// behind the virtio-iommu. Emulated devices that are not behind the virtio-iommu do not count.
    pub(crate) fn has_use_for_windows(&self) -> bool {
        self.has_device_behind_iommu()
            || !self.platform.iommu_segments.is_empty()
            || !self.parts().any(|part| part.kind().passed_through)
    }

    /// True if the VM has a virtio-iommu, for a device behind it or for a device that may be added behind it later.
    pub fn has_iommu(&self) -> bool {
        self.iommu_bounce.is_some() || !self.platform.iommu_segments.is_empty() || self.has_device_behind_iommu()
    }

    fn check_slots(&self) -> Result<(), ConfigError> {
        (0..self.platform.num_pci_segments).try_for_each(|segment| self.check_slots_of(segment))
    }

    fn check_slots_of(&self, segment: u16) -> Result<(), ConfigError> {
        let (behind, beside) = self.count(segment);
        let slots = Slots::of(segment);
        // pvpanic and the watchdog each take a slot of segment 0.
        let of_platform = usize::from(self.pvpanic && segment == 0) + usize::from(self.watchdog && segment == 0);
        let where_to = |place: &str| match self.platform.num_pci_segments {
            1 => place.to_string(),
            _ => format!("{place} on segment {segment}"),
        };
        let all_behind = self.platform.iommu_segments.contains(&segment);
        let (is_behind, count, most, place) = if !self.has_iommu() {
            (false, beside, slots.all - of_platform, "on the bus")
        } else if all_behind || behind > slots.behind_iommu {
            let most = if all_behind { slots.all - of_platform } else { slots.behind_iommu };
            (true, behind, most, "behind the virtio-iommu")
        } else {
            (false, beside, slots.beside_iommu - of_platform, "on the bus")
        };
        if count <= most {
            return Ok(());
        }
        let off = if self.has_iommu() && !is_behind { " with iommu off" } else { "" };
        Err(self.too_many(segment, is_behind, &format!("at most {most} devices{off} fit {}", where_to(place))))
    }

    /// Returns the error that too many devices are on a segment. The error lists the number of devices of each kind. The error names the
    /// field of the kind with the most devices.
    fn too_many(&self, segment: u16, is_behind: bool, rule: &str) -> ConfigError {
        let in_slots = self.parts().filter(|part| part.kind().takes_slot && part.pci_segment() == segment);
        let mut kinds: Vec<(Field, usize)> = Vec::new();
        for part in in_slots.filter(|part| part.is_behind_iommu() == is_behind) {
            match kinds.iter_mut().find(|(field, _)| *field == part.kind().field) {
                Some((_, count)) => *count += 1,
                None => kinds.push((part.kind().field, 1)),
            }
        }
        let most = kinds.iter().max_by_key(|(_, count)| *count).map_or(DeviceConfig::OPTION, |(field, _)| *field);
        ConfigError::in_terms(most, |terms| {
            let counts: Vec<String> =
                kinds.iter().map(|(field, count)| format!("{count} of {}", field.name(terms))).collect();
            format!("{rule}, but there are {}: use fewer devices, or another PCI segment", counts.join(", "))
        })
    }

    fn check_rate_limit_groups(&self) -> Result<(), ConfigError> {
        RateLimitGroupConfig::check_all(&self.rate_limit_groups)?;
        self.disks.iter().filter_map(|disk| disk.rate_limit_group.as_ref()).try_for_each(|name| {
            let exists = self.rate_limit_groups.iter().any(|group| group.id == *name);
            ensure(exists, DiskConfig::RATE_LIMIT_GROUP, || {
                format!("rate limit group '{name}' does not exist: define a group with this id")
            })
        })
    }

    fn check_parts(&self) -> Result<(), ConfigError> {
        self.check_slots()?;
        self.check_rate_limit_groups()?;
        let mut earlier: Vec<&dyn KindConfig> = Vec::new();
        for part in self.parts() {
            if let Some((field, value)) = earlier.iter().find_map(|other| part.same_as(*other)) {
                return Err(ConfigError::conflict(
                    field,
                    format!("{value} is given twice: use another value for one of the two devices"),
                ));
            }
            if let Some(slot) = part.pci_device_id() {
                let rule = || format!("{slot} is not between {} and {}", SLOTS.start(), SLOTS.end());
                ensure(SLOTS.contains(&slot), part.kind().slot_field(), rule)?;
            }
            part.check_characters()?;
            part.check(&self.memory)?;
            earlier.push(part);
        }
        Ok(())
    }
}

/// Generates an ID for a device without an ID. The generated ID is not in `taken`.
fn name(part: &mut dyn KindConfig, taken: &mut Vec<String>) {
    if part.id().is_some() {
        return;
    }
    let kind = part.kind();
    let id = match kind.number {
        Number::One => kind.id.to_string(),
        Number::Many => {
            let numbered = |number: u32| format!("{}{number}", kind.id);
            (0..).map(numbered).find(|id| !taken.contains(id)).expect("there are fewer devices than numbers")
        }
    };
    part.set_id(id.clone());
    taken.push(id);
}

/// Returns the part of an error's text that tells the user how to put a device behind the virtio-iommu. The text names all kinds of devices
/// that support this.
fn way_behind_iommu(terms: Terms) -> String {
    let fields = KINDS.iter().filter_map(|kind| kind.iommu);
    let names: Vec<&str> = fields
        .map(|field| match terms {
            Terms::Options => field.option(),
            Terms::Json => field.json(),
        })
        .collect();
    let names = match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => names.concat(),
    };
    match terms {
        Terms::Options => format!("add ',iommu=on' to a {names}"),
        Terms::Json => format!("set iommu of one of {names} to true"),
    }
}

/// Configuration that satisfies all rules that can be checked without accessing the host. All defaults are filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedConfig(VmConfig);

impl CheckedConfig {
    /// Returns a changed copy, if the copy breaks no rule.
    ///
    /// # Errors
    /// The change fails, or a rule does not hold.
    pub fn with<E: From<ConfigError>>(&self, change: impl FnOnce(&mut VmConfig) -> Result<(), E>) -> Result<Self, E> {
        let mut changed = self.0.clone();
        change(&mut changed)?;
        Ok(changed.check_again()?)
    }

    /// Removes and returns the device with this ID. A removal cannot break a rule.
    pub fn remove(&mut self, id: &str) -> Option<PartConfig> {
        self.0.remove(id)
    }
}

impl Deref for CheckedConfig {
    type Target = VmConfig;

    fn deref(&self) -> &VmConfig {
        &self.0
    }
}

#[cfg(test)]
mod tests;
