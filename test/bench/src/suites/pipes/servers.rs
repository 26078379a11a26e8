//! Part two: web servers as Debian has them, with the preload shim and without.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use super::bed::{Bed, SERVER};
use super::files::TAIL;
use super::http::Clients;
use super::meter::Sum;
use super::{Measured, Sample, Server, ServerLoad, Setup, with_repeats};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::order_for_round;
use crate::harness::steal_time;
use crate::harness::table::size_text;

/// Counter of the daemon.
const MOVED: &str = "millrace_pipe_moved_bytes_total";
/// Largest file with which the sides hardly differ where no neighbour is busy.
const PAIRED_BYTES: u64 = 4 << 20;
/// Pairs of processes in such a round: an even number, so that each side has each port as often.
const PAIRS: u32 = 4;
/// Turns of a side with such a pair: an even number, so that each side is first as often.
const TURNS: u32 = 16;
/// A turn's part of a load's time.
const TURN_PART: u32 = 16;
/// After a turn: for what the guest has to do behind the last byte.
const TURN_TAIL: Duration = Duration::from_millis(5);
/// Part of the measured time that a new process serves before, as a divisor: an emulated CPU
/// translates its code first.
const WARM_PART: u32 = 2;

impl Server {
    /// Port of the server: one of two, which the sides take by turns.
    fn port(self, second: bool) -> u16 {
        let first = match self {
            Server::Nginx => 8080,
            Server::Lighttpd => 8090,
        };
        first + u16::from(second)
    }

    /// Settings of the server. Both serve with `sendfile`, write no log and let connections live;
    /// nginx's limit of 2 MiB a call is off, with the shim and without.
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

/// The loads of part two.
pub struct Servers<'a> {
    bed: &'a Bed,
    setup: &'a Setup,
    /// Servers that start, with the shim or without.
    working: HashSet<(Server, bool)>,
}

/// Makes the files and starts the servers. One that does not start is noted and left out.
pub fn start<'a>(
    bed: &'a Bed,
    setup: &'a Setup,
    measured: &mut Measured,
    progress: &mut Progress,
) -> Result<Servers<'a>, BenchError> {
    let mut working = HashSet::new();
    if !setup.servers.is_empty() {
        progress.step("starting the web servers");
        bed.sh("mkdir -p /var/lib/nginx /var/log/nginx")?;
        for size_bytes in &setup.sizes_bytes {
            bed.fill(&format!("/mnt/{size_bytes}"), *size_bytes)?;
        }
    }
    for server in &setup.servers {
        for shim in [true, false] {
            let begin = |_: u32| begin_again(bed, setup, *server, (shim, shim));
            let name = (server.name(), side(shim));
            if with_repeats(name, 0, measured, progress, begin).is_some() {
                working.insert((*server, shim));
            }
        }
    }
    Ok(Servers { bed, setup, working })
}

/// Ends it, and starts it once more, with the shim or without, on its second port or its first;
/// returns where it listens. Where a program lies in memory changes an emulated CPU's speed: it
/// would be the same in all rounds, and taken for a difference of the sides. So would be what a
/// port's number does to a kernel's hash tables.
fn begin_again(
    bed: &Bed,
    setup: &Setup,
    server: Server,
    side: (bool, bool),
) -> Result<SocketAddr, BenchError> {
    end(bed, server);
    begin(bed, setup, server, side)
}

/// The first time there is none, nor after a start that failed.
fn end(bed: &Bed, server: Server) {
    let _ = bed.sh(&server.end());
}

fn begin(
    bed: &Bed,
    setup: &Setup,
    server: Server,
    (shim, second): (bool, bool),
) -> Result<SocketAddr, BenchError> {
    let port = server.port(second);
    let settings = format!("/tmp/{}.{port}.conf", server.name());
    bed.put(&settings, &server.settings(port))?;
    bed.sh(&server.script(shim, setup.min_bytes, &settings))?;
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
        for busy in order_for_round(&self.setup.servers_busy, round) {
            for server in order_for_round(&self.setup.servers, round) {
                for size_bytes in &self.setup.sizes_bytes {
                    self.cell(round, (busy, server, *size_bytes), measured, progress);
                }
            }
        }
        self.bed.busy(0)
    }

    /// Both sides.
    fn cell(
        &self,
        round: u32,
        (busy, server, size_bytes): (usize, Server, u64),
        measured: &mut Measured,
        progress: &mut Progress,
    ) {
        let case = case(server, size_bytes, busy);
        let has_both = [false, true].iter().all(|&shim| self.working.contains(&(server, shim)));
        let loads = if has_both && busy == 0 && size_bytes <= PAIRED_BYTES {
            let pairs = |_| self.pairs(round, server, size_bytes).map(|loads| loads.map(Some));
            let pairs = with_repeats((&case, "both"), round, measured, progress, pairs);
            pairs.unwrap_or_default()
        } else {
            self.one_by_one(round, (busy, server, size_bytes), measured, progress)
        };
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

    /// Each side alone, the other's process having ended.
    fn one_by_one(
        &self,
        round: u32,
        (busy, server, size_bytes): (usize, Server, u64),
        measured: &mut Measured,
        progress: &mut Progress,
    ) -> [Option<Load>; 2] {
        let case = case(server, size_bytes, busy);
        let mut loads = [None, None];
        for shim in order_for_round(&[true, false], round) {
            if !self.working.contains(&(server, shim)) {
                continue;
            }
            let load = |_| {
                self.bed.busy(0)?;
                let second = shim ^ is_swapped(round, 0);
                let to = begin_again(self.bed, self.setup, server, (shim, second))?;
                let mut clients = self.warm(to, size_bytes)?;
                self.load(&mut clients, busy, self.setup.length, TAIL)
            };
            let name = (case.as_str(), side(shim));
            loads[usize::from(shim)] = with_repeats(name, round, measured, progress, load);
        }
        loads
    }

    /// Both sides at once, by short turns. Where they hardly differ, this machine's speed differs
    /// more, from one moment to the next (who shares its caches changes it by a quarter), and so
    /// does where a program lies in memory: turns share the moment, and each pair of processes has
    /// places of its own.
    fn pairs(&self, round: u32, server: Server, size_bytes: u64) -> Result<[Load; 2], BenchError> {
        let (bed, setup) = (self.bed, self.setup);
        let mut loads = [Load::default(), Load::default()];
        bed.busy(0)?;
        for pair in 0..PAIRS {
            end(bed, server);
            let start = |shim| {
                let second = shim ^ is_swapped(round, pair);
                begin(bed, setup, server, (shim, second))
            };
            let to = [start(false)?, start(true)?];
            let mut clients = [self.warm(to[0], size_bytes)?, self.warm(to[1], size_bytes)?];
            for turn in 0..TURNS {
                for shim in order_for_round(&[true, false], round + pair + turn) {
                    let side = usize::from(shim);
                    let length = setup.length / TURN_PART;
                    let load = self.load(&mut clients[side], 0, length, TURN_TAIL)?;
                    loads[side] = std::mem::take(&mut loads[side]).and(load);
                }
            }
        }
        Ok(loads)
    }

    /// Clients that a new process has served for a while.
    fn warm(&self, to: SocketAddr, size_bytes: u64) -> Result<Clients, BenchError> {
        let (bed, setup) = (self.bed, self.setup);
        let path = format!("/{size_bytes}");
        let count = (setup.connections, size_bytes);
        let mut clients = Clients::open(bed.net(), to, &path, count)?;
        clients.run(bed.client_cpu(), setup.length / WARM_PART)?;
        Ok(clients)
    }

    fn load(
        &self,
        clients: &mut Clients,
        busy: usize,
        length: Duration,
        tail: Duration,
    ) -> Result<Load, BenchError> {
        let (bed, setup) = (self.bed, self.setup);
        let (meter, cpus) = (bed.meter(), [setup.cpus.0, setup.cpus.1]);
        let moved = bed.counter(MOVED)?;
        bed.busy(busy)?;
        let (before, steal) = (meter.snapshot()?, steal_time::read(&cpus));
        let answer = clients.run(bed.client_cpu(), length)?;
        std::thread::sleep(tail);
        let (after, stolen) = (meter.snapshot()?, steal_time::read(&cpus).since(&steal));
        bed.busy(0)?;
        let moved = bed.counter(MOVED)? - moved;
        let mut sum = Sum::default();
        meter.add(&mut sum, &before, &after, answer.client_ns);
        Ok(Load { requests: answer.requests, took: answer.took, moved, stolen, sum })
    }
}

/// Whether the sides swap their ports: from pair to pair, and from round to round.
fn is_swapped(round: u32, pair: u32) -> bool {
    (round + pair) % 2 == 1
}

/// Sum of turns.
#[derive(Debug, Default)]
struct Load {
    requests: u64,
    took: Duration,
    /// Bytes that pipes moved.
    moved: f64,
    /// Stolen time of all turns.
    stolen: f64,
    sum: Sum,
}

impl Load {
    fn and(self, other: Load) -> Load {
        let took = self.took + other.took;
        let stolen_s = |load: &Load| load.stolen * load.took.as_secs_f64();
        let stolen_s = stolen_s(&self) + stolen_s(&other);
        Load {
            requests: self.requests + other.requests,
            took,
            moved: self.moved + other.moved,
            stolen: stolen_s / took.as_secs_f64().max(1e-9),
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
    fn each_side_has_each_port_and_is_first_as_often() {
        for round in 0..8 {
            let swapped = (0..PAIRS).filter(|pair| is_swapped(round, *pair)).count();
            assert_eq!(swapped, PAIRS as usize / 2);
            let first =
                (0..TURNS).filter(|turn| order_for_round(&[true, false], round + turn)[0]).count();
            assert_eq!(first, TURNS as usize / 2);
        }
    }

    #[test]
    fn turns_add_up() {
        let turn = |requests, stolen| Load {
            requests,
            took: Duration::from_millis(500),
            moved: 100.0,
            stolen,
            ..Load::default()
        };
        let load = turn(30, 0.1).and(turn(10, 0.0));
        let told = load.told(1, (0, Server::Nginx, 10), true);
        assert_eq!((told.requests_per_s, told.piped, told.sample.stolen), (40.0, 0.5, 0.05));
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
