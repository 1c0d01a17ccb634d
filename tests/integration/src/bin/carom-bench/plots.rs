// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plots of the results, as SVG.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde_json::Value;

use crate::results::{Merged, Results};

/// Width and height, in pixels.
const SIZE: (u32, u32) = (860, 480);

/// Colours by Okabe and Ito, which most people can distinguish, also in print.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 0, 0),
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
];

/// Block sizes in ascending order. The sizes in the results are texts, so they cannot be sorted by value.
const SIZES: [&str; 6] = ["4k", "16k", "64k", "128k", "256k", "1M"];

/// Plot of one figure of a table. The values of a key are on the horizontal axis, and each mode has a line.
struct Plot<'a> {
    /// File name without its extension.
    name: String,
    title: String,
    /// Rows of the table.
    rows: Vec<&'a Merged>,
    /// Key whose values are on the horizontal axis.
    along: &'static str,
    figure: &'static str,
}

/// Line of a mode in a plot. Each point has four numbers: its place on the axis, and the figure's median, minimum and maximum.
struct Line<'a> {
    mode: &'a str,
    points: Vec<(f64, f64, f64, f64)>,
}

/// Writes plots to `dir`. Leaves out a plot if its figure was measured for only one value on the horizontal axis.
///
/// # Errors
/// Fails if a file cannot be written.
pub(crate) fn write(results: &Results, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    for plot in plots(results) {
        let axis = plot.axis();
        if axis.len() > 1 {
            let file = dir.join(format!("{}.svg", plot.name));
            let labels: Vec<String> = axis.iter().map(|value| word(value)).collect();
            draw(&file, &plot.title, &labels, &plot.lines(&axis))
                .map_err(|error| anyhow!("{error}"))
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    Ok(())
}

/// Returns all possible plots of all tables.
fn plots(results: &Results) -> Vec<Plot<'_>> {
    let mut plots = Vec::new();
    let usual = of(results, "throughput", |row| row.fields["depth"] == 64 && row.fields["jobs"] == 1);
    for (pattern, rows) in by(&usual, "pattern") {
        for (figure, file, what) in [
            ("iops", "throughput", "operations per second, depth 64"),
            ("latency_p99_us", "latency", "99th percentile of the latency, µs, depth 64"),
        ] {
            let (name, title) = (format!("{file}-{pattern}"), format!("{pattern}: {what}"));
            plots.push(Plot { name, title, rows: rows.clone(), along: "size", figure });
        }
    }
    let mapped = of(results, "map_time", |row| row.fields["size"] == "4k" && row.fields["direction"] == "from-device");
    let title = "mapping 4 KiB from the device, µs, by threads".into();
    plots.push(Plot { name: "map-threads".into(), title, rows: mapped, along: "threads", figure: "map_us" });
    let fits = of(results, "density", |row| row.fields.get("fits").and_then(Value::as_f64) == Some(1.0));
    let title = "operations per second of all guests, by number of guests".into();
    plots.push(Plot { name: "density".into(), title, rows: fits, along: "guests", figure: "iops" });
    for (ram, title, figure) in [
        ("pinned", "pinned memory, MiB, by GiB of RAM", "pinned_mib"),
        ("start", "start to the first program, ms, by GiB of RAM", "start_ms"),
    ] {
        let rows = of(results, "pinning", |_| true);
        plots.push(Plot { name: ram.into(), title: title.into(), rows, along: "ram_gib", figure });
    }
    let used = of(results, "pools", |row| row.fields.contains_key("uses"));
    for (buffer, rows) in by(&used, "buffer") {
        let (name, title) = (format!("uses-{buffer}"), format!("time of one use of a buffer of {buffer}, µs, by uses"));
        plots.push(Plot { name, title, rows, along: "uses", figure: "use_us" });
    }
    plots
}

/// Returns the rows of a table for which `wanted` is true.
fn of<'a>(results: &'a Results, table: &str, wanted: impl Fn(&Merged) -> bool) -> Vec<&'a Merged> {
    results.tables.get(table).into_iter().flatten().filter(|row| wanted(row)).collect()
}

/// Groups rows by the value of a key, in order of the first occurrence.
fn by<'a>(rows: &[&'a Merged], key: &str) -> Vec<(&'a str, Vec<&'a Merged>)> {
    let mut groups: Vec<(&str, Vec<&Merged>)> = Vec::new();
    for &row in rows {
        let Some(value) = row.fields[key].as_str() else { continue };
        match groups.iter_mut().find(|(known, _)| *known == value) {
            Some((_, group)) => group.push(row),
            None => groups.push((value, vec![row])),
        }
    }
    groups
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl<'a> Plot<'a> {
    /// Returns the values on the horizontal axis, in ascending order.
    fn axis(&self) -> Vec<&'a Value> {
        let mut values: Vec<&Value> = Vec::new();
        for value in
            self.rows.iter().filter(|row| row.spread.contains_key(self.figure)).map(|row| &row.fields[self.along])
        {
            if !values.contains(&value) {
                values.push(value);
            }
        }
        let place = |value: &Value| SIZES.iter().position(|size| value == size);
        values.sort_by(|one, other| {
            let numbers = (one.as_f64().unwrap_or_default(), other.as_f64().unwrap_or_default());
            place(one).cmp(&place(other)).then(numbers.0.total_cmp(&numbers.1))
        });
        values
    }

    fn lines(&self, axis: &[&Value]) -> Vec<Line<'a>> {
        let mut lines: Vec<Line<'a>> = Vec::new();
        for row in &self.rows {
            let (Some(mode), Some(median)) = (row.fields["mode"].as_str(), row.fields.get(self.figure)) else {
                continue;
            };
            let (Some(median), Some(spread)) = (median.as_f64(), row.spread.get(self.figure)) else { continue };
            let Some(at) = axis.iter().position(|value| **value == row.fields[self.along]) else { continue };
            #[expect(clippy::cast_precision_loss, reason = "values are few")]
            let point = (at as f64, median, spread.min, spread.max);
            match lines.iter_mut().find(|line| line.mode == mode) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { mode, points: vec![point] }),
            }
        }
        lines.iter_mut().for_each(|line| line.points.sort_by(|one, other| one.0.total_cmp(&other.0)));
        lines
    }
}

fn draw(file: &Path, title: &str, axis: &[String], lines: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let top = lines.iter().flat_map(|line| &line.points).map(|point| point.3).fold(1.0, f64::max) * 1.05;
    #[expect(clippy::cast_precision_loss, reason = "values are few")]
    let last = (axis.len() - 1) as f64;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(10)
        .y_label_area_size(60)
        // The axis extends beyond the last value, to leave space for the names at the ends of the lines.
        .build_cartesian_2d(-0.1..last + last * 0.25, -0.06 * top..top)?;
    // The library would label the horizontal axis with numbers, so these labels are disabled. Text labels are drawn below 0
    // instead.
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh().x_labels(0).max_light_lines(0).y_label_formatter(&|figure| format!("{figure:.0}")).draw()?;
    let label = |colour: RGBColor| ("sans-serif", 14).into_font().color(&colour);
    for (at, value) in axis.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "values are few")]
        let place = (at as f64, -0.05 * top);
        let style = label(BLACK).pos(Pos::new(HPos::Center, VPos::Bottom));
        chart.draw_series([Text::new(value.clone(), place, style)])?;
    }
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        let medians = line.points.iter().map(|(at, median, ..)| (*at, *median));
        let width = if line.mode == "no-viommu" { 1 } else { 2 };
        chart.draw_series(LineSeries::new(medians.clone(), colour.stroke_width(width)))?;
        chart.draw_series(medians.map(|point| Circle::new(point, 3, colour.filled())))?;
        let apart = line.points.iter().filter(|(_, _, least, most)| least < most);
        chart.draw_series(
            apart.map(|(at, _, least, most)| PathElement::new([(*at, *least), (*at, *most)], colour.stroke_width(1))),
        )?;
    }
    chart.draw_series(names(lines, top).into_iter().map(|(mode, at, height, colour)| {
        Text::new(mode, (at, height), label(colour).pos(Pos::new(HPos::Left, VPos::Center)))
    }))?;
    root.present()?;
    Ok(())
}

/// Returns the names of the lines and their places: at the ends of the lines, but far enough apart to be readable.
fn names(lines: &[Line], top: f64) -> Vec<(String, f64, f64, RGBColor)> {
    let ends = lines.iter().zip(COLOURS.iter().cycle()).filter_map(|(line, colour)| {
        let (at, median, ..) = line.points.last()?;
        Some((line.mode.to_owned(), at + 0.03, *median, *colour))
    });
    let mut names: Vec<_> = ends.collect();
    names.sort_by(|one, other| one.2.total_cmp(&other.2));
    let mut least = top * 0.03;
    for name in &mut names {
        name.2 = name.2.max(least);
        least = name.2 + top * 0.04;
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::results;
    use crate::sample::tests::{sample, sample_of};
    use crate::table::Row;

    #[test]
    fn plot_shows_each_mode_and_size_and_needs_two_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let mut samples = vec![sample(0, "strict", "4k", 300.0), sample(0, "no-viommu", "4k", 1000.0)];
        write(&results(&samples), dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

        samples.extend([sample(0, "strict", "128k", 100.0), sample(0, "no-viommu", "128k", 900.0)]);
        write(&results(&samples), dir.path()).unwrap();

        let svg = fs::read_to_string(dir.path().join("throughput-read.svg")).unwrap();
        for word in ["strict", "no-viommu", "4k", "128k", "read: operations per second"] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    }

    #[test]
    fn axis_sorts_numerically_and_rows_without_figure_are_omitted() {
        let row = |mode: &str, guests: u32, figures: &[(&str, f64)]| {
            let mut row = Row::new([("mode", mode.into()), ("guests", guests.into())], [("fits", 1.0)]);
            row.figures.extend(figures.iter().map(|(key, figure)| ((*key).to_owned(), *figure)));
            row
        };
        let iops = |guests: u32| row("bounce", guests, &[("iops", 20.0 * f64::from(guests))]);
        let rows = vec![iops(10), iops(2), row("strict", 3, &[])];
        let results = results(&[sample_of("density", rows)]);
        let plots = plots(&results);
        let plot = plots.iter().find(|plot| plot.name == "density").unwrap();
        let axis = plot.axis();
        assert_eq!(axis, [&Value::from(2), &Value::from(10)]);
        let lines = plot.lines(&axis);
        assert_eq!(
            (lines.len(), &lines[0].points[..]),
            (1, &[(0.0, 40.0, 40.0, 40.0), (1.0, 200.0, 200.0, 200.0)][..])
        );
    }

    #[test]
    fn names_of_lines_with_close_ends_do_not_overlap() {
        let line = |mode, end| Line { mode, points: vec![(0.0, 1.0, 1.0, 1.0), (1.0, end, end, end)] };
        let names = names(&[line("a", 50.0), line("b", 51.0), line("c", 90.0)], 100.0);
        let heights: Vec<f64> = names.iter().map(|name| name.2).collect();
        assert_eq!(heights, [50.0, 54.0, 90.0]);
    }
}
