//! Unmodified web servers with the preload shim: their files go by pipes, and nobody notices.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lab::{Daemon, Disk, Guest, Image, Lab, Net, Running, Vm, Vsock, apt};
use lab_agent::stream::Stream;

use crate::common::{LONG, MIB, alone, boot, daemon};

const READY: Duration = Duration::from_secs(60);
/// Nothing takes so long, under emulation with a hundred connections, when all is well.
const PATIENCE: Duration = Duration::from_secs(120);
const UPLINK: &str = "[switch.uplink]\ntap = \"up0\"\nbridge = \"br0\"\n";
const SERVER: &str = "10.0.0.1:80";

/// Files by their length in bytes, which is their name and their seed. The shim pipes from 65,536 on.
const SMALL: [u64; 3] = [4096, 20_000, 65_535];
const LARGE: [u64; 5] = [65_536, 300_001, 1 << 20, 5_000_000, 16 << 20];

/// Its workers open the files; one worker has all connections.
const NGINX: &str = "daemon off; user root root; worker_processes 1; pid /run/nginx.pid;
    error_log stderr notice;
    events { worker_connections 1024; }
    http {
        access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
        server { listen 80; root /mnt; }
    }";

const LIGHTTPD: &str = r#"
    server.document-root = "/mnt"
    server.port = 80
    server.compat-module-load = "disable"
    server.modules = ( "mod_staticfile" )
    server.network-backend = "sendfile"
    server.event-handler = "linux-sysepoll"
    server.max-keep-alive-requests = 1000000
"#;

/// One VM with a server's programs and a disk of files.
struct World {
    guest: Guest,
    daemon: Daemon,
    lab: Lab,
}

fn world() -> World {
    let lab = Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    let image = lab.run_folder().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(256 * MIB).unwrap();
    let vm = Vm::new("srv", "")
        .net("n", "switch = \"lan\"")
        .disk("d", &format!("format = \"raw\"\npath = {image:?}"))
        .vsock(7)
        .more("[vm.pipes]\n");
    let daemon = daemon("d").switch("lan", UPLINK).vm(vm).start(&lab).unwrap();
    lab.net().address("br0", "10.0.0.254/24").unwrap();
    let recipe = Image::builder()
        .guest_pieces()
        .disk_tools()
        .module("ext4")
        .packaged("nginx", "/usr/sbin/nginx")
        .packaged("lighttpd", "/usr/sbin/lighttpd");
    let builder = Guest::builder("srv")
        .memory_mb(384)
        .image(recipe)
        .net(Net::vhost_user(daemon.socket("srv", "n")))
        .address("10.0.0.1/24")
        .disk(Disk::vhost_user(daemon.socket("srv", "d")))
        .vsock(Vsock::vhost_user(daemon.socket("srv", "vsock")));
    let [guest] = boot(&lab, [builder]);
    let world = World { guest, daemon, lab };
    world.sh("mke2fs -q -t ext4 /dev/vda && mkdir -p /mnt && mount /dev/vda /mnt");
    for len_bytes in SMALL.into_iter().chain(LARGE) {
        world.sh(&format!("agent fill /mnt/{len_bytes} {len_bytes} {len_bytes}"));
    }
    world
}

impl World {
    fn sh(&self, script: &str) {
        self.guest.run_for(script, LONG).unwrap().ok().unwrap();
    }

    fn agent(&self) -> Running<'_> {
        let mut agent = self.guest.spawn("millrace-agent 2>&1").unwrap();
        agent.wait_line("connected", READY).unwrap();
        agent
    }

    /// Starts a server with the shim.
    fn serve(&self, command: &str, config: &str) -> Running<'_> {
        self.guest.put_bytes("/tmp/config", 0o644, config.as_bytes()).unwrap();
        let folders = "mkdir -p /var/lib/nginx /var/log/nginx";
        // What pays under emulation is more than the files have.
        let preload = "MILLRACE_MIN_BYTES=65536 LD_PRELOAD=/usr/lib/libmillrace-preload.so";
        let server = self.guest.spawn(&format!("{folders}; {preload} {command} 2>&1")).unwrap();
        let until = Instant::now() + READY;
        while self.lab.net().inside(|| TcpStream::connect(SERVER).is_err()).unwrap() {
            assert!(Instant::now() < until, "{command} does not listen");
            thread::sleep(Duration::from_millis(100));
        }
        server
    }

    fn pipes(&self, counter: &str, labels: &[(&str, &str)]) -> f64 {
        let labels = [&[("vm", "srv")], labels].concat();
        self.daemon.metric_sum(&format!("millrace_pipe_{counter}_total"), &labels).unwrap()
    }

    fn complete(&self) -> f64 {
        self.pipes("ended", &[("reason", "complete")])
            + self.pipes("ended", &[("reason", "end_of_file")])
    }

    fn moved(&self) -> f64 {
        self.pipes("moved_bytes", &[])
    }

    fn reasons(&self) -> String {
        let metrics = self.daemon.metrics().unwrap();
        let ended = |line: &&str| {
            line.starts_with("millrace_pipe_") && !line.contains("bucket") && !line.ends_with(" 0")
        };
        metrics.lines().filter(ended).collect::<Vec<_>>().join("\n")
    }
}

/// A keep-alive connection.
struct Client(BufReader<TcpStream>);

impl Client {
    fn new() -> Self {
        let stream = TcpStream::connect(SERVER).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    fn ask(&mut self, name: u64) {
        let request = format!("GET /{name} HTTP/1.1\r\nHost: srv\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
    }

    fn read_header(&mut self, name: u64) {
        let (mut line, mut len_bytes) = (String::new(), 0);
        self.0.read_line(&mut line).unwrap();
        assert!(line.starts_with("HTTP/1.1 200 "), "{line}");
        while line != "\r\n" {
            line.clear();
            self.0.read_line(&mut line).unwrap();
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                len_bytes = value.trim().parse().unwrap();
            }
        }
        assert_eq!(len_bytes, name);
    }

    /// Compared byte by byte.
    fn read_body(&mut self, name: u64) {
        let (mut content, mut left) = (Stream::new(name), name as usize);
        let (mut got, mut want) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        while left > 0 {
            let n = left.min(got.len());
            self.0.read_exact(&mut got[..n]).unwrap();
            content.fill(&mut want[..n]);
            let wrong = got[..n].iter().zip(&want[..n]).position(|(g, w)| g != w);
            assert_eq!(wrong, None, "/{name}, {left} bytes before the end");
            left -= n;
        }
    }

    fn get(&mut self, name: u64) {
        self.ask(name);
        self.read_header(name);
        self.read_body(name);
    }
}

/// So many clients at a time, each asking for all files over one connection, each beginning elsewhere.
fn clients(world: &World, count: usize, rounds: usize, names: &[u64]) {
    let run = |first: usize| {
        let mut client = Client::new();
        for at in 0..rounds * names.len() {
            client.get(names[(first + at) % names.len()]);
        }
    };
    thread::scope(|scope| {
        for first in 0..count {
            scope.spawn(move || world.lab.net().inside(|| run(first)).unwrap());
        }
    });
}

/// A client that reads the header and then nothing, until it is told; then all is there.
fn with_a_lazy_client(world: &World, work: impl FnOnce()) {
    let (name, ready, go_on) = (LARGE[4], AtomicBool::new(false), AtomicBool::new(false));
    let wait_for = |flag: &AtomicBool| {
        while !flag.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(10));
        }
    };
    thread::scope(|scope| {
        let lazy = scope.spawn(|| {
            world.lab.net().inside(|| {
                let mut client = Client::new();
                client.ask(name);
                client.read_header(name);
                ready.store(true, Ordering::Release);
                wait_for(&go_on);
                client.read_body(name);
                client.get(name);
            })
        });
        wait_for(&ready);
        work();
        go_on.store(true, Ordering::Release);
        lazy.join().unwrap().unwrap();
    });
}

/// A hundred connections for some seconds: no error.
fn wrk(world: &World, name: u64) {
    let unpacked = |package| apt::unpacked(world.lab.cache(), package).unwrap();
    let (program, library) = (unpacked("wrk").join("usr/bin/wrk"), unpacked("libluajit-5.1-2"));
    let url = format!("http://{SERVER}/{name}");
    let output = world
        .lab
        .net()
        .command(program.to_str().unwrap())
        .args(["-t", "2", "-c", "100", "-d", "5s", "--timeout", "60s", &url])
        .env("LD_LIBRARY_PATH", library.join("usr/lib/x86_64-linux-gnu"))
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    println!("{told}");
    let errors = ["Socket errors", "Non-2xx"].iter().any(|error| told.contains(error));
    assert!(output.status.success() && told.contains("requests in") && !errors, "{told}");
}

fn try_server(command: &str, config: &str) {
    let _alone = alone();
    let world = world();
    let _agent = world.agent();
    let server = world.serve(command, config);
    clients(&world, 4, 2, &SMALL);
    assert_eq!(world.moved(), 0.0);

    let large = LARGE.iter().sum::<u64>() as f64;
    clients(&world, 1, 2, &LARGE);
    println!("one client:\n{}", world.reasons());
    assert!(world.complete() >= 2.0 * LARGE.len() as f64);
    // What is left of a file behind the server's parts of it may be below the threshold.
    assert!(world.moved() >= 0.95 * 2.0 * large && world.moved() <= 2.0 * large);

    let all = [&SMALL[..], &LARGE].concat();
    with_a_lazy_client(&world, || {
        clients(&world, 8, 1, &all);
        // Longer than the shim waits for a part.
        thread::sleep(Duration::from_secs(6));
        clients(&world, 8, 1, &all);
    });
    println!("many clients:\n{}", world.reasons());
    assert!(world.moved() >= 0.5 * 20.0 * large);
    wrk(&world, LARGE[1]);
    clients(&world, 2, 1, &all);
    println!("in all:\n{}", world.reasons());
    server.kill().unwrap();
}

#[test]
fn nginx_pipes_its_files() {
    try_server("nginx -c /tmp/config", NGINX);
}

#[test]
fn lighttpd_pipes_its_files() {
    try_server("lighttpd -D -f /tmp/config", LIGHTTPD);
}
