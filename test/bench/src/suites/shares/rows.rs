//! Rows in the published format: medians over the rounds.

use crate::harness::results::{Measured, Row};
use crate::harness::stats::{significant, spread};

use super::Round;
use super::case::Case;

/// Significant digits in result files.
const DIGITS: i32 = 5;

/// A row for each finding that any counted round has.
pub fn rows(cases: &[Case], rounds: &[Round]) -> Vec<Row> {
    let counted = || rounds.iter().filter(|r| r.round > 0).flat_map(|r| &r.findings);
    let mut out = Vec::new();
    for case in cases {
        let name = case.name();
        let mut names: Vec<&str> = Vec::new();
        // A case's rows are its name with a suffix; no name is the beginning of another's.
        for f in counted().filter(|f| f.row.starts_with(&name)) {
            if !names.contains(&f.row.as_str()) {
                names.push(&f.row);
            }
        }
        out.extend(names.into_iter().filter_map(|n| row(case, n, rounds)));
    }
    out
}

fn row(case: &Case, name: &str, rounds: &[Round]) -> Option<Row> {
    let found: Vec<_> = rounds
        .iter()
        .filter(|r| r.round > 0)
        .filter_map(|r| r.findings.iter().find(|f| f.row == name))
        .collect();
    let question = case.question();
    let of = |f: &dyn Fn(&super::Finding) -> f64| {
        spread(&found.iter().map(|x| f(x)).collect::<Vec<_>>())
    };
    let digits = |v: f64| significant(v, DIGITS);
    let side = |name: &str, value: f64| Measured {
        name: name.into(),
        value: digits(value),
        unit: question.unit.into(),
    };
    let ratio = of(&|f| f.ratio)?;
    Some(Row {
        case: name.into(),
        ours: side("millrace", of(&|f| f.value)?.median),
        peer: side(question.due, of(&|f| f.due)?.median),
        better: question.better,
        ratio: digits(ratio.median),
        ratio_min: digits(ratio.min),
        ratio_max: digits(ratio.max),
        ratio_interval: None,
        rounds: found.len() as u32,
        host_cpu_us_per_op: None,
        target: Some(question.target),
        aim: None,
        front: None,
        mode: Some(question.how.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::results::Results;
    use crate::harness::{report, samples, svg};
    use crate::suites::shares::{Finding, case};

    #[test]
    fn medians_of_counted_rounds_only() {
        let finding = |row: &str, ratio| Finding { row: row.into(), value: 10.0, due: 5.0, ratio };
        let round = |round, ratio| Round {
            round,
            findings: vec![finding("ceiling_bytes", ratio), finding("floor", 2.0)],
            disturbed: Vec::new(),
            traces: Vec::new(),
        };
        let rounds = [round(0, 9.0), round(1, 0.9), round(2, 0.99), round(3, 1.0)];
        let rows = rows(&case::all(), &rounds);
        let told: Vec<_> = rows.iter().map(|r| (r.case.as_str(), r.ratio, r.rounds)).collect();
        assert_eq!(told, [("ceiling_bytes", 0.99, 3), ("floor", 2.0, 3)]);
        assert_eq!((rows[0].ratio_min, rows[0].missed()), (0.9, false));
    }

    #[test]
    fn a_weight_within_its_floor_is_no_loss_in_table_and_plot() {
        let shown = |ratio| {
            let row = "weights_net_1".into();
            let findings = vec![Finding { row, value: 14.0, due: 14.3, ratio }];
            let (disturbed, traces) = Default::default();
            let round = Round { round: 1, findings, disturbed, traces };
            let rows = rows(&case::all(), &[round]);
            let results = Results { rows, ..samples::results() };
            report::table(&results) + &svg::ratios(&results)
        };
        let (met, missed) = (shown(0.98), shown(0.94));
        assert!(met.contains("class=\"n good\"") && met.contains("class=\"mr-good\""), "{met}");
        assert!(met.contains("floor reached"), "{met}");
        assert!(missed.contains("class=\"n bad\"") && missed.contains("class=\"mr-bad\""));
        assert!(missed.contains("below floor"), "{missed}");
    }

    #[test]
    fn no_case_takes_anothers_rows() {
        let names: Vec<String> = case::all().iter().map(Case::name).collect();
        for a in &names {
            assert_eq!(names.iter().filter(|b| b.starts_with(a.as_str())).count(), 1, "{a}");
        }
    }
}
