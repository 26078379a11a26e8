//! Shares over time: one panel for each load, a line for each VM, and what is due to it.

use crate::harness::svg::{Canvas, WIDTH};

use super::Trace;

const TOP: f64 = 60.0;
const PANEL: f64 = 130.0;
const HEAD: f64 = 24.0;
const GAP: f64 = 26.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 110.0;

/// All panels.
pub fn shares(traces: &[Trace]) -> String {
    let height = TOP + traces.len() as f64 * (HEAD + PANEL + GAP);
    let mut canvas = Canvas::titled(
        "Shares of one sidecore over time",
        "last round; thin lines: what is due to each VM",
    );
    for (i, trace) in traces.iter().enumerate() {
        panel(&mut canvas, trace, TOP + i as f64 * (HEAD + PANEL + GAP));
    }
    canvas.finish(height, "Share of each VM over time")
}

fn panel(canvas: &mut Canvas, trace: &Trace, top: f64) {
    let (begin, bottom) = (top + HEAD, top + HEAD + PANEL);
    let steps = trace.vms.iter().map(|v| v.2.len()).max().unwrap_or(0).max(1);
    let right = WIDTH - RIGHT;
    let x = |step: f64| LEFT + step / steps as f64 * (right - LEFT);
    let y = |share: f64| bottom - share.clamp(0.0, 1.0) * (bottom - begin);
    canvas.text(16.0, top + 14.0, "mr-text mr-strong", &trace.case);
    for share in [0.0, 0.5, 1.0] {
        canvas.line((LEFT, y(share)), (right, y(share)), "mr-grid");
        let label = format!("{:.0} %", share * 100.0);
        canvas.text(LEFT - 8.0, y(share) + 4.0, "mr-small mr-end", &label);
    }
    let end = format!("{:.1} s", steps as f64 * trace.step_ms as f64 / 1e3);
    canvas.text(right, bottom + 16.0, "mr-small mr-end", &end);
    for (i, (name, due, shares)) in trace.vms.iter().enumerate() {
        canvas.line((LEFT, y(*due)), (right, y(*due)), "mr-grid");
        let points: Vec<_> =
            shares.iter().enumerate().map(|(k, s)| (x(k as f64 + 0.5), y(*s))).collect();
        canvas.path(&points, i);
        let last = shares.last().copied().unwrap_or_default();
        let label = format!("{name}: {:.0} % due", due * 100.0);
        // Two with the same share would write over each other.
        canvas.text(right + 8.0, y(last) + 4.0 + 6.0 * i as f64, "mr-small", &label);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vm_has_its_line() {
        let vms = vec![("v0".into(), 0.25, vec![0.0, 1.0]), ("v1".into(), 0.75, vec![1.0, 0.0])];
        let svg = shares(&[Trace { case: "weights_<net>".into(), step_ms: 20, vms }]);
        // 690 points for two steps, so that their middles are at 60 + 172.5 and 60 + 517.5.
        assert!(
            svg.contains("<polyline points=\"232.5,214.0 577.5,84.0\" class=\"mr-s0\"/>"),
            "{svg}"
        );
        assert!(svg.contains("mr-s1") && svg.contains("weights_&lt;net&gt;"), "{svg}");
        assert!(shares(&[]).ends_with("</svg>\n"));
    }
}
