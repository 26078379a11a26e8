//! Processes of back ends: pinned, killed with us, and never left running.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::error::BenchError;

/// Bytes of a log's end that go into an error.
const TAIL_BYTES: usize = 600;
/// Time for a back end to listen: the slowest sets up its memory for a second.
const LISTEN: Duration = Duration::from_secs(15);
/// How often a starting back end is looked at. Nothing is measured then.
const LOOK: Duration = Duration::from_millis(5);

/// A command that dies with this process, on one CPU if one is given. Start it from a thread that
/// lives as long as the process: the kernel ties the death signal to the starting thread.
pub fn command(program: impl AsRef<std::ffi::OsStr>, cpu: Option<usize>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if let Some(cpu) = cpu {
        command.args(["taskset", "-c", &cpu.to_string()]);
    }
    command.arg(program);
    command
}

/// Runs a command to its end; its output is the error if it fails.
pub fn run(command: &mut Command) -> Result<String, BenchError> {
    let shown = format!("{command:?}").replace('"', "");
    let out = command.stdin(Stdio::null()).output().map_err(|e| BenchError::lab(&shown, e))?;
    if !out.status.success() {
        let said = [out.stdout, out.stderr].concat();
        return Err(BenchError::lab(shown, tail(&String::from_utf8_lossy(&said))));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Path of a program in PATH, with Debian's folder for daemons.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    folders.map(|f| f.join(program)).find(|p| p.is_file())
}

/// A running process, killed when dropped.
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts it with both outputs in a file in `folder` and an input that stays open and empty.
    pub fn start(name: &str, command: &mut Command, folder: &Path) -> Result<Process, BenchError> {
        let log = folder.join(format!("{name}.log"));
        let file = std::fs::File::create(&log).map_err(|e| BenchError::file("make", &log, e))?;
        let second = file.try_clone().map_err(|e| BenchError::file("share", &log, e))?;
        let child = command.stdin(Stdio::piped()).stdout(file).stderr(second).spawn();
        let child = child.map_err(|e| BenchError::lab(format!("start {name}"), e))?;
        Ok(Process { name: name.into(), child, log })
    }

    /// Id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// An error with the end of its log when it is no longer there.
    pub fn alive(&mut self) -> Result<(), BenchError> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.failed(&format!("ended with {status}"))),
            Err(e) => Err(BenchError::lab(format!("look at {}", self.name), e)),
        }
    }

    /// Waits until it listens at all of `sockets`.
    pub fn wait_listening(&mut self, sockets: &[&Path]) -> Result<(), BenchError> {
        let until = Instant::now() + LISTEN;
        // The table of its own network namespace.
        let table = format!("/proc/{}/net/unix", self.pid());
        loop {
            self.alive()?;
            let text = std::fs::read_to_string(&table).unwrap_or_default();
            if sockets.iter().all(|s| listens(&text, s)) {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(self.failed(&format!("did not listen within {LISTEN:?}")));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn failed(&self, what: &str) -> BenchError {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        BenchError::lab(&self.name, format!("{what}: {}", tail(&log)))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // None of them keeps anything that a clean end would save. Gone already is fine too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a peer's process in `folder`; returns when it listens at all of `sockets`.
pub fn launch(
    name: &str,
    command: &mut Command,
    folder: &Path,
    sockets: &[&Path],
) -> Result<Process, BenchError> {
    let mut process = Process::start(name, command, folder)?;
    process.wait_listening(sockets)?;
    Ok(process)
}

/// Whether the kernel's table of Unix sockets has a listener (flag `__SO_ACCEPTCON`) at `path`. Who
/// binds by a descriptor of the folder, as we do, has another name for that:
/// `/proc/self/fd/7/x.sock`.
fn listens(table: &str, path: &Path) -> bool {
    let is_there = |bound: &Path| {
        bound == path
            || (bound.starts_with("/proc/self/fd")
                && bound.file_name() == path.file_name()
                && path.exists())
    };
    table.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        fields.nth(3) == Some("00010000") && fields.nth(3).is_some_and(|p| is_there(Path::new(p)))
    })
}

/// The last lines of a text that fit into an error.
pub fn tail(text: &str) -> String {
    let text = text.trim();
    let mut from = text.len().saturating_sub(TAIL_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_told_from_a_connection() {
        let table = "Num RefCount Protocol Flags Type St Inode Path\n\
            0: 00000002 00000000 00010000 0001 01 4168978 /tmp/b\n\
            1: 00000003 00000000 00000000 0001 03 4168979 /tmp/a\n\
            2: 00000002 00000000 00010000 0001 01 4168980\n";
        assert!(listens(table, Path::new("/tmp/b")));
        assert!(!listens(table, Path::new("/tmp/a")));
        assert!(!listens(table, Path::new("/tmp")));
        let dir = tempfile::tempdir().unwrap();
        let table = "0: 00000002 00000000 00010000 0001 01 4168978 /proc/self/fd/7/d.sock\n";
        assert!(!listens(table, &dir.path().join("d.sock")), "another folder's");
        std::fs::write(dir.path().join("d.sock"), "").unwrap();
        assert!(listens(table, &dir.path().join("d.sock")));
    }

    #[test]
    fn a_process_that_ends_is_told_with_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = command("sh", None);
        shell.args(["-c", "echo out of cheese >&2; exit 3"]);
        let mut p = Process::start("peer", &mut shell, dir.path()).unwrap();
        let text = p.wait_listening(&[&dir.path().join("x")]).unwrap_err().to_string();
        assert_eq!(text, "peer: ended with exit status: 3: out of cheese");
    }

    #[test]
    fn dropping_kills_whatever_it_does() {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = command("sh", None);
        shell.args(["-c", "trap '' TERM INT; while :; do read line || exit; done"]);
        let p = Process::start("peer", &mut shell, dir.path()).unwrap();
        let pid = p.pid();
        assert!(Path::new(&format!("/proc/{pid}")).exists());
        drop(p);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn commands_that_fail_are_shown_with_what_they_said() {
        let text = run(command("sh", Some(0)).args(["-c", "echo no; exit 1"])).unwrap_err();
        assert!(text.to_string().ends_with(": no"), "{text}");
        assert!(text.to_string().contains("taskset -c 0 sh"), "{text}");
        assert_eq!(run(Command::new("echo").arg("x")).unwrap(), "x\n");
        assert!(find("sh").is_some() && find("no-such-program").is_none());
    }

    #[test]
    fn a_tail_is_cut_between_characters() {
        let long = "µ".repeat(TAIL_BYTES);
        assert!(tail(&long).len() <= TAIL_BYTES);
        assert_eq!(tail(" short\n"), "short");
    }
}
