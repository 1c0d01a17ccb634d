// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Modes to compare. A mode is a VMM, a virtual IOMMU or none, and the method by which the guest's kernel maps memory.

use carom_tools::peers::OtherVmm;

use crate::{Guest, Kernel, Site, Vmm};

/// Value of `--iommu-bounce` in modes with windows: the budget of the windows.
const WINDOWS: &str = "size=64M";

/// Balloon that stays empty and reports free pages.
const REPORTING: &str = "size=0,free_page_reporting=on";

/// Configuration of VMM and guest kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mode {
    /// Name in results.
    pub name: &'static str,
    /// VMM.
    pub vmm: Vmm,
    /// True if the drive is behind a virtual IOMMU.
    pub iommu: bool,
    /// True if the VMM has bounce windows.
    pub windows: bool,
    /// True if the guest reports free pages to the host.
    pub reporting: bool,
    /// Kernel of the guest.
    pub kernel: Kernel,
    /// Kernel parameters.
    pub cmdline: &'static str,
}

/// Without an IOMMU. The VMM maps and pins all RAM.
pub const NO_VIOMMU: Mode = beside("no-viommu", Vmm::Carom);
/// Without an IOMMU, on QEMU, to compare pinned memory.
pub const QEMU_NO_VIOMMU: Mode = beside("qemu-no-viommu", Vmm::Qemu);
/// Without an IOMMU, on Cloud Hypervisor.
pub const CH_NO_VIOMMU: Mode = beside("ch-no-viommu", Vmm::CloudHypervisor);
/// Without an IOMMU, on the VMM of the site's template.
pub const OTHER_NO_VIOMMU: Mode = beside("other-no-viommu", Vmm::Other);
/// Strict mode: the guest removes each mapping immediately after the I/O operation.
pub const STRICT: Mode = behind("strict", Vmm::Carom, "iommu.strict=1");
/// Strict mode, with bounce windows.
pub const BOUNCE: Mode = Mode { name: "bounce", windows: true, ..STRICT };
/// Like [`BOUNCE`], with the guest kernel for comparison ([`Kernel::Base`]).
pub const BOUNCE_BASE: Mode = Mode { name: "bounce-base", kernel: Kernel::Base, ..BOUNCE };
/// Like [`BOUNCE`], on the other build of Carom ([`Vmm::Base`]).
pub const BOUNCE_BASE_VMM: Mode = Mode { name: "bounce-base-vmm", vmm: Vmm::Base, ..BOUNCE };
/// Strict mode, on the other build of Carom.
pub const STRICT_BASE_VMM: Mode = Mode { name: "strict-base-vmm", vmm: Vmm::Base, ..STRICT };
/// Without an IOMMU, on the other build of Carom.
pub const NO_VIOMMU_BASE_VMM: Mode = beside("no-viommu-base-vmm", Vmm::Base);
/// With bounce windows. fio gets its buffers from these windows ([`crate::measure::fio::job_of_lent`]).
pub const LENT: Mode = Mode { name: "lent", ..BOUNCE };
/// With bounce windows, and a balloon that reports free pages in blocks of 128 KiB and more.
pub const BOUNCE_REPORTING: Mode = Mode {
    name: "bounce-reporting",
    reporting: true,
    cmdline: "iommu.strict=1 page_reporting.page_reporting_order=5",
    ..BOUNCE
};

/// The guest bounces through its own pages. These pages stay mapped between I/O operations, like windows.
pub const GUEST_PAGES: Mode = behind("guest-pages", Vmm::Carom, "iommu.strict=1 iommu.bounce=auto");
/// Lazy mode: the guest may remove a mapping some time after the I/O operation.
pub const LAZY: Mode = behind("lazy", Vmm::Carom, "iommu.strict=0");
/// Strict mode, on QEMU.
pub const QEMU_STRICT: Mode = behind("qemu-strict", Vmm::Qemu, "iommu.strict=1");
/// Strict mode, on Cloud Hypervisor.
pub const CH_STRICT: Mode = behind("ch-strict", Vmm::CloudHypervisor, "iommu.strict=1");

/// All modes. Modes that are compared with each other are adjacent, so they run at nearly the same time. This matters because
/// the machine's speed drifts.
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

/// Returns a mode behind the IOMMU, without windows.
const fn behind(name: &'static str, vmm: Vmm, cmdline: &'static str) -> Mode {
    Mode { name, vmm, iommu: true, windows: false, reporting: false, kernel: Kernel::Patched, cmdline }
}

/// Returns a mode without an IOMMU.
const fn beside(name: &'static str, vmm: Vmm) -> Mode {
    Mode { name, vmm, iommu: false, windows: false, reporting: false, kernel: Kernel::Patched, cmdline: "" }
}

/// Modes of guests with emulated devices: without a virtual IOMMU, and behind a virtual IOMMU in strict
/// mode.
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
    /// Returns a guest in this mode, with the site's first drive and no job. `name` is as in [`Guest::new`].
    #[must_use]
    pub fn guest(&self, site: &Site, name: &str) -> Guest {
        self.guest_with(&site.nvme[0], name)
    }

    /// Like [`Mode::guest`], with the drive at this address.
    #[must_use]
    pub fn guest_with(&self, drive: &str, name: &str) -> Guest {
        let guest = self.bare_guest(name);
        if self.iommu { guest.iommu_device(drive) } else { guest.device(drive) }
    }

    /// Like [`Mode::guest`], without a drive.
    #[must_use]
    pub fn bare_guest(&self, name: &str) -> Guest {
        let guest = Guest::new(name).vmm(self.vmm).kernel(self.kernel).cmdline(self.cmdline);
        let guest = if self.windows { guest.bounce(WINDOWS) } else { guest };
        if self.reporting { guest.balloon(REPORTING) } else { guest }
    }

    /// True if the site has the mode's kernel and a VMM that accepts a drive.
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
        assert_eq!(there(&site), without, "the VMM accepts no drive");
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
