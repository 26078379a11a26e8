//! `tidy [--json] [ROOT]`: prints the report, and fails if the tree breaks a rule.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut wants_json = false;
    let mut root = None;
    for arg in std::env::args_os().skip(1) {
        match arg.to_str() {
            Some("--json") => wants_json = true,
            Some(option) if option.starts_with('-') => {
                eprintln!("usage: tidy [--json] [ROOT]");
                return ExitCode::from(2);
            }
            _ => root = Some(PathBuf::from(arg)),
        }
    }
    let report = match tidy::check_tree(&root.unwrap_or_else(tidy::find_root)) {
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
