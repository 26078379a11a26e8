//! Millrace's daemon: found; and, where there are no VMs, configured and started for a front end.

use std::path::{Path, PathBuf};

use crate::harness::error::BenchError;
use crate::harness::process::{self, Process};

/// Longest poll before a sleep that the daemon takes: a sidecore under load does not sleep.
pub const POLLS_ON_US: u32 = 10_000;

/// The daemon: the one named, or the one beside this program.
pub fn program(named: Option<&Path>) -> Result<PathBuf, BenchError> {
    let program = match named {
        Some(path) => path.to_owned(),
        None => beside_us("millrace")?,
    };
    if !program.is_file() {
        let why =
            format!("there is no {}; build it, or name it with --millrace", program.display());
        return Err(BenchError::lab("find the daemon", why));
    }
    Ok(program)
}

/// A program in the folder of this one.
pub fn beside_us(name: &str) -> Result<PathBuf, BenchError> {
    Ok(this_program()?.with_file_name(name))
}

/// Path of this program.
pub fn this_program() -> Result<PathBuf, BenchError> {
    std::env::current_exe().map_err(|e| BenchError::lab("find this program", e))
}

/// The head of a configuration: everything in `folder`, one sidecore on `cpu`; it polls for the
/// daemon's default where `spin_us` is left out.
pub fn head(folder: &Path, cpu: usize, spin_us: Option<u32>) -> String {
    let spin = spin_us.map_or(String::new(), |us| format!("spin_us = {us}\n"));
    format!("[daemon]\nrun_dir = {folder:?}\nlog = \"warn\"\n[sidecore]\ncpus = [{cpu}]\n{spin}")
}

/// Starts `program` with a configuration, which goes into `folder` with its log; returns when it
/// listens at all of `sockets`.
pub fn start(
    program: &Path,
    config: &str,
    folder: &Path,
    sockets: &[&Path],
) -> Result<Process, BenchError> {
    let path = folder.join("millrace.toml");
    std::fs::write(&path, config).map_err(|e| BenchError::file("write", &path, e))?;
    let mut command = process::command(program, None);
    command.args(["serve", "-c"]).arg(path);
    process::launch("millrace", &mut command, folder, sockets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_a_config_that_the_daemon_takes() {
        let folder = Path::new("/t/a b");
        for spin_us in [None, Some(0), Some(POLLS_ON_US)] {
            let text = head(folder, 3, spin_us);
            let parsed = config::parse(Path::new("m.toml"), &text).unwrap();
            assert_eq!(parsed.sidecore.spin_us, spin_us, "{text}");
            assert!(text.contains("cpus = [3]\n") && text.contains("\"/t/a b\"\n"), "{text}");
        }
    }

    #[test]
    fn a_daemon_that_ends_is_told_with_its_last_words_and_its_config_stays() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("x.sock");
        // `cat serve -c FILE` fails, and names what it does not know.
        let e = start(Path::new("cat"), "text", dir.path(), &[&socket]).err().unwrap();
        assert!(e.to_string().starts_with("millrace: ended with exit status: 1: "), "{e}");
        let config = std::fs::read_to_string(dir.path().join("millrace.toml")).unwrap();
        assert_eq!(config, "text");
    }

    #[test]
    fn a_program_that_is_not_there_is_told_with_the_way_out() {
        let text = program(Some(Path::new("/t/none"))).unwrap_err().to_string();
        assert!(text.contains("there is no /t/none") && text.contains("--millrace"), "{text}");
        assert!(beside_us("x").unwrap().ends_with("x"));
    }
}
