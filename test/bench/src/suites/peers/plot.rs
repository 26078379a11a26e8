//! Every back end's own values, case by case. Each case has its own scale.

use crate::harness::results::{Measured, Results, Row};
use crate::harness::stats::Better;
use crate::harness::svg::{Canvas, WIDTH};
use crate::harness::table::quantity;

const TOP: f64 = 60.0;
const CASE_HEAD: f64 = 24.0;
const BAR: f64 = 18.0;
const GAP: f64 = 12.0;
const LEFT: f64 = 140.0;
const RIGHT: f64 = 150.0;

/// Bars of the medians, ours first, then the peers in their order.
pub fn values(results: &Results) -> String {
    let cases: Vec<&[Row]> = results.rows.chunk_by(|a, b| a.case == b.case).collect();
    let height_of = |rows: &[Row]| CASE_HEAD + (rows.len() + 1) as f64 * BAR + GAP;
    let height = TOP + cases.iter().map(|c| height_of(c)).sum::<f64>();
    let mut canvas = Canvas::titled(
        "Every back end under the same front end",
        "medians over the rounds; each case has its own scale",
    );
    let mut top = TOP;
    for rows in cases {
        draw(&mut canvas, rows, top);
        top += height_of(rows);
    }
    canvas.finish(height, "Values of Millrace and of each peer for each case")
}

fn draw(canvas: &mut Canvas, rows: &[Row], top: f64) {
    let Some(first) = rows.first() else { return };
    let good = if first.better == Better::Higher { "longer" } else { "shorter" };
    let title = format!("{} ({good} is better)", first.case);
    canvas.text(16.0, top + 14.0, "mr-text mr-strong", &title);
    let all = std::iter::once(&first.ours).chain(rows.iter().map(|r| &r.peer));
    let all: Vec<&Measured> = all.collect();
    let most = all.iter().map(|m| m.value).fold(f64::MIN_POSITIVE, f64::max);
    for (i, m) in all.iter().enumerate() {
        let y = top + CASE_HEAD + i as f64 * BAR;
        let class = if i == 0 { "mr-good" } else { "mr-peer" };
        let width = m.value / most * (WIDTH - LEFT - RIGHT);
        canvas.text(LEFT - 10.0, y + 12.0, "mr-small mr-end", &m.name);
        canvas.bar((LEFT, y), (width, BAR - 4.0), class);
        canvas.text(LEFT + width + 6.0, y + 11.0, "mr-small", &quantity(m.value, &m.unit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;

    #[test]
    fn the_largest_value_fills_the_width_and_we_are_once_in_each_case() {
        let mut r = samples::results();
        r.rows.truncate(2);
        r.rows[1].case = r.rows[0].case.clone();
        r.rows[1].better = Better::Lower;
        let svg = values(&r);
        assert_eq!(svg.matches("mr-good\"/>").count(), 1);
        assert_eq!(svg.matches("mr-peer\"/>").count(), 2);
        assert!(svg.contains("width=\"570.0\""), "2,990 is the largest: {svg}");
        assert!(svg.contains("tcp_rr (longer is better)"));
    }

    #[test]
    fn an_empty_run_still_draws() {
        let mut r = samples::results();
        r.rows.clear();
        assert!(values(&r).ends_with("</svg>\n"));
    }
}
