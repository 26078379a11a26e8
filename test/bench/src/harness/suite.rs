//! Run of a suite: from its options to its files, its table and its exit code.

use std::path::{Path, PathBuf};

use lab::Lab;

use crate::harness::error::BenchError;
use crate::harness::machine;
use crate::harness::output::{self, PageSource, RowSource};
use crate::harness::progress::Progress;
use crate::harness::report::Context;
use crate::harness::results::{Machine, Missing, Results, Row};
use crate::harness::table::{self, Section};

/// Exit code of a run that completed with a case below its floor.
pub const EXIT_MISSED: u8 = 3;

/// A comparison of Millrace with its peers, made from the options of its command.
pub trait Suite {
    /// Settings, made from the options and checked.
    type Setup;
    /// Samples of all rounds.
    type Measured;
    /// Whether it boots guests.
    const HAS_GUESTS: bool;

    /// Makes the settings.
    fn setup(&self) -> Result<Self::Setup, BenchError>;

    /// Measures everything.
    fn measure(
        &self,
        setup: &Self::Setup,
        progress: &mut Progress,
    ) -> Result<Self::Measured, BenchError>;

    /// Makes results of the samples and writes all files of the run.
    fn report(
        &self,
        setup: &Self::Setup,
        measured: Self::Measured,
        origin: Origin,
    ) -> Result<Report, BenchError>;
}

/// A suite with guests whose report is rows in the published format, with a page of plots and
/// tables.
pub trait PageSuite {
    /// Section of the document of results.
    const SECTION: Section;
    /// Settings, made from the options and checked.
    type Setup;
    /// Samples of all rounds.
    type Measured: PageSource<Self::Setup>;

    /// Makes the settings.
    fn setup(&self) -> Result<Self::Setup, BenchError>;

    /// Measures everything.
    fn measure(setup: &Self::Setup, progress: &mut Progress) -> Result<Self::Measured, BenchError>;

    /// Sentences on how it was measured.
    fn text(setup: &Self::Setup) -> Vec<String>;

    /// Folder of all files.
    fn out(&self) -> &Path;

    /// Whether a comparison that could not be made is a failure.
    fn is_failure(_missing: &Missing) -> bool {
        true
    }
}

impl<T: PageSuite> Suite for T {
    type Setup = T::Setup;
    type Measured = T::Measured;
    const HAS_GUESTS: bool = true;

    fn setup(&self) -> Result<T::Setup, BenchError> {
        PageSuite::setup(self)
    }

    fn measure(
        &self,
        setup: &T::Setup,
        progress: &mut Progress,
    ) -> Result<T::Measured, BenchError> {
        T::measure(setup, progress)
    }

    fn report(
        &self,
        setup: &T::Setup,
        measured: T::Measured,
        origin: Origin,
    ) -> Result<Report, BenchError> {
        let rows = measured.rows(setup);
        let missing = measured.missing(&rows);
        let (results, context) = origin.results(rows, missing, T::text(setup));
        let written = output::write_all(self.out(), setup, &results, &measured, &context)?;
        let losses = measured.losses(&results);
        let failed = results.missing.iter().any(T::is_failure);
        Ok(Report::new(T::SECTION, &results, losses, written, failed))
    }
}

/// Machine, commit and duration of a run.
#[derive(Debug, Clone)]
pub struct Origin {
    /// Machine.
    pub machine: Machine,
    /// Commit.
    pub commit: String,
    /// Duration of the whole run, seconds.
    pub took_s: f64,
}

impl Origin {
    /// Results in the published format, and what the page says beside them: `text` tells how it was
    /// measured.
    pub fn results(
        self,
        rows: Vec<Row>,
        missing: Vec<Missing>,
        text: Vec<String>,
    ) -> (Results, Context) {
        let context = Context { setup: text, took_s: self.took_s };
        (Results { machine: self.machine, commit: self.commit, rows, missing }, context)
    }
}

/// End of a run, for the terminal.
#[derive(Debug)]
pub struct Report {
    /// Table, and what is printed below it.
    pub table: String,
    /// Sentences on what failed, was missed or disturbed.
    pub losses: Vec<String>,
    /// Files of the run.
    pub written: Vec<PathBuf>,
    /// Sentences that stand last: what it has shown. Empty where the table says it.
    pub summary: String,
    /// Exit code.
    pub code: u8,
}

impl Report {
    /// Report of a run with results in the published format.
    pub fn new(
        section: Section,
        results: &Results,
        losses: Vec<String>,
        written: Vec<PathBuf>,
        failed: bool,
    ) -> Report {
        let code = exit_code(failed, results.rows.iter().any(Row::missed));
        let summary = String::new();
        Report { table: table::terminal(section, results), losses, written, summary, code }
    }
}

/// Exit code of a complete run: 1 where something failed, [`EXIT_MISSED`] where a row is not good
/// enough, else 0.
pub fn exit_code(failed: bool, missed: bool) -> u8 {
    match (failed, missed) {
        (true, _) => 1,
        (false, true) => EXIT_MISSED,
        (false, false) => 0,
    }
}

/// Runs a suite; returns the exit code.
pub fn run<S: Suite>(suite: &S) -> Result<u8, BenchError> {
    let setup = suite.setup()?;
    // All guests of a process run alike: none of these numbers is of the other kind.
    let found = || lab::acceleration(&Lab::new()?);
    let guests = S::HAS_GUESTS.then(found).transpose();
    let guests = guests.map_err(|e| BenchError::lab("choose what runs the guests", e))?;
    let guests = guests.map(|found| found.accelerator);
    // Before it measures: the tree may change meanwhile.
    let commit = machine::commit(Path::new("."));
    let machine = Machine { guests, ..machine::machine() };
    let mut progress = Progress::stderr();
    progress.step(&machine.line());
    let measured = suite.measure(&setup, &mut progress)?;
    let took_s = progress.elapsed().as_secs_f64();
    let origin = Origin { machine, commit, took_s };
    let report = suite.report(&setup, measured, origin)?;
    println!("\n{}", report.table);
    for line in &report.losses {
        progress.step(line);
    }
    for path in &report.written {
        progress.step(&format!("wrote {}", path.display()));
    }
    if !report.summary.is_empty() {
        println!("\n{}", report.summary);
    }
    Ok(report.code)
}
