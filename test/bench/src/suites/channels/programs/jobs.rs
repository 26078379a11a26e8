//! Each program: its files, how its server starts, its loads, and how its client's words are read.

use lab::ImageBuilder;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A server with its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// Redis and redis-benchmark.
    Redis,
    /// Web server nginx, with wrk.
    Nginx,
    /// Stream of iperf3.
    Iperf3,
    /// PostgreSQL and pgbench.
    Postgres,
    /// The kernel's NFS server and client.
    Nfs,
}

/// Answer of a client.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answer {
    /// Requests per second, or MB/s.
    pub value: f64,
    /// Latency of a request, µs: the median, or the mean of a program that tells none.
    pub latency_us: Option<f64>,
}

/// A load of a program.
pub struct Job {
    /// The row's name.
    pub case: &'static str,
    /// Unit of the value.
    pub unit: &'static str,
    /// Runs the client against an address for about so many seconds.
    pub script: fn(&str, f64) -> String,
    /// Reads what it printed.
    pub read: fn(&str) -> Option<Answer>,
    /// Description of the load: size and connections.
    pub mode: &'static str,
}

impl Program {
    /// All that run.
    pub const ALL: [Program; 5] =
        [Program::Redis, Program::Nginx, Program::Iperf3, Program::Postgres, Program::Nfs];

    /// Name of the program in results.
    pub fn name(self) -> &'static str {
        match self {
            Program::Redis => "redis",
            Program::Nginx => "nginx",
            Program::Iperf3 => "iperf3",
            Program::Postgres => "postgres",
            Program::Nfs => "nfs",
        }
    }

    /// Puts it into an image.
    pub fn add_to(self, image: ImageBuilder) -> ImageBuilder {
        add_program(self, image)
    }

    /// Jobs of the program.
    pub fn jobs(self) -> &'static [Job] {
        of(self)
    }
}

/// How a server and its client's guest are made ready.
pub struct Plan {
    /// In the server's guest; ends before the next.
    pub server: &'static str,
    /// Goes on, and says so.
    pub daemon: Option<(&'static str, &'static str)>,
    /// In the client's guest.
    pub client: &'static str,
}

/// Puts a program into an image.
fn add_program(program: Program, image: ImageBuilder) -> ImageBuilder {
    match program {
        Program::Redis => image
            // The server is a link to it.
            .packaged("redis-tools", "/usr/bin/redis-check-rdb")
            .packaged("redis-tools", "/usr/bin/redis-benchmark")
            .libraries_of(&["libatomic1", "libjemalloc2", "liblzf1", "libssl3", "libsystemd0"]),
        Program::Nginx => image
            .packaged("nginx", "/usr/sbin/nginx")
            .packaged("wrk", "/usr/bin/wrk")
            .libraries_of(&["libpcre2-8-0", "libssl3", "libluajit-5.1-2", "libluajit2-5.1-2"]),
        Program::Iperf3 => image.program("iperf3"),
        Program::Postgres => ["postgres", "initdb", "pg_ctl", "pgbench"]
            .iter()
            .fold(image, |image, program| {
                image.packaged("postgresql-15", &format!("/usr/lib/postgresql/15/bin/{program}"))
            })
            .packaged("postgresql-client-15", "/usr/lib/postgresql/15/bin/psql")
            .packaged_folder("postgresql-15", "/usr/lib/postgresql/15/lib")
            .packaged_folder("postgresql-15", "/usr/share/postgresql/15")
            .libraries_of(&KERBEROS_LIBRARIES)
            .libraries_of(&POSTGRES_LIBRARIES),
        Program::Nfs => ["rpc.mountd", "exportfs"]
            .iter()
            .fold(image, |image, program| {
                image.packaged("nfs-kernel-server", &format!("/usr/sbin/{program}"))
            })
            .packaged("nfs-common", "/sbin/mount.nfs")
            .module("nfsd")
            .module("nfsv4")
            .libraries_of(&KERBEROS_LIBRARIES)
            .libraries_of(&NFS_LIBRARIES),
    }
}

/// Libraries of Kerberos, which servers with logins need.
const KERBEROS_LIBRARIES: [&str; 6] = [
    "libgssapi-krb5-2",
    "libkrb5-3",
    "libk5crypto3",
    "libkrb5support0",
    "libcom-err2",
    "libkeyutils1",
];

const POSTGRES_LIBRARIES: [&str; 14] = [
    "libpq5",
    "libicu72",
    "libldap-2.5-0",
    "libsasl2-2",
    "libssl3",
    "libsystemd0",
    "libcap2",
    "libgcrypt20",
    "libgpg-error0",
    "libxml2",
    "libzstd1",
    "liblz4-1",
    "libreadline8",
    "libpam0g",
];

const NFS_LIBRARIES: [&str; 9] = [
    "libblkid1",
    "libcap2",
    "libevent-core-2.1-7",
    "libsqlite3-0",
    "libtirpc3",
    "libuuid1",
    "libwrap0",
    "libnsl2",
    "libmount1",
];

/// How a program is started.
pub fn plan(program: Program) -> Plan {
    match program {
        Program::Redis => Plan {
            server: "ln -sf /usr/bin/redis-check-rdb /bin/redis-server",
            daemon: Some((
                "redis-server --bind 0.0.0.0 --protected-mode no --save '' --appendonly no",
                "Ready to accept",
            )),
            client: "true",
        },
        Program::Nginx => Plan { server: NGINX, daemon: None, client: "true" },
        Program::Iperf3 => Plan {
            server: "true",
            daemon: Some(("iperf3 -s --forceflush", "Server listening")),
            client: "true",
        },
        Program::Postgres => Plan {
            server: POSTGRES,
            daemon: None,
            client: "echo 'pg:x:100:100::/tmp:/bin/sh' >> /etc/passwd",
        },
        Program::Nfs => Plan { server: NFS, daemon: None, client: "mkdir -p /nfs; modprobe nfsv4" },
    }
}

/// Debian's, unmodified, with one worker; it listens when the command ends.
const NGINX: &str = "mkdir -p /srv /var/lib/nginx /var/log/nginx && agent fill /srv/1k 1024 && \
     agent fill /srv/64k 65536 && echo 'user root; worker_processes 1; pid /run/nginx.pid; \
     error_log /tmp/nginx.log; events { worker_connections 64; } http { access_log off; sendfile on; \
     tcp_nopush on; keepalive_requests 1000000000; server { listen 8080; root /srv; } }' \
     > /tmp/nginx.conf && nginx -c /tmp/nginx.conf";

/// Starts PostgreSQL. It refuses to run as root. Its disk is memory, so nothing waits for a disk.
const POSTGRES: &str = "set -e; echo 'pg:x:100:100::/tmp:/bin/sh' >> /etc/passwd; \
     echo 'pg:x:100:' >> /etc/group; mkdir -p /pg /dev/shm; chmod 1777 /tmp /dev/shm; \
     mountpoint -q /dev/shm || mount -t tmpfs none /dev/shm; chown pg /pg; cd /tmp; \
     bin=/usr/lib/postgresql/15/bin; \
     su pg -c \"$bin/initdb -D /pg/data -A trust --locale=C -E SQL_ASCII --no-sync\" > /tmp/initdb; \
     echo 'host all all 0.0.0.0/0 trust' >> /pg/data/pg_hba.conf; \
     su pg -c \"$bin/pg_ctl -w -t 120 -D /pg/data -l /tmp/pg.log -o \\\"-c listen_addresses='*' \
     -c unix_socket_directories=/tmp -c fsync=off -c jit=off -c shared_buffers=16MB\\\" start\" \
     > /tmp/pg_ctl; \
     su pg -c \"$bin/pgbench -h /tmp -i -q -s 1 postgres\" 2> /tmp/pgbench";

/// Version 4 only, so no port mapper, and no rpc.nfsd, which asks for its port's name. Nobody is
/// waited for who might come back.
const NFS: &str = "set -e; modprobe nfsd; mkdir -p /export /var/lib/nfs/v4recovery \
     /var/lib/nfs/rpc_pipefs; mount -t tmpfs none /export; agent fill /export/file 8388608; \
     touch /var/lib/nfs/etab /var/lib/nfs/rmtab /etc/netconfig; \
     grep -q /proc/fs/nfsd /proc/mounts || mount -t nfsd none /proc/fs/nfsd; \
     exportfs -i -o rw,fsid=0,no_root_squash,no_subtree_check,insecure,async '*:/export'; \
     rpc.mountd -N 3 -V 4; cd /proc/fs/nfsd; echo -3 > versions; echo tcp 2049 > portlist; \
     echo 2 > threads; echo Y > v4_end_grace";

/// A program's loads.
pub fn of(program: Program) -> &'static [Job] {
    match program {
        Program::Redis => &REDIS,
        Program::Nginx => &WRK,
        Program::Iperf3 => &IPERF3,
        Program::Postgres => &PGBENCH,
        Program::Nfs => &NFS_JOBS,
    }
}

static REDIS: [Job; 3] = [
    Job {
        case: "redis_get_1",
        unit: "1/s",
        script: |to, secs| redis(to, ("get", 1), 1_000.0 * secs),
        read: read_redis,
        mode: "GET of 64 B, 1 connection",
    },
    Job {
        case: "redis_set_1",
        unit: "1/s",
        script: |to, secs| redis(to, ("set", 1), 1_000.0 * secs),
        read: read_redis,
        mode: "SET of 64 B, 1 connection",
    },
    Job {
        case: "redis_get_16",
        unit: "1/s",
        script: |to, secs| redis(to, ("get", 16), 4_000.0 * secs),
        read: read_redis,
        mode: "GET of 64 B, 16 connections",
    },
];

fn redis(to: &str, (command, connections): (&str, u32), requests: f64) -> String {
    format!(
        "redis-benchmark -h {to} -c {connections} -n {requests:.0} -t {command} -d 64 --csv \
         2> /dev/null"
    )
}

/// The last line: name, requests per second, mean, least, median, in quotes.
fn read_redis(text: &str) -> Option<Answer> {
    let fields: Vec<&str> =
        text.lines().last()?.split(',').map(|field| field.trim_matches('"')).collect();
    let number = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some(Answer { value: number(1)?, latency_us: number(4).map(|ms| ms * 1e3) })
}

static WRK: [Job; 3] = [
    Job {
        case: "nginx_1k_1",
        unit: "1/s",
        script: |to, secs| wrk(to, "1k", 1, secs),
        read: read_wrk,
        mode: "a file of 1 KiB, 1 keep-alive connection",
    },
    Job {
        case: "nginx_1k_8",
        unit: "1/s",
        script: |to, secs| wrk(to, "1k", 8, secs),
        read: read_wrk,
        mode: "a file of 1 KiB, 8 keep-alive connections",
    },
    Job {
        case: "nginx_64k_8",
        unit: "1/s",
        script: |to, secs| wrk(to, "64k", 8, secs),
        read: read_wrk,
        mode: "a file of 64 KiB, 8 keep-alive connections",
    },
];

fn wrk(to: &str, file: &str, connections: u32, secs: f64) -> String {
    let secs = secs.ceil();
    format!("wrk -t1 -c{connections} -d{secs}s --latency http://{to}:8080/{file}")
}

fn read_wrk(text: &str) -> Option<Answer> {
    let after = |start: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(start))?;
        line.split_whitespace().next()
    };
    let value = after("Requests/sec:")?.parse().ok()?;
    Some(Answer { value, latency_us: after("50%").and_then(time_us) })
}

/// `850.00us`, `1.20ms`, `2.00s`.
fn time_us(text: &str) -> Option<f64> {
    let at = text.find(|c: char| c.is_ascii_alphabetic())?;
    let factor = match &text[at..] {
        "us" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        _ => return None,
    };
    Some(text[..at].parse::<f64>().ok()? * factor)
}

static IPERF3: [Job; 2] = [
    Job {
        case: "iperf3_tcp",
        unit: "MB/s",
        script: |to, secs| format!("iperf3 -c {to} -t {} -J", secs.ceil()),
        read: read_iperf3,
        mode: "one TCP stream",
    },
    Job {
        case: "iperf3_tcp_4",
        unit: "MB/s",
        script: |to, secs| format!("iperf3 -c {to} -t {} -P 4 -J", secs.ceil()),
        read: read_iperf3,
        mode: "four TCP streams",
    },
];

fn read_iperf3(text: &str) -> Option<Answer> {
    let json: Value = serde_json::from_str(text).ok()?;
    let bits = json["end"]["sum_received"]["bits_per_second"].as_f64()?;
    Some(Answer { value: bits / 8e6, latency_us: None })
}

static PGBENCH: [Job; 2] = [
    Job {
        case: "pgbench_select_1",
        unit: "1/s",
        script: |to, secs| pgbench(to, "-S -c 1", secs),
        read: read_pgbench,
        mode: "read-only, 1 client; mean latency",
    },
    Job {
        case: "pgbench_tpcb_4",
        unit: "1/s",
        script: |to, secs| pgbench(to, "-N -c 4", secs),
        read: read_pgbench,
        mode: "simple update, 4 clients, fsync off; mean latency",
    },
];

fn pgbench(to: &str, what: &str, secs: f64) -> String {
    let secs = secs.ceil();
    format!(
        "/usr/lib/postgresql/15/bin/pgbench -n --random-seed=1 -h {to} -U pg {what} -T {secs} postgres"
    )
}

fn read_pgbench(text: &str) -> Option<Answer> {
    let number = |start: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(start))?;
        line.split_whitespace().next()?.parse::<f64>().ok()
    };
    let latency_us = number("latency average = ").map(|ms| ms * 1e3);
    Some(Answer { value: number("tps = ")?, latency_us })
}

/// A mount is made anew for each load: a client that knows a server by one address goes on to use
/// it.
static NFS_JOBS: [Job; 2] = [
    Job {
        case: "nfs_read_1m",
        unit: "MB/s",
        script: |to, secs| nfs(to, "dd if=/nfs/file of=/dev/null bs=1048576", secs),
        read: read_nfs,
        mode: "reading a file of 8 MiB that the server has in memory, again and again",
    },
    Job {
        case: "nfs_write_1m",
        unit: "MB/s",
        script: |to, secs| {
            nfs(to, "dd if=/dev/zero of=/nfs/new bs=1048576 count=8 conv=fsync", secs)
        },
        read: read_nfs,
        mode: "writing a file of 8 MiB into the server’s memory, again and again",
    },
];

fn nfs(to: &str, work: &str, secs: f64) -> String {
    format!(
        "mount.nfs {to}:/ /nfs -o vers=4.2,sec=sys || exit 1; set -e; trap 'umount /nfs' EXIT; \
         now() {{ cut -d' ' -f1 /proc/uptime | tr -d .; }}; begin=$(now); times=0; \
         while [ $(( $(now) - begin )) -lt {:.0} ]; do \
         echo 3 > /proc/sys/vm/drop_caches; {work} 2> /dev/null; times=$((times + 1)); done; \
         echo $times $(( $(now) - begin ))",
        secs * 100.0
    )
}

/// Times 8 MiB, and hundredths of a second.
fn read_nfs(text: &str) -> Option<Answer> {
    let mut numbers = text.lines().last()?.split_whitespace().map(|n| n.parse::<f64>().ok());
    let (times, hundredths) = (numbers.next()??, numbers.next()??);
    let mb = times * 8.0 * f64::from(1 << 20) / 1e6;
    (hundredths > 0.0).then(|| Answer { value: mb / (hundredths / 100.0), latency_us: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_read() {
        let redis =
            "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"1234.50\",\"0.8\",\"0.5\",\"0.75\"\n";
        let got = read_redis(redis).unwrap();
        assert_eq!((got.value, got.latency_us), (1234.5, Some(750.0)));
        let wrk =
            "  Latency Distribution\n     50%    1.50ms\n     99%    2s\nRequests/sec:   812.25\n";
        let got = read_wrk(wrk).unwrap();
        assert_eq!((got.value, got.latency_us), (812.25, Some(1500.0)));
        assert_eq!(
            (time_us("850.00us"), time_us("2.00s"), time_us("3x")),
            (Some(850.0), Some(2e6), None)
        );
        let iperf3 = r#"{"end": {"sum_received": {"bits_per_second": 8e8}}}"#;
        assert_eq!(read_iperf3(iperf3).unwrap().value, 100.0);
        let pgbench = "latency average = 1.250 ms\ntps = 800.5 (without initial connection time)\n";
        let got = read_pgbench(pgbench).unwrap();
        assert_eq!((got.value, got.latency_us), (800.5, Some(1250.0)));
        assert_eq!(read_nfs("8 50\n").unwrap().value.round(), 134.0);
        assert!(read_nfs("").is_none() && read_wrk("unable to connect").is_none());
    }

    #[test]
    fn scripts_have_address_and_time() {
        for program in Program::ALL {
            for job in program.jobs() {
                let script = (job.script)("10.0.1.2", 1.3);
                assert!(script.contains("10.0.1.2"), "{script}");
            }
        }
        assert!((WRK[1].script)("10.0.1.2", 1.3).contains("-c8 -d2s"));
        assert!((REDIS[0].script)("10.0.1.2", 1.5).contains("-n 1500 "));
    }
}
