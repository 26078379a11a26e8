//! `tidy [--json] [ROOT]`: prints the report, and fails if the tree breaks a rule.
//! `tidy reference [ROOT]`: writes the pages of `docs/reference`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut wants_json = false;
    let mut wants_reference = false;
    let mut root = None;
    for (i, arg) in std::env::args_os().skip(1).enumerate() {
        match arg.to_str() {
            Some("reference") if i == 0 => wants_reference = true,
            Some("--json") if !wants_reference => wants_json = true,
            Some(option) if option.starts_with('-') => {
                eprintln!("usage: tidy [--json] [ROOT] | tidy reference [ROOT]");
                return ExitCode::from(2);
            }
            _ => root = Some(PathBuf::from(arg)),
        }
    }
    let root = root.unwrap_or_else(tidy::find_root);
    if wants_reference { write_reference(&root) } else { report(&root, wants_json) }
}

fn report(root: &Path, wants_json: bool) -> ExitCode {
    let report = match tidy::check_tree(root) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("tidy: {error}");
            return ExitCode::from(2);
        }
    };
    if wants_json {
        match serde_json::to_string_pretty(&report) {
            Ok(json) => println!("{json}"),
            Err(error) => eprintln!("tidy: {error}"),
        }
    } else {
        print!("{report}");
    }
    if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Writes the pages, and says how many errors have no remedy.
fn write_reference(root: &Path) -> ExitCode {
    use tidy::reference;
    let counts = reference::write(root)
        .and_then(|()| reference::count_without_remedy(&reference::read_tree(root)?));
    match counts {
        Ok((without, all)) => {
            println!("docs/reference: {without} of {all} errors have no remedy");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("tidy: {error}");
            ExitCode::from(2)
        }
    }
}
