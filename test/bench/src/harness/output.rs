//! Files that a run leaves behind, and the page among them.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::harness::error::BenchError;
use crate::harness::repeat::{self, Failure};
use crate::harness::report::{self, Context};
use crate::harness::results::{Missing, Results, Row, write_json};

/// Samples of all rounds, from which rows in the published format are made.
pub trait RowSource<S> {
    /// All rows for which there is a round.
    fn rows(&self, setup: &S) -> Vec<Row>;

    /// Loads that failed.
    fn failed(&self) -> &[Failure];

    /// Cases without a row, each with its first failure.
    fn missing(&self, rows: &[Row]) -> Vec<Missing> {
        let has_row = |m: &Missing| {
            let has_side = |r: &&Row| m.name == r.ours.name || m.name == r.peer.name;
            rows.iter().filter(has_side).any(|r| r.case == m.case)
        };
        repeat::lost(self.failed()).into_iter().filter(|m| !has_row(m)).collect()
    }
}

/// Samples of all rounds, from which plots and a page are made.
pub trait PageSource<S>: RowSource<S> + Serialize {
    /// Name with which those of all files begin.
    fn stem(&self, setup: &S) -> &'static str;

    /// Plots, each with the end of its file's name.
    fn plots(&self, setup: &S) -> Vec<(String, String)>;

    /// Parts of the page; `plots` are all plots, one after the other.
    fn page(&self, setup: &S, results: &Results, plots: &str) -> Page;

    /// Sentences on floors missed and loads that failed or were disturbed.
    fn losses(&self, results: &Results) -> Vec<String>;
}

/// Parts of a page that differ between suites.
#[derive(Debug)]
pub struct Page {
    /// Comparison that the page is about, before the number of floors.
    pub headline: &'static str,
    /// HTML above the list of what was lost.
    pub above: String,
    /// HTML below it.
    pub below: String,
}

impl Page {
    /// The whole page.
    fn html(&self, results: &Results, losses: &[String], context: &Context) -> String {
        let (reached, floors) = results.floors();
        let headline = format!("{}: {reached} of {floors} floors reached.", self.headline);
        [
            report::head(results, context.took_s, &headline).as_str(),
            &self.above,
            &report::list("What was lost", losses),
            &self.below,
            &report::list("How it was measured", &context.setup),
            report::TAIL,
        ]
        .concat()
    }
}

/// Writes the published format, every round, the plots and the page into `folder`, making it if
/// needed. Returns what was written.
pub(crate) fn write_all<S, M: PageSource<S>>(
    folder: &Path,
    setup: &S,
    results: &Results,
    measured: &M,
    context: &Context,
) -> Result<Vec<PathBuf>, BenchError> {
    let mut texts = measured.plots(setup);
    let plots: String = texts.iter().map(|(_, plot)| plot.as_str()).collect();
    let page = measured.page(setup, results, &plots);
    texts.push((".html".into(), page.html(results, &measured.losses(results), context)));
    write_run(folder, measured.stem(setup), results, measured, &texts)
}

/// Writes the published format (`stem.json`), every round (`stem-rounds.json`) and `texts`, each
/// under `stem` and its ending, into `folder`, making it if needed. Returns what was written.
pub(crate) fn write_run<E: AsRef<str>>(
    folder: &Path,
    stem: &str,
    results: &Results,
    rounds: &impl Serialize,
    texts: &[(E, String)],
) -> Result<Vec<PathBuf>, BenchError> {
    std::fs::create_dir_all(folder).map_err(|e| BenchError::file("make folder", folder, e))?;
    let path = |end: &str| folder.join(format!("{stem}{end}"));
    let mut written = vec![path(".json"), path("-rounds.json")];
    results.write(&written[0])?;
    write_json(rounds, &written[1])?;
    for (end, text) in texts {
        let path = path(end.as_ref());
        std::fs::write(&path, text).map_err(|e| BenchError::file("write", &path, e))?;
        written.push(path);
    }
    Ok(written)
}

/// Writes a made-up run and reads its results and rounds again. Returns the ends of the other
/// files' names, and the page.
#[cfg(test)]
pub(crate) fn write_and_read<S, M>(setup: &S, measured: &M) -> (Vec<String>, String)
where
    M: PageSource<S> + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("deep");
    let results = Results { rows: measured.rows(setup), ..crate::harness::samples::results() };
    let written = write_all(&folder, setup, &results, measured, &Context::default()).unwrap();
    assert_eq!(Results::read(&written[0]).unwrap(), results);
    let read: M = serde_json::from_slice(&std::fs::read(&written[1]).unwrap()).unwrap();
    assert_eq!(&read, measured);
    let page = std::fs::read_to_string(written.last().unwrap()).unwrap();
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let end = |name: String| name.strip_prefix(measured.stem(setup)).unwrap().to_owned();
    let mut ends: Vec<String> = written.iter().map(name).map(end).collect();
    assert_eq!(ends.drain(..2).collect::<Vec<_>>(), [".json", "-rounds.json"]);
    (ends, page)
}
