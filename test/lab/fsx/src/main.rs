//! `fsx`: random operations on files or a disk, each byte read compared with a model.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use lab_fsx::model::Content;
use lab_fsx::{FsxError, Place, Plan};
use serde_json::{Value, json};

const USAGE: &str = "\
usage: fsx run folder PATH [OPTION=VALUE]... | fsx run disk PATH [OPTION=VALUE]... |
       fsx verify MODEL | fsx digest PATH
options: seed=1 seconds=N operations=N (of each worker; without either until SIGTERM) workers=4 save=MODEL
         of a folder: files=3 (of each worker) file_mib=16 trim=false
         of a disk: backing=false (it shows the backing file made by lab_fsx::backing)";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match command(&words) {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("fsx: {error}");
            ExitCode::FAILURE
        }
    }
}

fn command(words: &[&str]) -> Result<Value, FsxError> {
    match words {
        ["run", place @ ("folder" | "disk"), path, options @ ..] => {
            let plan = plan(*place == "disk", path.into(), options)?;
            let stop = Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&stop))
                .map_err(FsxError::file("wait for SIGTERM while at work on", path))?;
            lab_fsx::run(&plan, stop)
        }
        ["verify", model] => lab_fsx::verify(Path::new(model)),
        ["digest", path] => Ok(json!(lab_fsx::digest::digest(Path::new(path))?)),
        _ => Err(FsxError::Refused(USAGE.into())),
    }
}

fn parse<T: FromStr>(option: &str, value: &str) -> Result<T, FsxError> {
    value.parse().map_err(|_| FsxError::Refused(format!("{option}={value} is no value\n{USAGE}")))
}

fn plan(is_disk: bool, path: PathBuf, options: &[&str]) -> Result<Plan, FsxError> {
    let (mut trim, mut backing) = (false, false);
    let mut plan = Plan {
        place: Place::Folder { path: path.clone(), trim },
        seed: 1,
        workers: 4,
        files: if is_disk { 1 } else { 3 },
        file_bytes: 16 << 20,
        time: None,
        operations: None,
        save: None,
    };
    for option in options {
        let unknown = || FsxError::Refused(format!("{option:?}: no such option\n{USAGE}"));
        let (name, value) = option.split_once('=').ok_or_else(unknown)?;
        match name {
            "seed" => plan.seed = parse(name, value)?,
            "seconds" => plan.time = Some(Duration::from_secs(parse(name, value)?)),
            "operations" => plan.operations = Some(parse(name, value)?),
            "workers" => plan.workers = parse(name, value)?,
            "save" => plan.save = Some(value.into()),
            "files" if !is_disk => plan.files = parse(name, value)?,
            "file_mib" if !is_disk => plan.file_bytes = parse::<u64>(name, value)? << 20,
            "trim" if !is_disk => trim = parse(name, value)?,
            "backing" if is_disk => backing = parse(name, value)?,
            _ => return Err(unknown()),
        }
    }
    let ground = if backing { Content::BACKING } else { Content::Zero };
    plan.place = match is_disk {
        true => Place::Disk { path, ground },
        false => Place::Folder { path, trim },
    };
    Ok(plan)
}
