// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The modes that are compared: a VMM, its virtual IOMMU, and how the guest maps.

use crate::{Guest, Site, Vmm};

/// Budget of the windows in the mode that has them.
const WINDOWS: &str = "size=64M";

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
    /// Parameters of the guest's kernel.
    pub cmdline: &'static str,
}

/// Those that are compared with each other are neighbours, as the machine's speed drifts.
pub static MODES: [Mode; 9] = [
    Mode { name: "no-viommu", vmm: Vmm::Carom, iommu: false, windows: false, cmdline: "" },
    Mode { name: "bounce", vmm: Vmm::Carom, iommu: true, windows: true, cmdline: "iommu.strict=1" },
    // The guest bounces through pages of its own, which stay mapped as windows do.
    behind("guest-pages", Vmm::Carom, "iommu.strict=1 iommu.bounce=auto"),
    behind("strict", Vmm::Carom, "iommu.strict=1"),
    behind("qemu-strict", Vmm::Qemu, "iommu.strict=1"),
    behind("ch-strict", Vmm::CloudHypervisor, "iommu.strict=1"),
    behind("lazy", Vmm::Carom, "iommu.strict=0"),
    behind("qemu-lazy", Vmm::Qemu, "iommu.strict=0"),
    behind("ch-lazy", Vmm::CloudHypervisor, "iommu.strict=0"),
];

/// Behind the IOMMU, without windows.
const fn behind(name: &'static str, vmm: Vmm, cmdline: &'static str) -> Mode {
    Mode { name, vmm, iommu: true, windows: false, cmdline }
}

impl Mode {
    /// A guest in this mode, with the site's first drive and no job. `name` as for [`Guest::new`].
    #[must_use]
    pub fn guest(&self, site: &Site, name: &str) -> Guest {
        let guest = Guest::new(name).vmm(self.vmm).cmdline(self.cmdline);
        let guest = if self.iommu { guest.iommu_device(&site.nvme[0]) } else { guest.device(&site.nvme[0]) };
        if self.windows { guest.bounce(WINDOWS) } else { guest }
    }

    /// Whether the site has its VMM. QEMU is always there, as the rig is made of it.
    #[must_use]
    pub fn is_at(&self, site: &Site) -> bool {
        self.vmm != Vmm::CloudHypervisor || site.cloud_hypervisor.is_some()
    }
}
