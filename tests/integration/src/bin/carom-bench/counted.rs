// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that load a kernel module of `guest/bench`. The module calls the kernel's DMA functions for the edu device. Before
//! and after each call, the module executes a mark: an instruction without effect that the rig's emulator recognizes. The
//! emulator counts events between the two marks.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use carom_integration::measure::mode::Mode;
use carom_integration::vmm::Kernel;
use carom_integration::{Outcome, Site};

use crate::table::{self, LITTLE_RAM_MIB, Measured, Work, figure};
use crate::throughput::job;

/// Number of the mark after a module's first call. The marks after later calls have higher numbers.
pub(crate) const FIRST_END: usize = 16;

/// Median counts. The key is the number of the mark after a call, and the kind of count.
pub(crate) type Counts = BTreeMap<(usize, String), u64>;

/// Guests whose measurements fill a table. Each guest binds the edu device to the driver in `module`.
pub(crate) struct Guests {
    /// Mode and kernel of each guest.
    pub(crate) modes: [(Mode, Kernel); 3],
    pub(crate) cpus: u8,
    pub(crate) module: &'static str,
    /// Shell commands to run before the device is bound to the module, and shell commands to run afterwards. Both can use
    /// `$edu`, the device's sysfs directory.
    pub(crate) jobs: [&'static str; 2],
    /// Estimated duration of a guest. The emulator counts during the whole time, which slows the guest down.
    pub(crate) estimate: Duration,
    /// Function that creates the table's rows from the guest's output. The emulator's counts are `None` if the rig does not
    /// count instructions.
    pub(crate) measured: fn(&Outcome, &Mode, Option<&Counts>) -> Result<Measured>,
}

impl Guests {
    /// Returns one piece of work for each guest, or an empty list if the site has no edu device.
    pub(crate) fn work(&'static self, site: &Site) -> Vec<Work> {
        let modes = self.modes.iter().filter(|_| site.edu.is_some());
        modes
            .map(|(mode, kernel)| Work {
                name: mode.name.into(),
                estimate: self.estimate,
                run: Box::new(|site, name| self.run(mode, *kernel, site, name)),
            })
            .collect()
    }

    fn run(&self, mode: &Mode, kernel: Kernel, site: &Site, name: &str) -> Result<Measured> {
        let image = if kernel == Kernel::Modular { &site.modular } else { &site.modular_stock };
        let image = image.as_ref().context(
            "CAROM_MODULAR_KERNEL or CAROM_MODULAR_STOCK_KERNEL is not set; run scripts/bench, which sets both",
        )?;
        let file = format!("{}.ko", self.module);
        // The module's file is in the directory of the kernel image.
        let path = image.with_file_name(&file);
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let edu = site.edu.as_deref().context("CAROM_EDU is not set; run scripts/bench, which sets it")?;
        let counted = site.instructions.as_deref();
        let before = counted.map_or(0, |file| read(file).len());
        let guest = mode.guest(site, name).memory_mib(LITTLE_RAM_MIB).cpus(self.cpus);
        let guest = if mode.iommu { guest.iommu_device(edu) } else { guest.device(edu) };
        let [first, then] = self.jobs;
        let job = job(&format!("{FIND_EDU}{first}{}{then}", bind(self.module)));
        let outcome = table::run(guest.kernel(kernel).program(&file, bytes).job(&job), self.estimate, site)?;
        let counts = counted.map(|file| parse(read(file).get(before..).unwrap_or_default())).transpose()?;
        (self.measured)(&outcome, mode, counts.as_ref())
    }
}

const FIND_EDU: &str = r#"
edu=
for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor" "$device/device" | tr -d '\n')" = 0x12340x11e8 ] && edu=$device
done
[ -n "$edu" ] || exit 93
"#;

/// Returns commands that bind the device to the module and print the module's results. The driver's name is the module's name with
/// dashes instead of underscores.
fn bind(module: &str) -> String {
    let driver = module.replace('_', "-");
    format!(
        r#"
insmod /bin/{module}.ko || exit 92
echo {driver} >"$edu/driver_override"
echo "${{edu##*/}}" >/sys/bus/pci/drivers_probe
dmesg | sed -n 's/.*{driver}: CAROM-/CAROM-/p'
[ -e "$edu/driver" ] || {{ dmesg | tail -n 20; exit 94; }}
"#
    )
}

/// Reads the emulator's output. Returns an empty text if the file cannot be read, for example before the first count.
fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

/// Parses the medians in the output of `tests/integration/plugin/counts.c`.
pub(crate) fn parse(text: &str) -> Result<Counts> {
    let line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [number, what, _, _, median, _] = words[..] else { bail!("the line does not have six words") };
        Ok(((number.parse()?, what.into()), median.parse()?))
    };
    text.lines().map(|text| line(text).with_context(|| format!("cannot parse the emulator's line {text:?}"))).collect()
}

/// Returns the median count of the call before the mark `number`.
pub(crate) fn median(counts: &Counts, number: usize, what: &str) -> Result<f64> {
    let count = counts.get(&(number, what.into())).copied().map(figure);
    count.with_context(|| format!("the emulator's output has no count of {what} for mark {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_read_and_lines_of_other_words_are_errors() {
        let counts = parse("16 lines 1000 1 7 9999\n17 pages 1000 1 3 9999\n").unwrap();

        assert_eq!(median(&counts, 16, "lines").unwrap(), 7.0);
        assert_eq!(median(&counts, 17, "pages").unwrap(), 3.0);
        assert!(median(&counts, 17, "lines").is_err());
        assert!(parse("16 lines 1 1 1\n").is_err());
        assert!(parse("16 lines 1 1 some 1\n").is_err());
    }
}
