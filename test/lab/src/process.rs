//! Host processes: run to the end, or start one that dies with the lab.

use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use base::sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::LabError;

/// Bytes of a failed command's output that go into its error: all that a compiler says, but not all
/// that a mad program does.
const ERROR_BYTES: usize = 1 << 20;

/// A command as one would type it, for error texts.
pub(crate) fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// Runs a command to its end and returns its standard output.
pub(crate) fn run(command: &mut Command) -> Result<Vec<u8>, LabError> {
    let text = shown(command);
    let output = command.stdin(Stdio::null()).output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => LabError::Missing {
            what: format!("program {}", command.get_program().to_string_lossy()),
            remedy: "run `lab setup`".into(),
        },
        _ => LabError::io(format!("run {text}"))(error),
    })?;
    if output.status.success() { Ok(output.stdout) } else { Err(failed(text, &output)) }
}

fn failed(command: String, output: &Output) -> LabError {
    let mut said = output.stdout.clone();
    said.extend_from_slice(&output.stderr);
    let from = said.len().saturating_sub(ERROR_BYTES);
    let said = String::from_utf8_lossy(&said[from..]).into_owned();
    LabError::HostCommand { command, status: output.status.to_string(), output: said }
}

type Job = (Command, Sender<io::Result<Child>>);

/// Starts a process that the kernel kills when this process dies, by whatever way.
///
/// The kernel ties "parent death" to the thread that started the child, so a thread that lives as
/// long as the process starts them all.
pub(crate) fn spawn(command: Command) -> Result<Child, LabError> {
    static SPAWNER: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let what = format!("start {}", shown(&command));
    let spawner = SPAWNER.get_or_init(|| {
        let (jobs, todo) = channel::<Job>();
        thread::spawn(move || {
            for (mut command, answer) in todo {
                // The asking thread is gone when this fails; the child then dies with its drop.
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(jobs)
    });
    let (answer, child) = channel();
    let gone = || io::Error::other("the lab's spawning thread is gone");
    lock(spawner).send((command, answer)).map_err(|_| LabError::io(&what)(gone()))?;
    child.recv().map_err(|_| LabError::io(&what)(gone()))?.map_err(LabError::io(what))
}

/// Children of a process.
#[must_use]
pub fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of_task = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
    };
    tasks.flat_map(of_task).collect()
}

/// Waits for a process to end; false when the time is over first.
pub(crate) fn wait_for_exit(pid: u32, time: Duration) -> io::Result<bool> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else { return Ok(true) };
    let ended = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(true),
        other => other?,
    };
    let time = Timespec::try_from(time).ok();
    Ok(poll(&mut [PollFd::new(&ended, PollFlags::IN)], time.as_ref())? > 0)
}

/// Command words that make what follows die with its parent.
pub(crate) const DIE_WITH_PARENT: [&str; 3] = ["setpriv", "--pdeathsig", "KILL"];

/// User plus system time of a process so far, all its threads included; steps of 10 ms.
///
/// # Errors
/// There is no such process.
pub fn cpu_time(pid: u32) -> Result<Duration, LabError> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).map_err(LabError::io(format!("read {path}")))?;
    let ticks = stat.rsplit_once(')').and_then(|(_, rest)| {
        let mut fields = rest.split_ascii_whitespace().skip(11);
        Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
    });
    let ticks = ticks.ok_or_else(|| LabError::Refused(format!("{path} has another form")))?;
    Ok(Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_command_shows_what_it_said() {
        let error = run(Command::new("sh").args(["-c", "echo no >&2; exit 3"])).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("exit status: 3") && text.contains("no"), "{text}");
        let error = run(&mut Command::new("no-such-program")).unwrap_err();
        assert!(matches!(error, LabError::Missing { .. }));
    }

    #[test]
    fn cpu_time_grows() {
        let pid = std::process::id();
        let before = cpu_time(pid).unwrap();
        while cpu_time(pid).unwrap() <= before {}
    }

    /// One byte to `cat` and back.
    fn echo(child: &mut Child) -> io::Result<()> {
        io::Write::write_all(child.stdin.as_mut().unwrap(), b"x")?;
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0])
    }

    #[test]
    fn children_of_a_finished_thread_live_on() {
        let mut child = thread::spawn(|| {
            let mut command = Command::new(DIE_WITH_PARENT[0]);
            command.args(&DIE_WITH_PARENT[1..]).arg("cat");
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = spawn(command).unwrap();
            // It runs, so its parent-death signal is armed when this thread ends.
            echo(&mut child).unwrap();
            child
        })
        .join()
        .unwrap();
        echo(&mut child).unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}
