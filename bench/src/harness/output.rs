//! Writes everything a run leaves behind.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::harness::error::BenchError;
use crate::harness::results::{Results, write_json};

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
