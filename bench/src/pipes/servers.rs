//! Part two: web servers as Debian has them, with the preload shim and without.

use std::collections::HashMap;
use std::net::SocketAddr;

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

    fn port(self, shim: bool) -> u16 {
        let first = match self {
            Server::Nginx => 8080,
            Server::Lighttpd => 8090,
        };
        first + u16::from(shim)
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
    /// Those that run, with the shim or without.
    running: HashMap<(Server, bool), SocketAddr>,
}

/// Makes the files and starts the servers. One that does not start is noted and left out.
pub fn start<'a>(
    world: &'a World,
    setup: &'a Setup,
    measured: &mut Measured,
    progress: &mut Progress,
) -> Result<Servers<'a>, BenchError> {
    let mut running = HashMap::new();
    if !setup.servers.is_empty() {
        progress.step("starting the web servers");
        world.sh("mkdir -p /var/lib/nginx /var/log/nginx")?;
        for size_bytes in &setup.sizes_bytes {
            world.fill(&format!("/mnt/{size_bytes}"), *size_bytes)?;
        }
    }
    for server in &setup.servers {
        for shim in [true, false] {
            let begin = |_: u32| begin(world, setup, *server, shim);
            let name = (server.name(), side(shim));
            if with_repeats(name, 0, measured, progress, begin).is_some() {
                let to = format!("{SERVER}:{}", server.port(shim)).parse::<SocketAddr>();
                let to = to.map_err(|e| BenchError::lab("address", e))?;
                running.insert((*server, shim), to);
            }
        }
    }
    Ok(Servers { world, setup, running })
}

fn begin(world: &World, setup: &Setup, server: Server, shim: bool) -> Result<(), BenchError> {
    let port = server.port(shim);
    let settings = format!("/tmp/{}.{port}.conf", server.name());
    world.put(&settings, &server.settings(port))?;
    world.sh(&server.script(shim, setup.min_bytes, &settings)).map(|_| ())
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

    /// Both sides.
    fn cell(
        &self,
        round: u32,
        (busy, server, size_bytes): (usize, Server, u64),
        measured: &mut Measured,
        progress: &mut Progress,
    ) {
        let case = case(server, size_bytes, busy);
        if ![true, false].iter().any(|shim| self.running.contains_key(&(server, *shim))) {
            return;
        }
        let mut told = Vec::new();
        for shim in turned(&[true, false], round) {
            let Some(to) = self.running.get(&(server, shim)) else { continue };
            let load = |_| self.load(*to, busy, size_bytes);
            let name = (case.as_str(), side(shim));
            let Some((requests_per_s, piped, sample)) =
                with_repeats(name, round, measured, progress, load)
            else {
                continue;
            };
            told.push(format!("{} {requests_per_s:.1}", side(shim)));
            measured.servers.push(ServerLoad {
                round,
                busy,
                server,
                size_bytes,
                shim,
                requests_per_s,
                piped,
                sample,
            });
        }
        progress.step(&format!("{case}: requests/s: {}", told.join(", ")));
    }

    /// Requests per second, which part of the bytes went through pipes, and the rest.
    fn load(
        &self,
        to: SocketAddr,
        busy: usize,
        size_bytes: u64,
    ) -> Result<(f64, f64, Sample), BenchError> {
        let (world, setup) = (self.world, self.setup);
        world.busy(0)?;
        let path = format!("/{size_bytes}");
        let count = (setup.connections, size_bytes);
        let mut clients = Clients::open(world.net(), to, &path, count)?;
        let (meter, cpus) = (world.meter(), [setup.cpus.0, setup.cpus.1]);
        let moved = world.counter(MOVED)?;
        world.busy(busy)?;
        let (before, steal) = (meter.snapshot()?, steal::read(&cpus));
        let answer = clients.run(world.client_cpu(), setup.length)?;
        std::thread::sleep(TAIL);
        let (after, stolen) = (meter.snapshot()?, steal::read(&cpus).since(&steal));
        world.busy(0)?;
        let moved = world.counter(MOVED)? - moved;
        let bytes = answer.requests * size_bytes;
        let mut sum = Sum::default();
        meter.add(&mut sum, &before, &after, answer.client_ns);
        let took_s = answer.took.as_secs_f64().max(1e-9);
        let (mb_per_s, cpu) = (bytes as f64 / 1e6 / took_s, sum.per_mb(bytes));
        let piped = (moved / bytes as f64).min(1.0);
        Ok((
            answer.requests as f64 / took_s,
            piped,
            Sample { mb_per_s, cpu, stolen, foreign: sum.foreign() },
        ))
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
