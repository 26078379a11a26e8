//! The second front end: DPDK's virtio-user driver, two ports of one testpmd.
//!
//! # Theory of operation
//! testpmd knows no mode that only sends on one port and only receives on another, and one that
//! makes frames faster than they go drops most of them, at the cost of the CPU that should receive.
//! So frames circulate. Port 0 sends [`FRAMES`] of them once (`start tx_first`); from then on the
//! mode `io` takes what port 1 receives and sends it on port 0 as it is. The back end always has a
//! full batch to do, in one direction, and the front end touches no frame.
//!
//! Before that, single bursts are sent until one arrives whole: then the back end is ready.
//!
//! Commands go through testpmd's own prompt. It counts frames and divides by its own time. In the
//! end it takes what is still under way, and what port 0 sent and port 1 never received was lost.
//!
//! # Limits
//! - A lost frame is missing from the loop from then on. With more than [`MAX_LOST`] lost, another
//!   load was measured than was asked for: an error.
//! - No round trips: testpmd has no clock for single frames. No frames above 1,500 bytes: its
//!   buffers hold 2 KiB, and more need another set-up of rings.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::harness::error::BenchError;

use crate::harness::ovs::dpdk_memory;

use super::case::Ring;
use super::ports::{IP_A, IP_B, MAC_A, MAC_B, QUEUE_SIZE};
use super::reading::Reading;
use super::window::Window;
use crate::harness::process::{self, tail};
use crate::harness::usage;

/// The program.
pub const PROGRAM: &str = "dpdk-testpmd";
/// Largest frame, from the Ethernet header on, that fits a buffer with room to spare.
pub const MAX_FRAME_BYTES: u32 = 1514;
/// Frames of one burst of testpmd.
const BURST: u64 = 32;
/// Bursts in the loop: six make 192 frames. They fit a queue of 256, so neither the front end nor a
/// back end that keeps up has to drop one.
const BURSTS: u64 = 6;
/// Frames in the loop.
const FRAMES: u64 = BURST * BURSTS;
/// A quarter of the frames.
const MAX_LOST: u64 = FRAMES / 4;
/// Packet buffers: 192 frames, two receive rings of 256, caches. Few, so that they stay in the
/// CPU's cache as a guest's would.
const BUFFERS: &str = "4096";
/// Taken before it connects: Open vSwitch, once connected, takes all huge pages that there are, and
/// gives some back. Ten for the buffers; rings and tables take a few more.
const MEMORY_MIB: &str = "64";
/// Prompt of testpmd when it waits for a command.
const PROMPT: &str = "testpmd>";
/// Time for a back end to forward after it was connected: Open vSwitch takes a second, to make its
/// buffers.
const OPEN: Duration = Duration::from_secs(8);
/// Time for frames under way to arrive: a back end needs some 100 µs for all of them.
const DRAIN: Duration = Duration::from_millis(20);

/// Setup of a load by testpmd.
#[derive(Debug)]
pub struct Setup {
    /// Sockets of the two ports.
    pub sockets: [PathBuf; 2],
    /// Ring format.
    pub ring: Ring,
    /// Length from the Ethernet header to the last byte.
    pub frame_bytes: u32,
    /// CPU of both of its threads; the one that reads commands sleeps meanwhile.
    pub cpu: usize,
    /// Memory in huge pages.
    pub hugepages: bool,
    /// How long.
    pub window: Window,
}

/// Runs it once.
pub fn run(setup: &Setup) -> Result<Reading, BenchError> {
    let mut testpmd = Testpmd::start(setup)?;
    let opened = testpmd.open()?;
    testpmd.send(BURSTS)?;
    testpmd.all(&["set portlist 0,1", "set fwd io", "start"])?;
    // The load itself is what is waited for: there is no event.
    std::thread::sleep(setup.window.warm_up);
    let first = testpmd.counters()?;
    let before = testpmd.usage();
    std::thread::sleep(setup.window.length);
    let second = testpmd.counters()?;
    let usage = testpmd.usage().since(&before);
    testpmd.all(&["stop"])?;
    let lost = lost(&opened, &testpmd.drain()?)?;
    let ops = second[1].received.saturating_sub(first[1].received) as f64;
    let ops_per_s = second[1].received_per_s as f64;
    let seconds = if ops_per_s > 0.0 { ops / ops_per_s } else { 0.0 };
    Ok(Reading {
        ops,
        ops_per_s,
        bytes_per_s: ops_per_s * f64::from(setup.frame_bytes),
        seconds,
        lost: lost as f64,
        cpu_delay_ns: usage.map_or(0.0, |u| u.delay * seconds * 1e9),
        ..Reading::default()
    })
}

/// Frames sent and received from one reading of both ports to the next.
fn between(then: &[Counters; 2], now: &[Counters; 2]) -> (u64, u64) {
    let sent = now[0].sent.saturating_sub(then[0].sent);
    (sent, now[1].received.saturating_sub(then[1].received))
}

/// Frames that went out and were never received, when none was under way before or is any more.
fn lost(before: &[Counters; 2], after: &[Counters; 2]) -> Result<u64, BenchError> {
    let (sent, received) = between(before, after);
    let lost = sent.saturating_sub(received);
    if lost > MAX_LOST {
        let why = format!("{lost} of {FRAMES} frames were lost; at most {MAX_LOST} may be");
        return Err(BenchError::lab("keep frames circulating", why));
    }
    Ok(lost)
}

/// Counters that testpmd prints of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counters {
    sent: u64,
    received: u64,
    /// Since it was last asked.
    received_per_s: u64,
}

/// The part of `show port stats` that is about one port.
fn counters_of(text: &str, port: usize) -> Option<Counters> {
    let head = format!("NIC statistics for port {port} ");
    let text = text.get(text.find(&head)? + head.len()..)?;
    let text = text.split_once("NIC statistics").map_or(text, |(this, _)| this);
    let value = |name: &str| {
        let mut words = text.split_ascii_whitespace().skip_while(|w| *w != name);
        words.nth(1)?.parse().ok()
    };
    Some(Counters {
        sent: value("TX-packets:")?,
        received: value("RX-packets:")?,
        received_per_s: value("Rx-pps:")?,
    })
}

/// Arguments of testpmd for rings, memory and frames.
fn arguments(setup: &Setup) -> Vec<String> {
    // Both threads are on one CPU: the one that forwards is the only one that runs for long.
    let mut args = vec![format!("--lcores=0@{cpu},1@{cpu}", cpu = setup.cpu)];
    args.extend(["--main-lcore=0", "--no-pci", "--file-prefix=millrace-front"].map(Into::into));
    args.extend(dpdk_memory(setup.hugepages).iter().map(|s| s.to_string()));
    if setup.hugepages {
        args.extend(["-m", MEMORY_MIB].map(Into::into));
    }
    // A back end is told of each file, and takes eight: all pages have to be in one.
    args.push("--single-file-segments".into());
    let ring = match setup.ring {
        Ring::Split => "packed_vq=0,in_order=0",
        Ring::InOrder => "packed_vq=0,in_order=1",
        Ring::Packed => "packed_vq=1,in_order=0",
    };
    for (i, (socket, mac)) in setup.sockets.iter().zip([MAC_A, MAC_B]).enumerate() {
        args.push(format!(
            "--vdev=net_virtio_user{i},path={},mac={mac},queue_size={QUEUE_SIZE},mrg_rxbuf=0,{ring}",
            socket.display()
        ));
    }
    // Frames that wait when it starts to forward are the load, and not to be thrown away.
    args.extend(["--", "-i", "--nb-cores=1", "--no-mlockall", "--no-flush-rx"].map(Into::into));
    args.push(format!("--total-num-mbufs={BUFFERS}"));
    args.push(format!("--burst={BURST}"));
    args.push(format!("--txpkts={}", setup.frame_bytes));
    args.push(format!("--tx-ip={IP_A},{IP_B}"));
    args.push(format!("--eth-peer=0,{MAC_B}"));
    args
}

/// Process of testpmd, at its prompt.
struct Testpmd {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Testpmd {
    /// Starts it and waits for its prompt: then both ports are connected.
    fn start(setup: &Setup) -> Result<Testpmd, BenchError> {
        // Its answers would wait for 4 KiB of them in a pipe.
        let mut command = process::command("stdbuf", None);
        command.args(["-oL", PROGRAM]).args(arguments(setup));
        // What it keeps on a disk goes with the sockets.
        command.env("RUNTIME_DIRECTORY", setup.sockets[0].parent().unwrap_or(Path::new(".")));
        Testpmd::spawn(&mut command)
    }

    fn spawn(command: &mut Command) -> Result<Testpmd, BenchError> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| BenchError::lab("start testpmd", e))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(BenchError::lab("start testpmd", "it has no pipes"));
        };
        let mut testpmd = Testpmd { child, stdin, stdout: BufReader::new(stdout) };
        testpmd.answer("its start")?;
        Ok(testpmd)
    }

    /// Sends a command, and reads what testpmd prints for it.
    fn ask(&mut self, command: &str) -> Result<String, BenchError> {
        let sent = writeln!(self.stdin, "{command}");
        sent.map_err(|e| BenchError::lab(format!("tell testpmd: {command}"), e))?;
        self.answer(command)
    }

    /// Everything up to the next prompt. Who waits for us has a limit of time.
    fn answer(&mut self, to: &str) -> Result<String, BenchError> {
        let mut text = Vec::new();
        while !text.ends_with(PROMPT.as_bytes()) {
            let read = self.stdout.read_until(b'>', &mut text);
            let read = read.map_err(|e| BenchError::lab("read from testpmd", e))?;
            if read == 0 {
                let said = tail(&String::from_utf8_lossy(&text));
                return Err(BenchError::lab(format!("testpmd ended at {to:?}"), said));
            }
        }
        let text = String::from_utf8_lossy(&text).into_owned();
        let refused = ["Bad arguments", "Command not found", "Ambiguous command"];
        if refused.iter().any(|r| text.contains(r)) {
            return Err(BenchError::lab(format!("testpmd refuses {to:?}"), tail(&text)));
        }
        Ok(text)
    }

    fn all(&mut self, commands: &[&str]) -> Result<(), BenchError> {
        commands.iter().try_for_each(|c| self.ask(c).map(|_| ()))
    }

    /// Sends bursts on the first port, once.
    fn send(&mut self, bursts: u64) -> Result<(), BenchError> {
        let start = format!("start tx_first {bursts}");
        self.all(&["set portlist 0", "set fwd rxonly", &start, "stop"])
    }

    /// Takes what is under way; then the counters are final.
    fn drain(&mut self) -> Result<[Counters; 2], BenchError> {
        self.all(&["set portlist 0,1", "set fwd rxonly", "start"])?;
        std::thread::sleep(DRAIN);
        self.all(&["stop"])?;
        self.counters()
    }

    /// Sends single bursts until one arrives whole: a back end may take a second after we connected
    /// and drop or hold what comes before. Returns the counters of then.
    fn open(&mut self) -> Result<[Counters; 2], BenchError> {
        let until = Instant::now() + OPEN;
        let mut then = self.drain()?;
        loop {
            self.send(1)?;
            let now = self.drain()?;
            if between(&then, &now) == (BURST, BURST) {
                return Ok(now);
            }
            if Instant::now() > until {
                let (sent, received) = between(&then, &now);
                let why = format!("of {sent} frames {received} arrived, {OPEN:?} after the start");
                return Err(BenchError::lab("send frames through the back end", why));
            }
            then = now;
        }
    }

    fn counters(&mut self) -> Result<[Counters; 2], BenchError> {
        let text = self.ask("show port stats all")?;
        let ports = counters_of(&text, 0).zip(counters_of(&text, 1));
        let wrong = || BenchError::lab("read testpmd's counters", tail(&text));
        ports.map(|(a, b)| [a, b]).ok_or_else(wrong)
    }

    fn usage(&self) -> usage::Snapshot {
        usage::snapshot(&[self.child.id()])
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // It keeps nothing. Gone already is fine too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests;
