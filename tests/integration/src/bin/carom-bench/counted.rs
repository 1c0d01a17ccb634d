// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest whose kernel has a module of `guest/bench` make calls on the edu device, and what the rig's emulator counts between the module's
//! marks meanwhile.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use carom_integration::measure::mode::Mode;
use carom_integration::vmm::Kernel;
use carom_integration::workload::{PRINT_VERSIONS, WAIT_FOR_NVME};
use carom_integration::{Guest, Outcome, Site};

use crate::table::{self, figure};

/// Number of the first mark of a module that ends something.
pub(crate) const FIRST_END: usize = 16;

/// Medians by the number of their mark and what is counted.
pub(crate) type Counts = BTreeMap<(usize, String), u64>;

/// Adds the edu device and `module` to a guest, which runs `job`, then gives the device to the module and runs `after`; returns also what was
/// counted, unless the rig does not count. The device is at `$edu` in both.
#[expect(clippy::too_many_arguments, reason = "each is another thing that a table says of its guests")]
pub(crate) fn run(
    guest: Guest,
    mode: &Mode,
    kernel: Kernel,
    module: &str,
    job: &str,
    after: &str,
    estimate: Duration,
    site: &Site,
) -> Result<(Outcome, Option<Counts>)> {
    let image = if kernel == Kernel::Modular { &site.modular } else { &site.modular_stock };
    let image = image.as_ref().context("there is no kernel with modules; start this by scripts/bench")?;
    let file = format!("{module}.ko");
    // Modules are beside the kernels that they are built for.
    let path = image.with_file_name(&file);
    let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let edu = site.edu.as_deref().context("CAROM_EDU is not set")?;
    let counted = site.instructions.as_deref();
    let before = counted.map_or(0, |file| read(file).len());
    let guest = if mode.iommu { guest.iommu_device(edu) } else { guest.device(edu) };
    let job = format!("{WAIT_FOR_NVME}{PRINT_VERSIONS}{FIND_EDU}{job}{}{after}", bind(module));
    let outcome = table::run(guest.kernel(kernel).program(&file, bytes).job(&job), estimate, site)?;
    let counts = counted.map(|file| parse(read(file).get(before..).unwrap_or_default())).transpose()?;
    Ok((outcome, counts))
}

const FIND_EDU: &str = r#"
edu=
for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor" "$device/device" | tr -d '\n')" = 0x12340x11e8 ] && edu=$device
done
[ -n "$edu" ] || exit 93
"#;

/// Gives the device to the module, whose driver has its name with dashes, and prints what it found.
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

/// What the emulator has written; nothing before it has counted something.
fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

/// The medians, of the lines of `tests/integration/plugin/counts.c`.
pub(crate) fn parse(text: &str) -> Result<Counts> {
    let line = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [number, what, _, _, median, _] = words[..] else { bail!("six words wanted") };
        Ok(((number.parse()?, what.into()), median.parse()?))
    };
    text.lines().map(|text| line(text).with_context(|| format!("counts of the emulator: {text:?}"))).collect()
}

/// The median of what was counted up to a mark.
pub(crate) fn median(counts: &Counts, number: usize, what: &str) -> Result<f64> {
    let count = counts.get(&(number, what.into())).copied().map(figure);
    count.with_context(|| format!("no count of {what} of mark {number}"))
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
