// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Summary of the tables, mainly ratios of figures. Each figure of the summary is calculated separately for each round.

use std::collections::BTreeMap;

use carom_integration::measure::statistics::{Spread, interval, median};
use serde::{Deserialize, Serialize};

use crate::sample::{Sample, rows};
use crate::table::{self, Row};

/// Pairs of modes whose operations per second are compared.
const PAIRS: [(&str, &str); 7] = [
    ("bounce", "no-viommu"),
    ("bounce", "bounce-base"),
    ("bounce", "strict"),
    ("bounce", "lazy"),
    ("bounce", "qemu-strict"),
    ("bounce", "qemu-lazy"),
    ("bounce", "ch-lazy"),
];

/// Pairs of modes whose operations per second are compared in the table `lent`.
const LENT_PAIRS: [(&str, &str); 2] = [("lent", "no-viommu"), ("lent", "bounce")];

/// Suffix in the names of modes that run the other build of Carom.
const BASE_VMM: &str = "-base-vmm";

/// Table whose figures are compared between two builds of Carom: the table's name, the keys that identify its rows, and the
/// compared figures.
type OfBase = (&'static str, &'static [&'static str], &'static [&'static str]);
const OF_BASE: [OfBase; 5] = [
    ("throughput", &["pattern", "size", "depth", "jobs"], &["iops"]),
    ("io_instructions", &["pattern", "size"], &["instructions"]),
    ("disk", &["pattern", "size", "depth"], &["iops"]),
    ("map_time", &["direction", "size", "threads"], &["map_us", "unmap_us"]),
    ("vmm", &["devices", "kernel"], &["start_ms", "own_mib", "api_ready_ms", "api_us"]),
];

/// Mode that maps all memory statically. In the tables `density` and `pools`, the other modes are compared with this mode.
const STATIC: &str = "no-viommu";

/// Mode whose ratios to [`STATIC`] are the figures `density_ratio` and `density_iops_ratio`.
const DENSEST: &str = "bounce-reporting";

/// Number of rounds, spread and confidence interval of a figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) rounds: usize,
    #[serde(flatten)]
    pub(crate) spread: Spread,
    /// 95 % confidence interval of the median. `None` with fewer than six rounds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) interval: Option<(f64, f64)>,
}

/// Figures of the summary by name.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    /// Medians over the rounds.
    pub(crate) medians: BTreeMap<String, f64>,
    /// Number of rounds, spread and confidence interval of each figure.
    pub(crate) measured: BTreeMap<String, Measured>,
}

/// Calculates the summary of all samples.
pub(crate) fn of(samples: &[&Sample]) -> Summary {
    let mut figures = Figures::default();
    operations(samples, "throughput", &PAIRS, &mut figures);
    operations(samples, "lent", &LENT_PAIRS, &mut figures);
    against_base(samples, &mut figures);
    scaling(samples, &mut figures);
    density(samples, &mut figures);
    sandbox(samples, &mut figures);
    slowdown(samples, &mut figures);
    for (_, row) in rows(samples, "pinning") {
        if let Some(percent) = row.figures.get("returned_percent") {
            figures.add("free_page_reporting_returned", percent / 100.0);
        }
    }
    figures.summary()
}

/// Figures of the summary by name, each with its values in all rounds.
#[derive(Default)]
struct Figures(BTreeMap<String, Vec<f64>>);

impl Figures {
    fn add(&mut self, name: &str, figure: f64) {
        self.0.entry(name.replace('-', "_")).or_default().push(figure);
    }

    fn summary(self) -> Summary {
        let mut summary = Summary::default();
        for (name, figures) in self.0 {
            let (Some(median), Some(spread)) = (median(figures.iter().copied()), Spread::of(&figures)) else {
                continue;
            };
            summary.medians.insert(name.clone(), median);
            summary.measured.insert(name, Measured { rounds: figures.len(), spread, interval: interval(&figures) });
        }
        summary
    }
}

/// Comparison of two kinds of rows of `table`: rows for which `own` is true, and rows for which `base` is true. Two rows are compared if
/// they are of the same round, have equal values for all keys in `same`, and both have the figure.
struct Against<'a> {
    table: &'a str,
    own: &'a dyn Fn(&Row) -> bool,
    base: &'a dyn Fn(&Row) -> bool,
    same: &'a [&'a str],
    figure: fn(&Row) -> Option<f64>,
}

impl Against<'_> {
    /// Calls `each` for each compared pair of rows. The arguments are the row for which `own` is true, its figure, and the
    /// figure of the other row.
    fn each(&self, samples: &[&Sample], mut each: impl FnMut(&Row, f64, f64)) {
        let all: Vec<(u32, &Row)> = rows(samples, self.table).collect();
        for (round, row) in all.iter().filter(|(_, row)| (self.own)(row)) {
            let is_alike = |other: &Row| self.same.iter().all(|key| other.key(key) == row.key(key));
            let beside = all.iter().find(|(its, other)| its == round && (self.base)(other) && is_alike(other));
            if let (Some(own), Some(base)) = ((self.figure)(row), beside.and_then(|(_, row)| (self.figure)(row))) {
                each(row, own, base);
            }
        }
    }
}

/// Adds the ratios of the operations per second in each pair of modes, at depth 64 with one job, as
/// `MODE_to_OTHER_PATTERN_SIZE`.
fn operations(samples: &[&Sample], table: &str, pairs: &[(&str, &str)], figures: &mut Figures) {
    for (mode, other) in pairs {
        let of = |wanted| move |row: &Row| is_usual(row) && is(row, "mode", wanted);
        let (own, base) = (of(*mode), of(*other));
        let same = &["pattern", "size"];
        Against { table, own: &own, base: &base, same, figure: iops }.each(samples, |row, own, base| {
            figures.add(&format!("{mode}_to_{other}_{}_{}", word(row, "pattern"), word(row, "size")), own / base);
        });
    }
}

/// Divides the figures of this build of Carom by the figures of the other build, and adds the ratios as
/// `base_TABLE_MODE_KEYS_FIGURE`.
fn against_base(samples: &[&Sample], figures: &mut Figures) {
    for (table, keys, names) in OF_BASE {
        // The rows of the table `vmm` have a key `vmm`. The rows of other tables have a key `mode`.
        let by = if table == "vmm" { "vmm" } else { "mode" };
        let all: Vec<(u32, &Row)> = rows(samples, table).collect();
        for (round, row) in &all {
            let base = match by {
                "vmm" if is(row, by, "carom") => "base".to_owned(),
                "vmm" => continue,
                _ => word(row, by).to_owned() + BASE_VMM,
            };
            let is_beside = |other: &Row| is(other, by, &base) && keys.iter().all(|key| other.key(key) == row.key(key));
            let Some((_, beside)) = all.iter().find(|(its, other)| its == round && is_beside(other)) else { continue };
            let of: Vec<String> = [by].iter().chain(keys).filter_map(|key| row.key(key)).map(table::word).collect();
            for name in names {
                if let (Some(own), Some(base)) = (positive(row, name), positive(beside, name)) {
                    figures.add(&format!("base_{table}_{}_{name}", of.join("_")), own / base);
                }
            }
        }
    }
}

/// Divides the operations per second with two jobs by the operations per second with one job, and adds the ratios as
/// `scaling_MODE_PATTERN_SIZE_DRIVE`.
fn scaling(samples: &[&Sample], figures: &mut Figures) {
    let with = |jobs: u8| move |row: &Row| row.key("jobs").is_some_and(|own| *own == jobs);
    let (own, base) = (with(2), with(1));
    let same = &["mode", "pattern", "size", "drive"];
    Against { table: "scaling", own: &own, base: &base, same, figure: iops }.each(samples, |row, own, base| {
        let [mode, pattern, size, drive] = same.map(|key| word(row, key));
        figures.add(&format!("scaling_{mode}_{pattern}_{size}_{drive}"), own / base);
    });
}

/// Divides the operations per second with seccomp filters by the operations per second without filters, and adds the ratios as
/// `sandbox_MODE_SIZE`.
fn sandbox(samples: &[&Sample], figures: &mut Figures) {
    let with = |filter| move |row: &Row| is(row, "seccomp", filter);
    let (own, base) = (with("true"), with("false"));
    let same = &["mode", "size"];
    Against { table: "sandbox", own: &own, base: &base, same, figure: iops }.each(samples, |row, own, base| {
        figures.add(&format!("sandbox_{}_{}", word(row, "mode"), word(row, "size")), own / base);
    });
}

/// Calculates the fraction of its speed that fio loses in each mode, compared with the mode [`STATIC`]. Adds this fraction for
/// each size and number of uses of a buffer, as `slowdown_MODE_BUFFER_USES`.
fn slowdown(samples: &[&Sample], figures: &mut Figures) {
    let base = |row: &Row| is(row, "mode", STATIC);
    let own = |row: &Row| !base(row);
    let same = &["buffer", "uses"];
    Against { table: "pools", own: &own, base: &base, same, figure: use_us }.each(samples, |row, own, base| {
        let uses = row.key("uses").map(ToString::to_string).unwrap_or_default();
        figures.add(&format!("slowdown_{}_{}_{uses}", word(row, "mode"), word(row, "buffer")), 1.0 - base / own);
    });
}

/// Summary of a mode's rows in the table `density`, for one round.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Curve {
    /// Maximum number of guests that the host sustains.
    guests: f64,
    /// Maximum operations per second of all guests together, at any number of guests that the host sustains.
    iops: f64,
    /// Operations per second of each guest, at the smallest number of guests.
    slope: f64,
}

fn curve(rows: &[&Row]) -> Option<Curve> {
    let number = |row: &Row| row.key("guests")?.as_f64();
    let mut points: Vec<(f64, f64)> = rows
        .iter()
        .filter(|row| row.figures.get("fits") == Some(&1.0))
        .filter_map(|row| Some((number(row)?, iops(row)?)))
        .collect();
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (first, last) = (points.first()?, points.last()?);
    let iops = points.iter().map(|point| point.1).fold(0.0, f64::max);
    Some(Curve { guests: last.0, iops, slope: first.1 / first.0 })
}

fn density(samples: &[&Sample], figures: &mut Figures) {
    let all: Vec<(u32, &Row)> = rows(samples, "density").collect();
    let mut curves: BTreeMap<(u32, &str), Curve> = BTreeMap::new();
    for (round, mode) in all.iter().filter_map(|(round, row)| Some((*round, row.key("mode")?.as_str()?))) {
        let of_it: Vec<&Row> =
            all.iter().filter(|(its, row)| *its == round && is(row, "mode", mode)).map(|(_, row)| *row).collect();
        if let Some(curve) = curve(&of_it) {
            curves.insert((round, mode), curve);
        }
    }
    for ((round, mode), curve) in &curves {
        figures.add(&format!("density_guests_{mode}"), curve.guests);
        figures.add(&format!("density_iops_{mode}"), curve.iops);
        figures.add(&format!("density_slope_{mode}"), curve.slope);
        let Some(base) = curves.get(&(*round, STATIC)).filter(|_| *mode != STATIC) else { continue };
        if *mode == DENSEST {
            figures.add("density_ratio", curve.guests / base.guests);
            figures.add("density_iops_ratio", curve.iops / base.iops);
        }
        figures.add(&format!("density_ratio_{mode}"), curve.guests / base.guests);
    }
}

fn is_usual(row: &Row) -> bool {
    row.key("depth").is_some_and(|depth| *depth == 64) && row.key("jobs").is_some_and(|jobs| *jobs == 1)
}

fn is(row: &Row, key: &str, value: &str) -> bool {
    row.key(key).is_some_and(|own| *own == value)
}

fn word<'row>(row: &'row Row, key: &str) -> &'row str {
    row.key(key).and_then(|value| value.as_str()).unwrap_or_default()
}

fn iops(row: &Row) -> Option<f64> {
    positive(row, "iops")
}

fn use_us(row: &Row) -> Option<f64> {
    positive(row, "use_us")
}

fn positive(row: &Row, figure: &str) -> Option<f64> {
    row.figures.get(figure).copied().filter(|figure| *figure > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::{sample, sample_of};

    fn is_near(figure: f64, wanted: f64) -> bool {
        (figure - wanted).abs() < 1e-9
    }

    #[test]
    fn ratios_compare_rows_of_the_same_round() {
        let samples = [
            sample(0, "bounce", "4k", 900.0),
            sample(0, "no-viommu", "4k", 1000.0),
            sample(1, "bounce", "4k", 100.0),
            sample(1, "no-viommu", "4k", 200.0),
            sample(1, "bounce", "64k", 100.0),
        ];
        let summary = of(&samples.iter().collect::<Vec<_>>());
        assert_eq!(summary.medians.keys().collect::<Vec<_>>(), ["bounce_to_no_viommu_read_4k"]);
        let measured = &summary.measured["bounce_to_no_viommu_read_4k"];
        assert!(is_near(summary.medians["bounce_to_no_viommu_read_4k"], 0.7) && measured.rounds == 2, "{summary:?}");
        assert!(is_near(measured.spread.min, 0.5) && is_near(measured.spread.max, 0.9), "{measured:?}");
    }

    fn guests(mode: &str, guests: u32, iops: f64, fits: f64) -> Row {
        Row::new([("mode", mode.into()), ("guests", guests.into())], [("iops", iops), ("fits", fits)])
    }

    #[test]
    fn too_many_guests_are_not_counted() {
        let refused = Row::new([("mode", "no-viommu".into()), ("guests", 3.into())], [("refused", 1.0), ("fits", 0.0)]);
        let rows = vec![
            guests("no-viommu", 2, 40.0, 1.0),
            refused,
            guests("bounce-reporting", 2, 38.0, 1.0),
            guests("bounce-reporting", 6, 110.0, 1.0),
            guests("bounce-reporting", 8, 120.0, 0.0),
        ];
        let sample = sample_of("density", rows);
        let medians = of(&[&sample]).medians;
        assert!(is_near(medians["density_ratio"], 3.0) && is_near(medians["density_iops_ratio"], 2.75), "{medians:?}");
        assert!(is_near(medians["density_slope_no_viommu"], 20.0), "{medians:?}");
        assert!(is_near(medians["density_guests_bounce_reporting"], 6.0), "{medians:?}");
    }

    #[test]
    fn slowdown_is_the_lost_fraction_of_the_speed() {
        let row = |mode: &str, uses: u32, time: f64| {
            Row::new([("mode", mode.into()), ("buffer", "1M".into()), ("uses", uses.into())], [("use_us", time)])
        };
        let rows = vec![row("no-viommu", 100, 300.0), row("bounce", 100, 400.0), row("bounce", 1, 900.0)];
        let medians = of(&[&sample_of("pools", rows)]).medians;
        assert_eq!(medians.keys().collect::<Vec<_>>(), ["slowdown_bounce_1M_100"]);
        assert!(is_near(medians["slowdown_bounce_1M_100"], 0.25), "{medians:?}");
    }

    #[test]
    fn ratio_to_the_base_uses_the_same_mode_and_round() {
        let row = |mode: &str, iops: f64| {
            let of = [("mode", mode.into()), ("pattern", "read".into()), ("size", "4k".into()), ("depth", 1.into())];
            Row::new(of, [("iops", iops)])
        };
        let rows = vec![row("strict", 90.0), row("strict-base-vmm", 100.0), row("bounce", 5.0)];
        let medians = of(&[&sample_of("disk", rows)]).medians;
        assert_eq!(medians.keys().collect::<Vec<_>>(), ["base_disk_strict_read_4k_1_iops"]);
        assert!(is_near(medians["base_disk_strict_read_4k_1_iops"], 0.9), "{medians:?}");
        let vmm = |vmm: &str, ms: f64| Row::new([("vmm", vmm.into())], [("api_ready_ms", ms)]);
        let medians = of(&[&sample_of("vmm", vec![vmm("base", 4.0), vmm("carom", 5.0), vmm("qemu", 1.0)])]).medians;
        assert_eq!(medians.keys().collect::<Vec<_>>(), ["base_vmm_carom_api_ready_ms"]);
        assert!(is_near(medians["base_vmm_carom_api_ready_ms"], 1.25), "{medians:?}");
    }

    #[test]
    fn ratio_of_two_jobs_to_one_uses_the_same_mode_and_size() {
        let row = |drive: &str, jobs: u8, iops: f64| {
            let of = [("mode", "bounce".into()), ("pattern", "read".into()), ("size", "4k".into())];
            let mut row = Row::new(of, [("iops", iops)]);
            row.of.extend([("jobs".into(), jobs.into()), ("drive".into(), drive.into())]);
            row
        };
        let rows = vec![row("real", 1, 100.0), row("null", 1, 300.0), row("real", 2, 190.0)];
        let medians = of(&[&sample_of("scaling", rows)]).medians;
        assert_eq!(medians.keys().collect::<Vec<_>>(), ["scaling_bounce_read_4k_real"]);
        assert!(is_near(medians["scaling_bounce_read_4k_real"], 1.9), "{medians:?}");
    }

    #[test]
    fn returned_memory_is_a_fraction_of_one() {
        let sample = sample_of("pinning", vec![Row::new([("mode", "m".into())], [("returned_percent", 95.0)])]);
        assert!(is_near(of(&[&sample]).medians["free_page_reporting_returned"], 0.95));
    }
}
