//! Part two: web servers as Debian has them, with the preload shim and without.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::files::TAIL;
use super::http::Clients;
use super::meter::Sum;
use super::world::{SERVER, World};
use super::{Measured, Sample, ServerLoad, Setup, turned, with_repeats};
use crate::error::BenchError;
use crate::progress::Progress;
use crate::steal;

/// Counter of the daemon.
const MOVED: &str = "millrace_pipe_moved_bytes_total";
/// Where no neighbour is busy and files are not larger than this, the sides hardly differ.
const SLICED_BYTES: u64 = 4 << 20;
/// Slices of a side in such a round: an even number, so that each side is first as often.
const SLICES: u32 = 16;
/// A slice's part of a load's time.
const SLICE_PART: u32 = 4;
/// So long a part of what is measured a new process serves before: an emulated CPU translates its code first.
const WARM_PART: u32 = 2;

/// A web server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Server {
    /// nginx, one worker.
    Nginx,
    /// lighttpd.
    Lighttpd,
}

impl Server {
    /// As in results.
    pub fn name(self) -> &'static str {
        match self {
            Server::Nginx => "nginx",
            Server::Lighttpd => "lighttpd",
        }
    }

    /// Its two ports, which the sides take by turns.
    fn port(self, second: bool) -> u16 {
        let first = match self {
            Server::Nginx => 8080,
            Server::Lighttpd => 8090,
        };
        first + u16::from(second)
    }

    /// Its settings. Both serve with `sendfile`, write no log and let connections live; nginx's limit
    /// of 2 MiB a call is off, with the shim and without.
    fn settings(self, port: u16) -> String {
        match self {
            Server::Nginx => format!(
                "user root; worker_processes 1; pid /run/nginx.{port}.pid;\n\
                 error_log /tmp/nginx.{port}.log;\n\
                 events {{ worker_connections 1024; }}\n\
                 http {{ access_log off; sendfile on; sendfile_max_chunk 0; tcp_nopush on;\n\
                 keepalive_timeout 3600; keepalive_requests 1000000000;\n\
                 server {{ listen {port}; root /mnt; }} }}\n"
            ),
            Server::Lighttpd => format!(
                "server.document-root = \"/mnt\"\nserver.port = {port}\n\
                 server.errorlog = \"/tmp/lighttpd.{port}.log\"\n\
                 server.pid-file = \"/run/lighttpd.{port}.pid\"\n\
                 server.compat-module-load = \"disable\"\n\
                 server.modules = (\"mod_staticfile\")\n\
                 server.network-backend = \"sendfile\"\n\
                 server.max-keep-alive-requests = 65535\nserver.max-keep-alive-idle = 3600\n"
            ),
        }
    }

    /// Starts it in the background with settings from a file; it listens when this ends.
    fn script(self, shim: bool, min_bytes: Option<u64>, settings: &str) -> String {
        let min = min_bytes.map_or(String::new(), |bytes| format!("MILLRACE_MIN_BYTES={bytes} "));
        let preload = match shim {
            true => format!("{min}LD_PRELOAD=/usr/lib/libmillrace-preload.so "),
            false => String::new(),
        };
        let start = match self {
            Server::Nginx => "-c",
            Server::Lighttpd => "-f",
        };
        format!("{preload}{} {start} {settings}", self.program())
    }

    /// Ends it, on both ports; all its processes have gone when this ends.
    fn end(self) -> String {
        let files =
            [false, true].map(|second| format!("/run/{}.{}.pid", self.name(), self.port(second)));
        format!(
            "for file in {}; do pid=$(cat $file) && kill $pid && \
             while kill -0 $pid 2> /dev/null; do usleep 1000; done; done",
            files.join(" ")
        )
    }

    /// The program, in the package of its name.
    pub fn program(self) -> &'static str {
        match self {
            Server::Nginx => "/usr/sbin/nginx",
            Server::Lighttpd => "/usr/sbin/lighttpd",
        }
    }
}

/// Bytes of all files of part two.
pub fn all_bytes(setup: &Setup) -> u64 {
    if setup.servers.is_empty() { 0 } else { setup.sizes_bytes.iter().sum() }
}

/// The loads of part two.
pub struct Servers<'a> {
    world: &'a World,
    setup: &'a Setup,
    /// Those that start, with the shim or without.
    working: HashSet<(Server, bool)>,
}

/// Makes the files and starts the servers. One that does not start is noted and left out.
pub fn start<'a>(
    world: &'a World,
    setup: &'a Setup,
    measured: &mut Measured,
    progress: &mut Progress,
) -> Result<Servers<'a>, BenchError> {
    let mut working = HashSet::new();
    if !setup.servers.is_empty() {
        progress.step("starting the web servers");
        world.sh("mkdir -p /var/lib/nginx /var/log/nginx")?;
        for size_bytes in &setup.sizes_bytes {
            world.fill(&format!("/mnt/{size_bytes}"), *size_bytes)?;
        }
    }
    for server in &setup.servers {
        for shim in [true, false] {
            let begin = |_: u32| begin_again(world, setup, *server, (shim, shim));
            let name = (server.name(), side(shim));
            if with_repeats(name, 0, measured, progress, begin).is_some() {
                working.insert((*server, shim));
            }
        }
    }
    Ok(Servers { world, setup, working })
}

/// Ends it, and starts it once more, with the shim or without, on its second port or its first; returns where
/// it listens. Where a program lies in memory changes an emulated CPU's speed by a tenth: it would be the same
/// in all rounds, and taken for a difference of the sides. So would be what a port's number does to a kernel's
/// hash tables.
fn begin_again(
    world: &World,
    setup: &Setup,
    server: Server,
    (shim, second): (bool, bool),
) -> Result<SocketAddr, BenchError> {
    // The first time there is none, and after a start that failed.
    let _ = world.sh(&server.end());
    let port = server.port(second);
    let settings = format!("/tmp/{}.{port}.conf", server.name());
    world.put(&settings, &server.settings(port))?;
    world.sh(&server.script(shim, setup.min_bytes, &settings))?;
    format!("{SERVER}:{port}").parse().map_err(|e| BenchError::lab("address", e))
}

impl Servers<'_> {
    /// Everything once.
    pub fn round(
        &self,
        round: u32,
        measured: &mut Measured,
        progress: &mut Progress,
    ) -> Result<(), BenchError> {
        for busy in turned(&self.setup.servers_busy, round) {
            for server in turned(&self.setup.servers, round) {
                for size_bytes in &self.setup.sizes_bytes {
                    self.cell(round, (busy, server, *size_bytes), measured, progress);
                }
            }
        }
        self.world.busy(0)
    }

    /// Both sides, in slices by turns.
    fn cell(
        &self,
        round: u32,
        (busy, server, size_bytes): (usize, Server, u64),
        measured: &mut Measured,
        progress: &mut Progress,
    ) {
        let case = case(server, size_bytes, busy);
        let (turns, parts) = turns(round, busy, size_bytes);
        let length = self.setup.length / parts;
        let mut loads =
            [false, true].map(|shim| self.working.contains(&(server, shim)).then(Load::default));
        for (turn, shim) in turns.into_iter().enumerate() {
            let Some(load) = loads[usize::from(shim)].take() else { continue };
            let slice = |_| {
                self.world.busy(0)?;
                let second = shim ^ is_swapped(round, turn);
                let to = begin_again(self.world, self.setup, server, (shim, second))?;
                self.slice(to, (busy, size_bytes), length)
            };
            let name = (case.as_str(), side(shim));
            let slice = with_repeats(name, round, measured, progress, slice);
            loads[usize::from(shim)] = slice.map(|slice| load.and(slice));
        }
        let mut told = Vec::new();
        for (shim, load) in [false, true].into_iter().zip(loads) {
            let Some(load) = load else { continue };
            let load = load.told(round, (busy, server, size_bytes), shim);
            told.push(format!("{} {:.1}", side(shim), load.requests_per_s));
            measured.servers.push(load);
        }
        if !told.is_empty() {
            progress.step(&format!("{case}: requests/s: {}", told.join(", ")));
        }
    }

    fn slice(
        &self,
        to: SocketAddr,
        (busy, size_bytes): (usize, u64),
        length: Duration,
    ) -> Result<Load, BenchError> {
        let (world, setup) = (self.world, self.setup);
        let path = format!("/{size_bytes}");
        let count = (setup.connections, size_bytes);
        let mut clients = Clients::open(world.net(), to, &path, count)?;
        clients.run(world.client_cpu(), length / WARM_PART)?;
        let (meter, cpus) = (world.meter(), [setup.cpus.0, setup.cpus.1]);
        let moved = world.counter(MOVED)?;
        world.busy(busy)?;
        let (before, steal) = (meter.snapshot()?, steal::read(&cpus));
        let answer = clients.run(world.client_cpu(), length)?;
        std::thread::sleep(TAIL);
        let (after, stolen) = (meter.snapshot()?, steal::read(&cpus).since(&steal));
        world.busy(0)?;
        let moved = world.counter(MOVED)? - moved;
        let mut sum = Sum::default();
        meter.add(&mut sum, &before, &after, answer.client_ns);
        Ok(Load { requests: answer.requests, took: answer.took, moved, stolen, sum })
    }
}

/// Whose slices of a round come when, and which part of a load's time each takes. Where the sides hardly
/// differ, this machine's speed and where a program lies in memory differ more: there they take turns often,
/// each in a new process, so that a steady change is in both alike.
fn turns(round: u32, busy: usize, size_bytes: u64) -> (Vec<bool>, u32) {
    let sliced = busy == 0 && size_bytes <= SLICED_BYTES;
    let (count, parts) = if sliced { (SLICES, SLICE_PART) } else { (1, 1) };
    ((0..count).flat_map(|slice| turned(&[true, false], round + slice)).collect(), parts)
}

/// Whether the sides swap their ports: in every other group of four slices, in which each side has two, and
/// from round to round.
fn is_swapped(round: u32, turn: usize) -> bool {
    (round as usize + turn / 4) % 2 == 1
}

/// What slices add up to.
#[derive(Debug, Default)]
struct Load {
    requests: u64,
    took: Duration,
    /// Bytes that pipes moved.
    moved: f64,
    /// Of the slice that lost most.
    stolen: f64,
    sum: Sum,
}

impl Load {
    fn and(self, other: Load) -> Load {
        Load {
            requests: self.requests + other.requests,
            took: self.took + other.took,
            moved: self.moved + other.moved,
            stolen: self.stolen.max(other.stolen),
            sum: self.sum.and(&other.sum),
        }
    }

    fn told(
        &self,
        round: u32,
        (busy, server, size_bytes): (usize, Server, u64),
        shim: bool,
    ) -> ServerLoad {
        let bytes = self.requests * size_bytes;
        let took_s = self.took.as_secs_f64().max(1e-9);
        ServerLoad {
            round,
            busy,
            server,
            size_bytes,
            shim,
            requests_per_s: self.requests as f64 / took_s,
            piped: (self.moved / (bytes as f64).max(1.0)).min(1.0),
            sample: Sample {
                mb_per_s: bytes as f64 / 1e6 / took_s,
                cpu: self.sum.per_mb(bytes),
                stolen: self.stolen,
                foreign: self.sum.foreign(),
            },
        }
    }
}

/// Name of a side, as in results.
pub fn side(shim: bool) -> &'static str {
    if shim { "pipe" } else { "sendfile" }
}

/// `4k`, `1m`.
pub fn size_text(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b.is_multiple_of(1 << 20) => format!("{}m", b >> 20),
        b if b >= 1 << 10 && b.is_multiple_of(1 << 10) => format!("{}k", b >> 10),
        b => b.to_string(),
    }
}

/// The row's name.
pub fn case(server: Server, size_bytes: u64, busy: usize) -> String {
    format!("{}_{}_{busy}", server.name(), size_text(size_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_cases_have_short_names() {
        let names = [4 << 10, 256 << 10, 1 << 20, 64 << 20, 1500].map(size_text);
        assert_eq!(names, ["4k", "256k", "1m", "64m", "1500"]);
        assert_eq!(case(Server::Lighttpd, 1 << 20, 3), "lighttpd_1m_3");
    }

    #[test]
    fn sides_take_turns_so_that_nobody_gains_by_a_steady_change() {
        assert_eq!(turns(0, 1, SLICED_BYTES), (vec![true, false], 1));
        assert_eq!(turns(0, 0, SLICED_BYTES + 1), (vec![true, false], 1));
        for round in 0..8 {
            let (order, parts) = turns(round, 0, SLICED_BYTES);
            let at =
                |side| order.iter().zip(0..).filter(move |(s, _)| **s == side).map(|(_, at)| at);
            assert_eq!((order.len(), parts), (2 * SLICES as usize, SLICE_PART));
            let sum = |side| at(side).sum::<u32>();
            assert_eq!(sum(true), sum(false), "{order:?}");
            let swapped = |side| at(side).filter(|at| is_swapped(round, *at as usize)).count();
            assert_eq!([swapped(true), swapped(false)], [SLICES as usize / 2; 2], "{order:?}");
        }
    }

    #[test]
    fn slices_add_up() {
        let slice = |requests, stolen| Load {
            requests,
            took: Duration::from_millis(500),
            moved: 100.0,
            stolen,
            ..Load::default()
        };
        let load = slice(30, 0.1).and(slice(10, 0.0));
        let told = load.told(1, (0, Server::Nginx, 10), true);
        assert_eq!((told.requests_per_s, told.piped, told.sample.stolen), (40.0, 0.5, 0.1));
    }

    #[test]
    fn only_the_shims_server_is_preloaded_and_no_two_share_a_port() {
        let all = [Server::Nginx, Server::Lighttpd];
        let mut ports: Vec<u16> = all.iter().flat_map(|s| [s.port(true), s.port(false)]).collect();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 4);
        for server in all {
            let preload = "LD_PRELOAD=/usr/lib/libmillrace-preload.so ";
            let plain = server.script(false, Some(5), "/x");
            assert!(plain.starts_with(server.program()) && plain.ends_with(" /x"), "{plain}");
            assert_eq!(server.script(true, None, "/x"), format!("{preload}{plain}"));
            let set = format!("MILLRACE_MIN_BYTES=5 {preload}{plain}");
            assert_eq!(server.script(true, Some(5), "/x"), set);
            assert!(server.settings(8123).contains("8123"));
        }
    }
}
