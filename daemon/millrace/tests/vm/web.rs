//! World of the tests of web servers: a VM with a server that has the preload shim, clients on the
//! host that compare every byte, and a load.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use lab::{AGENT_SERVICE, Daemon, Disk, Guest, Image, Lab, Net, Running, Vm, Vsock, apt};
use lab_agent::stream::Stream;

use crate::common::{LONG, MIB, boot, daemon};

const READY: Duration = Duration::from_secs(60);
/// Nothing takes so long, under emulation with a thousand connections, when all is well.
pub const PATIENCE: Duration = Duration::from_secs(300);
const UPLINK: &str = "[switch.uplink]\ntap = \"up0\"\nbridge = \"br0\"\n";
const SERVER: &str = "10.0.0.1:80";

/// Calls of fewer bytes the shim does not look at.
const SHIM_BYTES: u64 = 65_536;

/// Files by their length in bytes, which is their name and their seed. The shim pipes from 65,536
/// on.
pub const SMALL: [u64; 3] = [4096, 20_000, 65_535];
pub const LARGE: [u64; 5] = [65_536, 300_001, 1 << 20, 5_000_000, 16 << 20];

/// Config of nginx: its workers open the files; one worker has all connections, and patience as the
/// clients have.
pub const NGINX: &str = "daemon off; user root root; worker_processes 1; pid /run/nginx.pid;
    error_log /tmp/error.log notice; worker_rlimit_nofile 16384;
    events { worker_connections 4096; multi_accept on; }
    http {
        access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
        keepalive_timeout 600s; send_timeout 600s; client_header_timeout 600s;
        server { listen 80 backlog=4096; root /mnt; }
    }";

/// One VM with a server's programs and a disk of files.
pub struct World {
    pub guest: Guest,
    pub daemon: Daemon,
    pub lab: Lab,
}

pub fn world() -> World {
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
    pub fn sh(&self, script: &str) {
        self.guest.run_for(script, LONG).unwrap().ok().unwrap();
    }

    pub fn agent(&self) -> Running<'_> {
        let mut agent = self.guest.spawn(&format!("{AGENT_SERVICE} 2>&1")).unwrap();
        agent.wait_line("connected", READY).unwrap();
        agent
    }

    /// Starts a server with the shim, which pipes all that it looks at. (What pays under emulation
    /// is more than most files have.)
    pub fn serve(&self, command: &str, config: &str) -> Running<'_> {
        self.serve_from(SHIM_BYTES, command, config)
    }

    /// The same, from so many bytes on.
    pub fn serve_from(&self, min_bytes: u64, command: &str, config: &str) -> Running<'_> {
        self.guest.put_bytes("/tmp/config", 0o644, config.as_bytes()).unwrap();
        let folders = "mkdir -p /var/lib/nginx /var/log/nginx";
        let preload = "LD_PRELOAD=/usr/lib/libmillrace-preload.so";
        let preload = format!("MILLRACE_MIN_BYTES={min_bytes} {preload}");
        let server = self.guest.spawn(&format!("{folders}; {preload} {command} 2>&1")).unwrap();
        let until = Instant::now() + READY;
        while self.lab.net().inside(|| TcpStream::connect(SERVER).is_err()).unwrap() {
            assert!(Instant::now() < until, "{command} does not listen");
            thread::sleep(Duration::from_millis(100));
        }
        server
    }

    pub fn pipes(&self, counter: &str, labels: &[(&str, &str)]) -> f64 {
        let labels = [&[("vm", "srv")], labels].concat();
        self.daemon.metric_sum(&format!("millrace_pipe_{counter}_total"), &labels).unwrap()
    }

    pub fn complete(&self) -> f64 {
        self.pipes("ended", &[("reason", "complete")])
            + self.pipes("ended", &[("reason", "end_of_file")])
    }

    pub fn moved(&self) -> f64 {
        self.pipes("moved_bytes", &[])
    }

    pub fn reasons(&self) -> String {
        let metrics = self.daemon.metrics().unwrap();
        let ended = |line: &&str| {
            line.starts_with("millrace_pipe_") && !line.contains("bucket") && !line.ends_with(" 0")
        };
        metrics.lines().filter(ended).collect::<Vec<_>>().join("\n")
    }
}

/// A keep-alive connection.
pub struct Client(pub BufReader<TcpStream>);

impl Client {
    pub fn new() -> Self {
        let stream = TcpStream::connect(SERVER).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn ask(&mut self, path: &str) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: srv\r\n\r\n");
        self.0.get_mut().write_all(request.as_bytes()).unwrap();
    }

    /// The length of the body that follows.
    pub fn read_header(&mut self) -> u64 {
        let (mut line, mut len_bytes) = (String::new(), None);
        self.0.read_line(&mut line).unwrap();
        assert!(line.starts_with("HTTP/1.1 200 "), "{line:?}");
        while line != "\r\n" {
            line.clear();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "a header without an end");
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                len_bytes = Some(value.trim().parse().unwrap());
            }
        }
        len_bytes.unwrap()
    }

    /// A file that never changes, compared byte by byte.
    pub fn read_body(&mut self, name: u64) {
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

    pub fn get(&mut self, name: u64) {
        self.ask(&format!("/{name}"));
        assert_eq!(self.read_header(), name);
        self.read_body(name);
    }
}

/// Work for `wrk`.
pub struct Load<'a> {
    pub connections: usize,
    pub secs: u32,
    /// Each connection asks for one after the other.
    pub paths: &'a [String],
}

/// Loads the server; what it tells, for [`assert_served`].
pub fn wrk(world: &World, load: &Load) -> String {
    let unpacked = |package| apt::unpacked(world.lab.cache(), package).unwrap();
    let (program, library) = (unpacked("wrk").join("usr/bin/wrk"), unpacked("libluajit-5.1-2"));
    let script = world.lab.run_folder().join("wrk.lua");
    let requests = format!(
        "local paths, at = {{ \"{}\" }}, 0\n\
         request = function() at = at + 1; return wrk.format(\"GET\", paths[at % #paths + 1]) end\n",
        load.paths.join("\", \"")
    );
    std::fs::write(&script, requests).unwrap();
    let output = world
        .lab
        .net()
        .command(program.to_str().unwrap())
        .args(["-t", "2", "-c", &load.connections.to_string(), "-d", &format!("{}s", load.secs)])
        .args(["--timeout", "120s", "-s", script.to_str().unwrap(), &format!("http://{SERVER}")])
        .env("LD_LIBRARY_PATH", library.join("usr/lib/x86_64-linux-gnu"))
        .output()
        .unwrap();
    let [told, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{told}{errors}{}\n", output.status)
}

/// Every answer came and was whole; late ones may be late.
pub fn assert_served(told: &str) {
    println!("{told}");
    let failed = |line: &str| {
        line.contains("Non-2xx")
            || line.contains("Socket errors") && !line.contains("connect 0, read 0, write 0,")
    };
    assert!(told.contains("requests in") && told.contains("exit status: 0"), "{told}");
    assert!(!told.lines().any(failed), "{told}");
}
