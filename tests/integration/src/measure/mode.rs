// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The modes that are compared: a VMM, its virtual IOMMU, and how the guest maps.

use carom_tools::peers::OtherVmm;

use crate::{Guest, Kernel, Site, Vmm};

/// Budget of the windows in the mode that has them.
const WINDOWS: &str = "size=64M";

/// A balloon that stays empty.
const REPORTING: &str = "size=0,free_page_reporting=on";

/// One configuration of VMM and guest kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    /// What it is called in results.
    pub name: &'static str,
    /// The VMM.
    pub vmm: Vmm,
    /// Whether the drive is behind a virtual IOMMU.
    pub iommu: bool,
    /// Whether there are bounce windows.
    pub windows: bool,
    /// Whether the guest tells the host of pages that it has freed.
    pub reporting: bool,
    /// The guest's kernel.
    pub kernel: Kernel,
    /// Its parameters.
    pub cmdline: &'static str,
}

/// Without an IOMMU: all RAM is mapped and pinned, in each VMM.
pub const NO_VIOMMU: Mode = beside("no-viommu", Vmm::Carom);
/// The same by QEMU, where it is compared by what is pinned.
pub const QEMU_NO_VIOMMU: Mode = beside("qemu-no-viommu", Vmm::Qemu);
/// The same by Cloud Hypervisor.
pub const CH_NO_VIOMMU: Mode = beside("ch-no-viommu", Vmm::CloudHypervisor);
/// The same by the VMM of the site's template.
pub const OTHER_NO_VIOMMU: Mode = beside("other-no-viommu", Vmm::Other);
/// Mappings that end with each operation.
pub const STRICT: Mode = behind("strict", Vmm::Carom, "iommu.strict=1");
/// Windows.
pub const BOUNCE: Mode = Mode { name: "bounce", windows: true, ..STRICT };
/// Windows, with the kernel that the guest's is compared with.
pub const BOUNCE_BASE: Mode = Mode { name: "bounce-base", kernel: Kernel::Base, ..BOUNCE };
/// Windows, by the build of Carom that it is compared with.
pub const BOUNCE_BASE_VMM: Mode = Mode { name: "bounce-base-vmm", vmm: Vmm::Base, ..BOUNCE };
/// Mappings that end with each operation, by that build.
pub const STRICT_BASE_VMM: Mode = Mode { name: "strict-base-vmm", vmm: Vmm::Base, ..STRICT };
/// No IOMMU, by that build.
pub const NO_VIOMMU_BASE_VMM: Mode = beside("no-viommu-base-vmm", Vmm::Base);
/// Windows, of which fio has its buffers ([`crate::measure::fio::job_of_lent`]).
pub const LENT: Mode = Mode { name: "lent", ..BOUNCE };
/// Windows, and a balloon by which free pages go back to the host, blocks of 128 KiB too.
pub const BOUNCE_REPORTING: Mode = Mode {
    name: "bounce-reporting",
    reporting: true,
    cmdline: "iommu.strict=1 page_reporting.page_reporting_order=5",
    ..BOUNCE
};

/// The guest bounces through pages of its own, which stay mapped as windows do.
pub const GUEST_PAGES: Mode = behind("guest-pages", Vmm::Carom, "iommu.strict=1 iommu.bounce=auto");
/// Mappings that end some time after each operation.
pub const LAZY: Mode = behind("lazy", Vmm::Carom, "iommu.strict=0");
/// The peer's mappings that end with each operation.
pub const QEMU_STRICT: Mode = behind("qemu-strict", Vmm::Qemu, "iommu.strict=1");
/// Those of the other peer.
pub const CH_STRICT: Mode = behind("ch-strict", Vmm::CloudHypervisor, "iommu.strict=1");

/// Those that are compared with each other are neighbours, as the machine's speed drifts.
pub static MODES: [Mode; 14] = [
    NO_VIOMMU,
    NO_VIOMMU_BASE_VMM,
    OTHER_NO_VIOMMU,
    BOUNCE,
    BOUNCE_BASE,
    BOUNCE_BASE_VMM,
    GUEST_PAGES,
    STRICT,
    STRICT_BASE_VMM,
    QEMU_STRICT,
    CH_STRICT,
    LAZY,
    behind("qemu-lazy", Vmm::Qemu, "iommu.strict=0"),
    behind("ch-lazy", Vmm::CloudHypervisor, "iommu.strict=0"),
];

/// Behind the IOMMU, without windows.
const fn behind(name: &'static str, vmm: Vmm, cmdline: &'static str) -> Mode {
    Mode { name, vmm, iommu: true, windows: false, reporting: false, kernel: Kernel::Patched, cmdline }
}

/// Without an IOMMU.
const fn beside(name: &'static str, vmm: Vmm) -> Mode {
    Mode { name, vmm, iommu: false, windows: false, reporting: false, kernel: Kernel::Patched, cmdline: "" }
}

/// Modes of guests with devices that the VMMs emulate: without a virtual IOMMU, and behind one in strict mode.
pub static EMULATED_MODES: [Mode; 10] = [
    NO_VIOMMU,
    NO_VIOMMU_BASE_VMM,
    QEMU_NO_VIOMMU,
    CH_NO_VIOMMU,
    BOUNCE,
    BOUNCE_BASE_VMM,
    STRICT,
    STRICT_BASE_VMM,
    QEMU_STRICT,
    CH_STRICT,
];

impl Mode {
    /// A guest in this mode, with the site's first drive and no job. `name` as for [`Guest::new`].
    #[must_use]
    pub fn guest(&self, site: &Site, name: &str) -> Guest {
        self.guest_with(&site.nvme[0], name)
    }

    /// The same with the drive at this address.
    #[must_use]
    pub fn guest_with(&self, drive: &str, name: &str) -> Guest {
        let guest = self.bare_guest(name);
        if self.iommu { guest.iommu_device(drive) } else { guest.device(drive) }
    }

    /// The same without a drive.
    #[must_use]
    pub fn bare_guest(&self, name: &str) -> Guest {
        let guest = Guest::new(name).vmm(self.vmm).kernel(self.kernel).cmdline(self.cmdline);
        let guest = if self.windows { guest.bounce(WINDOWS) } else { guest };
        if self.reporting { guest.balloon(REPORTING) } else { guest }
    }

    /// Whether the site has its VMM, and that can be given a drive, and its kernel.
    #[must_use]
    pub fn is_at(&self, site: &Site) -> bool {
        let takes_drive = self.vmm != Vmm::Other || site.other_vmm.as_ref().is_some_and(OtherVmm::takes_drive);
        takes_drive && self.vmm.is_at(site) && (self.kernel != Kernel::Base || site.base_kernel.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_mode_exists_only_with_its_variable_and_a_drive() {
        let mut site = Site::default();
        let there =
            |site: &Site| MODES.iter().filter(|mode| mode.is_at(site)).map(|mode| mode.name).collect::<Vec<_>>();
        let without = ["no-viommu", "bounce", "guest-pages", "strict", "qemu-strict", "lazy", "qemu-lazy"];
        assert_eq!(there(&site), without);
        let template = |more: &str| {
            let text = format!("x /bin/sh {{kernel}} {{initramfs}} {{cmdline}} {{memory_mib}} {{cpus}} {more}");
            OtherVmm::parse(&text).ok()
        };
        site.other_vmm = template("");
        assert_eq!(there(&site), without, "it takes no drive");
        site.other_vmm = template("{address}");
        site.base_kernel = Some("bzImage".into());
        assert!(there(&site).contains(&"bounce-base"));
        assert!(!there(&site).contains(&"bounce-base-vmm"));
        site.base_vmm = Some("carom".into());
        site.cloud_hypervisor = Some("ch".into());
        assert_eq!(there(&site)[..3], ["no-viommu", "no-viommu-base-vmm", "other-no-viommu"]);
        assert_eq!(there(&site).len(), MODES.len());
    }
}
