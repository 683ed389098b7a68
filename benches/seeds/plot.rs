//! Plots as SVG files, each with its legend.

use std::error::Error;

use harness::{Plot, Series};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const SIZE: (u32, u32) = (800, 360);
/// With more places than this their names stand upright, and the plot is larger.
const MOST_ACROSS: usize = 12;
const LARGE: (u32, u32) = (1200, 520);
/// Above the plot, for a line of the legend.
const LEGEND: u32 = 22;
/// Below the plot, for the names of the places.
const BELOW: u32 = 28;
const BELOW_UPRIGHT: u32 = 160;
/// Beside it, for numbers.
const BESIDE: u32 = 72;
/// Of what was measured, in order. What was published has the colour of its partner, lighter.
const COLORS: [RGBColor; 4] =
    [RGBColor(42, 120, 214), RGBColor(214, 106, 31), RGBColor(46, 145, 92), RGBColor(160, 84, 190)];
/// More figures than this are not written beside their bars.
const MOST_FIGURES: usize = 20;
/// The part of a place that its bars take.
const BARS: f64 = 0.8;

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// How a series of a plot is drawn.
pub(crate) fn color(plot: &Plot, at: usize) -> RGBAColor {
    let published = plot.series[at].published;
    let before = plot.series[..at].iter().filter(|series| series.published == published).count();
    COLORS[before % COLORS.len()].mix(if published { 0.45 } else { 1.0 })
}

/// Draws a plot. Fails if nothing was measured.
pub(crate) fn svg(plot: &Plot) -> Result<String, Box<dyn Error>> {
    let scale = Scale::of(plot).ok_or("nothing was measured")?;
    let upright = plot.places.len() > MOST_ACROSS;
    let (size, below) = if upright { (LARGE, BELOW_UPRIGHT) } else { (SIZE, BELOW) };
    let mut text = String::new();
    {
        let size = (size.0, size.1 + LEGEND * plot.series.len() as u32);
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        area.fill(&WHITE)?;
        let (legend, area) = area.split_vertically(LEGEND * plot.series.len() as u32);
        for (at, series) in plot.series.iter().enumerate() {
            let y = 8 + (LEGEND * at as u32) as i32;
            legend.draw(&Rectangle::new([(20, y), (34, y + 10)], color(plot, at).filled()))?;
            legend.draw_text(
                &series.name,
                &TextStyle::from(("sans-serif", 14)).color(&BLACK),
                (42, y - 2),
            )?;
        }
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .x_label_area_size(below)
            .y_label_area_size(BESIDE)
            .build_cartesian_2d(0.0..plot.places.len() as f64, scale.bottom..scale.top)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(0)
            .y_labels(scale.labels)
            .y_label_formatter(&|at| figure(scale.value(*at)))
            .y_label_style(("sans-serif", 14))
            .y_desc(plot.unit.as_str())
            .axis_desc_style(("sans-serif", 14))
            .axis_style(BLACK)
            .bold_line_style(BLACK.mix(0.15))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let font = FontDesc::from(("sans-serif", 14));
        let (font, anchor) = if upright {
            (font.transform(FontTransform::Rotate90), Pos::new(HPos::Left, VPos::Center))
        } else {
            (font, Pos::new(HPos::Center, VPos::Top))
        };
        let name = TextStyle::from(font).color(&BLACK).pos(anchor);
        for (at, place) in plot.places.iter().enumerate() {
            let (x, y) = chart.backend_coord(&(at as f64 + 0.5, scale.bottom));
            area.draw_text(place, &name, (x, y + 8))?;
        }
        if plot.lines {
            lines(&mut chart, plot, scale)?;
        } else {
            bars(&mut chart, plot, scale)?;
        }
        area.present()?;
    }
    Ok(text)
}

/// Where values lie on the axis: as they are, or by their logarithms.
#[derive(Clone, Copy)]
struct Scale {
    logarithmic: bool,
    bottom: f64,
    top: f64,
    labels: usize,
}

impl Scale {
    fn of(plot: &Plot) -> Option<Self> {
        let logarithmic = plot.logarithmic;
        let values = plot.series.iter().flat_map(|series| series.values.iter().flatten());
        let values = values.copied().filter(|value| !logarithmic || *value > 0.0);
        let values: Vec<f64> = values.collect();
        let most = values.iter().copied().reduce(f64::max)?;
        if !logarithmic {
            let top = if most > 0.0 { most * 1.12 } else { 1.0 };
            return Some(Self { logarithmic, bottom: 0.0, top, labels: 6 });
        }
        let least = values.iter().copied().fold(most, f64::min);
        let (bottom, top) = (least.log10().floor(), (most * 2.0).log10().ceil());
        Some(Self { logarithmic, bottom, top, labels: (top - bottom) as usize + 1 })
    }

    fn at(self, value: f64) -> f64 {
        if self.logarithmic { value.log10().max(self.bottom) } else { value }
    }

    fn value(self, at: f64) -> f64 {
        if self.logarithmic { 10_f64.powf(at) } else { at }
    }
}

/// A number as short as it is clear.
fn figure(value: f64) -> String {
    match value.abs() {
        1e6.. => format!("{:.1} M", value / 1e6),
        1e4.. => format!("{:.0} k", value / 1e3),
        whole if whole.fract() < 1e-9 => format!("{value:.0}"),
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn points(series: &Series, scale: Scale) -> impl Iterator<Item = (f64, f64)> {
    let values = series.values.iter().enumerate();
    values.filter_map(move |(at, value)| Some((at as f64 + 0.5, scale.at((*value)?))))
}

fn lines(chart: &mut Chart<'_>, plot: &Plot, scale: Scale) -> Result<(), Box<dyn Error>> {
    for (at, series) in plot.series.iter().enumerate() {
        let style = color(plot, at).stroke_width(if series.published { 5 } else { 2 });
        chart.draw_series(LineSeries::new(points(series, scale), style))?;
        if !series.published {
            let dot = |point| Circle::new(point, 4, color(plot, at).filled());
            chart.draw_series(points(series, scale).map(dot))?;
        }
    }
    Ok(())
}

fn bars(chart: &mut Chart<'_>, plot: &Plot, scale: Scale) -> Result<(), Box<dyn Error>> {
    let values = |series: &Series| series.values.iter().flatten().count();
    let figures = plot.series.iter().map(values).sum::<usize>() <= MOST_FIGURES;
    let above = Pos::new(HPos::Center, VPos::Bottom);
    let style = TextStyle::from(("sans-serif", 12)).color(&BLACK).pos(above);
    for place in 0..plot.places.len() {
        // Those that have something here share the place.
        let value = |series: &Series| series.values.get(place).copied().flatten();
        let here: Vec<usize> =
            (0..plot.series.len()).filter(|at| value(&plot.series[*at]).is_some()).collect();
        let width = BARS / here.len().max(1) as f64;
        for (turn, &at) in here.iter().enumerate() {
            let Some(value) = value(&plot.series[at]) else { continue };
            let left = place as f64 + (1.0 - BARS) / 2.0 + turn as f64 * width;
            let (from, to) = ((left, scale.bottom), (left + 0.95 * width, scale.at(value)));
            chart.draw_series([Rectangle::new([from, to], color(plot, at).filled())])?;
            if figures {
                let top = (left + width / 2.0, to.1);
                chart.draw_series([Text::new(figure(value), top, style.clone())])?;
            }
        }
    }
    Ok(())
}
