//! The front end: a program that drives the rings of a back end and prints one JSON object.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::harness::error::BenchError;
use crate::harness::steal_time::{self, Steal};

use super::bed::Bed;
use super::case::{Case, Load, Op};
use super::front_end::Kind;
use super::ports::QUEUE_SIZE;
use super::reading::{Program, Reading, parse};
use super::window::Window;
use crate::harness::process::{self, Process, tail};
use crate::harness::usage::{self, Snapshot, Usage};

/// Time for a front end beyond its load: connecting, and its report. Then it hangs.
const GRACE: Duration = Duration::from_secs(15);
/// How often the counters are read. A back end may take a second to notice its front end, so when
/// a load began to count is only known when it has ended. Reading takes some 50 µs.
const READ_EVERY: Duration = Duration::from_millis(100);
/// The same for a load that ends by itself, which may be over in a tenth of a second.
const READ_SHORT_EVERY: Duration = Duration::from_millis(10);
/// One load as measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measure {
    /// Reading of the front end.
    pub reading: Reading,
    /// The back end's CPU meanwhile; none where it could not be read.
    pub usage: Option<Usage>,
    /// Part of that time that a hypervisor took from the back end's CPU or the front end's.
    pub stolen: f64,
}

/// The front end on two network ports.
pub fn net(bed: &Bed, case: &Case, window: Window, a: &Path, b: &Path) -> Program {
    let (mode, frame_bytes) = match case.load {
        Load::RoundTrip { frame_bytes } => ("rr", frame_bytes),
        Load::Flood { frame_bytes } => ("flood", frame_bytes),
        Load::Read { .. } | Load::Qcow2 { .. } => ("flood", 0),
    };
    let mut command = match bed.kind {
        Kind::Ours => {
            let mut command = common(bed, "net", case, window);
            command.args(["--mode", mode, "--queue-size", QUEUE_SIZE]);
            if frame_bytes > 4096 {
                command.arg("--mergeable");
            }
            command
        }
        Kind::VirtioUser => common(bed, "virtio-user", case, window),
    };
    command.args(["--frame-bytes", &frame_bytes.to_string()]);
    command.arg("--a").arg(a).arg("--b").arg(b);
    if bed.hugepages {
        command.arg("--hugepages");
    }
    Program { command, parse, ends_by_itself: false }
}

/// The front end on a disk.
pub fn disk(bed: &Bed, case: &Case, window: Window, socket: &Path) -> Program {
    let mut command = common(bed, "disk", case, window);
    let (op, block_bytes, depth) = match case.load {
        Load::Qcow2 { op: Op::Write, block_bytes, depth, .. } => ("write", block_bytes, depth),
        Load::Qcow2 { block_bytes, depth, .. } => ("read", block_bytes, depth),
        Load::Read { depth, .. } => ("read", 4096, depth),
        _ => ("read", 4096, 1),
    };
    command.args(["--op", op, "--block-bytes", &block_bytes.to_string()]);
    command.args(["--depth", &depth.to_string()]);
    if case.image().is_some() {
        command.arg("--write-cache");
    }
    if case.is_sequential() {
        command.arg("--sequential");
    }
    let once = case.once_per_bytes();
    if let Some(bytes) = once {
        command.args(["--once-per-bytes", &bytes.to_string()]);
    }
    command.arg("--socket").arg(socket);
    Program { command, parse, ends_by_itself: once.is_some() }
}

fn common(bed: &Bed, what: &str, case: &Case, window: Window) -> Command {
    let mut command = process::command(&bed.front, None);
    command.args([what, "--ring", case.ring.name(), "--cpu", &bed.front_cpu.to_string()]);
    command.args(["--secs", &window.length.as_secs_f64().to_string()]);
    command.args(["--warmup", &window.warm_up.as_secs_f64().to_string()]);
    command
}

/// Runs a load against running back ends and reads their CPU time, and what was taken from `cpus`,
/// while it counts.
pub fn run(
    mut program: Program,
    back_ends: &mut [Process],
    cpus: [usize; 2],
    window: Window,
    folder: &Path,
) -> Result<Measure, BenchError> {
    let log = folder.join("front-end.log");
    let stderr = File::create(&log).map_err(|e| BenchError::file("make", &log, e))?;
    let command = program.command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
    let child = command.spawn().map_err(|e| BenchError::lab("start the front end", e))?;
    let mut child = Killed(child);
    let pids: Vec<u32> = back_ends.iter().map(Process::pid).collect();
    let ended = output_of(&mut child.0);
    let every = if program.ends_by_itself { READ_SHORT_EVERY } else { READ_EVERY };
    let (answer, reads) = watch(&ended, &pids, cpus, window, every);
    for back_end in back_ends.iter_mut() {
        back_end.alive()?;
    }
    let said = || tail(&std::fs::read_to_string(&log).unwrap_or_default());
    let text = answer.ok_or_else(|| BenchError::lab("the front end hung", said()))?;
    let status = child.0.wait().map_err(|e| BenchError::lab("wait for the front end", e))?;
    if !status.success() {
        return Err(BenchError::lab(format!("the front end ended with {status}"), said()));
    }
    let reading = (program.parse)(&text).filter(|r| r.ops_per_s.is_finite() && r.ops_per_s > 0.0);
    let wrong = || BenchError::lab("the front end's answer is not as expected", tail(&text));
    let reading = reading.ok_or_else(wrong)?;
    let length = match program.ends_by_itself {
        true => Duration::from_secs_f64(reading.seconds.clamp(0.0, window.length.as_secs_f64())),
        false => window.length,
    };
    Ok(Measure { reading, usage: reads.usage(length), stolen: reads.stolen(length) })
}

/// The counters, several times during a load.
#[derive(Default)]
struct Reads {
    back_ends: Vec<Snapshot>,
    steal: Vec<Steal>,
}

/// Waits for the output; none when it does not come in time. Reads the counters meanwhile.
fn watch(
    ended: &Receiver<String>,
    pids: &[u32],
    cpus: [usize; 2],
    window: Window,
    every: Duration,
) -> (Option<String>, Reads) {
    let until = Instant::now() + window.warm_up + window.length + GRACE;
    let mut reads = Reads::default();
    let mut read = || {
        reads.back_ends.push(usage::snapshot(pids));
        reads.steal.push(steal_time::read(&cpus));
    };
    let answer = loop {
        match ended.recv_timeout(every) {
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => read(),
            done => break done.ok(),
        }
    };
    read();
    (answer, reads)
}

impl Reads {
    /// Between the first and the last read in the time that counted, the last `length` of the load;
    /// none without a back end.
    fn usage(&self, length: Duration) -> Option<Usage> {
        let end = self.back_ends.last()?.at();
        let counted = |s: &&Snapshot| !s.is_empty() && end.duration_since(s.at()) <= length;
        let first = self.back_ends.iter().find(counted)?;
        let last = self.back_ends.iter().rfind(counted)?;
        if last.at() == first.at() { None } else { last.since(first) }
    }

    /// Part of the same time that was stolen; none when it was too short to be read twice.
    fn stolen(&self, length: Duration) -> f64 {
        let Some(last) = self.steal.last() else { return 0.0 };
        let first = self.steal.iter().find(|s| last.at().duration_since(s.at()) <= length);
        first.map_or(0.0, |first| last.since(first))
    }
}

/// The child's whole output, when it has closed it.
fn output_of(child: &mut Child) -> Receiver<String> {
    let (done, ended) = channel();
    let stdout = child.stdout.take();
    std::thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut stdout) = stdout {
            // What cannot be read is not as expected, and told so.
            let _ = stdout.read_to_string(&mut text);
        }
        // Nobody listens when the front end was given up.
        let _ = done.send(text);
    });
    ended
}

/// A child that is killed when it is given up.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // Ended already: nothing to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests;
