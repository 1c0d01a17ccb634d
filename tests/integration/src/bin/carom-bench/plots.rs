// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Plots of the results, as SVG.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::results::{Merged, Results};

/// Width and height, in pixels.
const SIZE: (u32, u32) = (860, 480);

/// Colours that stay apart for most eyes (Okabe and Ito), and on paper.
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

/// Block sizes in the order of the axis.
const SIZES: [&str; 6] = ["4k", "16k", "64k", "128k", "256k", "1M"];

/// A mode's operations a second: of each size its place on the axis, the median, the least and the most.
struct Line<'a> {
    mode: &'a str,
    points: Vec<(f64, f64, f64, f64)>,
}

/// Writes a plot of operations a second by size to `dir` for each pattern that was measured at two sizes or more, at depth 64 with one
/// job. That without an IOMMU is the limit.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn write(results: &Results, dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let rows: &[Merged] = results.tables.get("throughput").map_or(&[], Vec::as_slice);
    let rows: Vec<&Merged> = rows.iter().filter(|row| row.fields["depth"] == 64 && row.fields["jobs"] == 1).collect();
    let mut patterns: Vec<&str> = Vec::new();
    for pattern in rows.iter().filter_map(|row| row.fields["pattern"].as_str()) {
        if !patterns.contains(&pattern) {
            patterns.push(pattern);
        }
    }
    for pattern in patterns {
        let of_it: Vec<&Merged> = rows.iter().copied().filter(|row| row.fields["pattern"] == pattern).collect();
        let sizes: Vec<&str> =
            SIZES.into_iter().filter(|size| of_it.iter().any(|row| row.fields["size"] == *size)).collect();
        if sizes.len() > 1 {
            let file = dir.join(format!("throughput-{pattern}.svg"));
            let title = format!("{pattern}: operations a second, depth 64");
            draw(&file, &title, &sizes, &lines(&of_it, &sizes))
                .map_err(|error| anyhow!("{error}"))
                .with_context(|| format!("writing {}", file.display()))?;
        }
    }
    Ok(())
}

fn lines<'a>(rows: &[&'a Merged], sizes: &[&str]) -> Vec<Line<'a>> {
    let mut lines: Vec<Line<'a>> = Vec::new();
    for row in rows {
        let (Some(mode), Some(iops)) = (row.fields["mode"].as_str(), row.fields["iops"].as_f64()) else { continue };
        let Some(at) = sizes.iter().position(|size| row.fields["size"] == *size) else { continue };
        let spread = row.spread["iops"];
        #[expect(clippy::cast_precision_loss, reason = "sizes are few")]
        let point = (at as f64, iops, spread.min, spread.max);
        match lines.iter_mut().find(|line| line.mode == mode) {
            Some(line) => line.points.push(point),
            None => lines.push(Line { mode, points: vec![point] }),
        }
    }
    lines.iter_mut().for_each(|line| line.points.sort_by(|one, other| one.0.total_cmp(&other.0)));
    lines
}

fn draw(file: &Path, title: &str, sizes: &[&str], lines: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let top = lines.iter().flat_map(|line| &line.points).map(|point| point.3).fold(1.0, f64::max) * 1.05;
    #[expect(clippy::cast_precision_loss, reason = "sizes are few")]
    let last = (sizes.len() - 1) as f64;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(10)
        .y_label_area_size(60)
        // Room for the names beside the lines' ends.
        .build_cartesian_2d(-0.1..last + last * 0.25, 0.0..top)?;
    // The axis has names, which stand below.
    chart.configure_mesh().disable_x_mesh().x_labels(0).y_label_formatter(&|iops| format!("{iops:.0}")).draw()?;
    let label = |colour: RGBColor| ("sans-serif", 14).into_font().color(&colour);
    for (at, size) in sizes.iter().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "sizes are few")]
        let place = (at as f64, top * 0.015);
        let style = label(BLACK).pos(Pos::new(HPos::Center, VPos::Bottom));
        chart.draw_series([Text::new((*size).to_owned(), place, style)])?;
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

/// The names of the lines with the places beside their ends, far enough apart to be read.
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
    use crate::sample::tests::sample;

    #[test]
    fn plot_has_each_mode_and_size_and_there_is_none_of_a_single_size() {
        let dir = tempfile::tempdir().unwrap();
        let mut samples = vec![sample(0, "strict", "4k", 300.0), sample(0, "no-viommu", "4k", 1000.0)];
        write(&results(&samples), dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

        samples.extend([sample(0, "strict", "128k", 100.0), sample(0, "no-viommu", "128k", 900.0)]);
        write(&results(&samples), dir.path()).unwrap();

        let svg = fs::read_to_string(dir.path().join("throughput-read.svg")).unwrap();
        for word in ["strict", "no-viommu", "4k", "128k", "read: operations a second"] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    }

    #[test]
    fn names_of_lines_that_end_together_are_apart() {
        let line = |mode, end| Line { mode, points: vec![(0.0, 1.0, 1.0, 1.0), (1.0, end, end, end)] };
        let names = names(&[line("a", 50.0), line("b", 51.0), line("c", 90.0)], 100.0);
        let heights: Vec<f64> = names.iter().map(|name| name.2).collect();
        assert_eq!(heights, [50.0, 54.0, 90.0]);
    }
}
