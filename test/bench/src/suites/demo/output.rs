//! Files of a demo run.

use std::path::{Path, PathBuf};

use crate::harness::error::BenchError;
use crate::harness::report::{self, Context};
use crate::harness::results::{Machine, Results, write_json};
use crate::harness::runner::Outcome;
use crate::harness::svg;

/// Writes `demo.json` (the published format), `demo-rounds.json` (every round), two plots and
/// `report.html` into `folder`, making it if needed. Returns the results and what was written.
pub fn write_all(
    folder: &Path,
    machine: Machine,
    commit: String,
    outcome: &Outcome,
    context: &Context,
) -> Result<(Results, Vec<PathBuf>), BenchError> {
    std::fs::create_dir_all(folder).map_err(|e| BenchError::file("make folder", folder, e))?;
    let results = Results { machine, commit, rows: outcome.rows.clone(), missing: Vec::new() };
    let mut written = Vec::new();
    let mut path = |name: &str| {
        written.push(folder.join(name));
        folder.join(name)
    };
    results.write(&path("demo.json"))?;
    write_json(&outcome.rounds, &path("demo-rounds.json"))?;
    for (name, text) in [
        ("demo-ratios.svg", svg::ratios(&results)),
        ("demo-cpu.svg", svg::cpu(&results)),
        ("report.html", report::html(&results, outcome, context)),
    ] {
        let path = path(name);
        std::fs::write(&path, text).map_err(|e| BenchError::file("write", &path, e))?;
    }
    Ok((results, written))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;

    #[test]
    fn a_run_leaves_five_files() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("deep/out");
        let sample = samples::results();
        let outcome = Outcome { rows: sample.rows.clone(), rounds: Vec::new() };
        let context = Context::default();
        let written =
            write_all(&folder, sample.machine.clone(), sample.commit.clone(), &outcome, &context);
        let (results, written) = written.unwrap();
        assert_eq!(results, sample);
        assert_eq!(Results::read(&folder.join("demo.json")).unwrap(), sample);
        assert_eq!(written.len(), 5);
        for path in written {
            assert!(std::fs::metadata(&path).unwrap().len() > 1, "{} is empty", path.display());
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("taken");
        std::fs::write(&file, "x").unwrap();
        let sample = samples::results();
        let outcome = Outcome::default();
        let e = write_all(&file, sample.machine, sample.commit, &outcome, &Context::default());
        assert!(e.unwrap_err().to_string().contains("taken"));
    }
}
