//! Options that several suites have, and how they are parsed.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use lab::KernelChoice;

use crate::harness::daemon::{self, beside_us};
use crate::harness::error::BenchError;
use crate::harness::folder::Folder;

// Not a doc comment: where it is flattened, that would be the text of the whole command.
#[derive(Args)]
pub struct VmArgs {
    /// Folder for the results and all that shows them.
    #[arg(long, default_value = "out")]
    pub out: PathBuf,
    /// Guest kernel: 6.1 or 6.12.
    #[arg(long, default_value = "6.1")]
    kernel: String,
    /// The daemon; beside this program when left out.
    #[arg(long)]
    millrace: Option<PathBuf>,
}

/// Kernel, daemon and folder of a run with VMs.
#[derive(Debug)]
pub struct VmSetup {
    /// Kernel of all guests.
    pub kernel: KernelChoice,
    /// Path of Millrace's daemon.
    pub millrace: PathBuf,
    /// Folder of the results and, meanwhile, the disks.
    pub out: PathBuf,
}

impl VmArgs {
    /// All three.
    pub fn setup(&self) -> Result<VmSetup, BenchError> {
        let (kernel, millrace) = (self.kernel()?, self.millrace()?);
        Ok(VmSetup { kernel, millrace, out: self.out.clone() })
    }

    /// The kernel of all guests.
    pub fn kernel(&self) -> Result<KernelChoice, BenchError> {
        self.kernel.parse().map_err(|e| BenchError::lab("--kernel", e))
    }

    /// Path of Millrace's daemon.
    pub fn millrace(&self) -> Result<PathBuf, BenchError> {
        daemon::program(self.millrace.as_deref())
    }
}

/// Parses a length of time in seconds, 0.2 to 60.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let secs: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    if !(0.2..=60.0).contains(&secs) {
        return Err(format!("{secs} s; 0.2 to 60 allowed"));
    }
    Ok(Duration::from_secs_f64(secs))
}

/// Parses a value by its name; `word` stands for none of them.
pub fn value_or<T: ValueEnum>(word: &str, text: &str) -> Result<Option<T>, String> {
    if text == word { Ok(None) } else { T::from_str(text, false).map(Some) }
}

/// Lines of the daemon's `[sidecore]` table; none where its defaults are wanted.
pub fn sidecore(spin_us: Option<u32>) -> String {
    spin_us.map_or(String::new(), |us| format!("spin_us = {us}"))
}

/// Two different CPUs of this machine.
pub fn two_cpus(given: &[usize]) -> Result<(usize, usize), BenchError> {
    let allowed = base::cpu::allowed_cpus().map_err(|e| BenchError::lab("list CPUs", e))?;
    match given {
        [a, b] if a != b && allowed.contains(a) && allowed.contains(b) => Ok((*a, *b)),
        _ => {
            let why = format!("two different ones of {allowed:?} are needed, not {given:?}");
            Err(BenchError::lab("--cpus", why))
        }
    }
}

// See `VmArgs` for why this is no doc comment.
#[derive(Args)]
pub struct Programs {
    /// Folder for results, plots and the report.
    #[arg(long, default_value = "out")]
    pub out: PathBuf,
    /// The daemon; beside this program when left out.
    #[arg(long)]
    millrace: Option<PathBuf>,
    /// The front end; beside this program when left out.
    #[arg(long)]
    front: Option<PathBuf>,
}

impl Programs {
    /// Paths of both, as absolute ones.
    pub fn both(&self) -> Result<(PathBuf, PathBuf), BenchError> {
        let find = |given: &Option<PathBuf>, name| {
            let path = given.clone().map_or_else(|| beside_us(name), Ok)?;
            let path =
                std::path::absolute(&path).map_err(|e| BenchError::file("find", &path, e))?;
            match path.is_file() {
                true => Ok(path),
                false => Err(BenchError::lab(
                    "find what is measured",
                    format!("there is no {}; build it, or name it", path.display()),
                )),
            }
        };
        Ok((find(&self.millrace, "millrace")?, find(&self.front, "frontend")?))
    }
}

/// A folder with a short name: Unix socket paths hold 107 bytes.
pub fn short_folder(what: &str) -> Result<(Folder, PathBuf), BenchError> {
    let path = std::env::temp_dir().join(format!("millrace-{what}-{}", std::process::id()));
    Ok((Folder::new(&path)?, path))
}

/// Options of a command, parsed from these words.
#[cfg(test)]
pub fn parse<T: Args>(words: &[&str]) -> Result<T, String> {
    let command = T::augment_args(clap::Command::new("bench"));
    let matches = command.try_get_matches_from(["bench"].iter().chain(words));
    let matches = matches.map_err(|e| e.to_string())?;
    T::from_arg_matches(&matches).map_err(|e| e.to_string())
}
