//! An unmodified FTP server with the preload shim. Its children lock themselves up and drop their
//! rights before they send a file.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use lab::Running;
use lab_agent::stream::Stream;

use crate::common::{MIB, beside_others, until};
use crate::pipe_world::{Client, World, recipe, sh, world_with};

const CONFIG: &str = "listen=YES\nbackground=NO\nanonymous_enable=YES\nno_anon_password=YES\n\
    anon_root=/mnt\nallow_writeable_chroot=YES\nseccomp_sandbox=NO\n\
    secure_chroot_dir=/run/empty\n";
/// Libraries that a small Debian does not have.
const LIBRARIES: &[&str] = &["libwrap0", "libnsl2", "libtirpc3", "libcap2", "libpam0g", "libssl3"];
const FILES: [u64; 2] = [5 * MIB + 17, 16 * MIB];

/// The connection for commands.
struct Control(BufReader<TcpStream>);

impl Control {
    fn new(world: &World) -> Self {
        let mut control = Self(world.connect("10.0.0.1:21").0);
        control.expect("220");
        control.ask("USER anonymous", "230");
        control.ask("TYPE I", "200");
        control
    }

    /// An answer of one line.
    fn expect(&mut self, code: &str) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert!(line.starts_with(code), "{line:?} for {code}");
        line
    }

    fn ask(&mut self, command: &str, code: &str) -> String {
        self.0.get_mut().write_all(format!("{command}\r\n").as_bytes()).unwrap();
        self.expect(code)
    }

    /// The whole file, over a connection of its own, compared byte by byte.
    fn get(&mut self, world: &World, len_bytes: u64) {
        let answer = self.ask("EPSV", "229");
        let port = answer.split('|').nth(3).unwrap();
        let mut data: Client = world.connect(&format!("10.0.0.1:{port}"));
        self.ask(&format!("RETR {len_bytes}"), "150");
        data.read_bytes(&mut Stream::new(1), len_bytes);
        assert_eq!(data.0.read(&mut [0]).unwrap(), 0);
        self.expect("226");
    }
}

/// A VM with the server's program, users and files.
fn ftp_world() -> World {
    let recipe = recipe().packaged("vsftpd", "/usr/sbin/vsftpd").libraries_of(LIBRARIES);
    let world = world_with(128, "ext4", recipe);
    FILES.iter().for_each(|len_bytes| world.file(&len_bytes.to_string(), *len_bytes));
    let users = "echo ftp:x:100:100::/mnt:/bin/false >> /etc/passwd; mkdir -p /run/empty; \
                 echo nobody:x:65534:65534::/:/bin/false >> /etc/passwd";
    sh(&world.guest, users);
    world.guest.put_bytes("/etc/vsftpd.conf", 0o644, CONFIG.as_bytes()).unwrap();
    world
}

/// With the shim; returns when it listens.
fn vsftpd(world: &World) -> Running<'_> {
    let shim = "MILLRACE_MIN_BYTES=65536 LD_PRELOAD=/usr/lib/libmillrace-preload.so";
    let server = world.guest.spawn(&format!("{shim} vsftpd /etc/vsftpd.conf 2>&1")).unwrap();
    let connects = || world.lab.net().inside(|| TcpStream::connect("10.0.0.1:21").is_ok()).unwrap();
    until("vsftpd does not listen", connects);
    server
}

/// All files twice, over one connection for commands; how many bytes of them pipes moved.
fn get_files(world: &World) -> f64 {
    let mut control = Control::new(world);
    for len_bytes in FILES.into_iter().chain(FILES) {
        control.get(world, len_bytes);
    }
    control.ask("QUIT", "221");
    println!("{} bytes by pipes", world.count("srv", "moved_bytes"));
    world.count("srv", "moved_bytes")
}

/// The agent's socket is not below the folder that the server has locked itself into.
#[test]
fn vsftpd_sends_its_files_when_the_agent_is_out_of_reach() {
    let _beside = beside_others();
    let world = ftp_world();
    let _agent = world.agent();
    let server = vsftpd(&world);
    assert_eq!(get_files(&world), 0.0);
    server.kill().unwrap();
}

#[test]
fn vsftpd_pipes_its_files_when_its_root_has_the_agent() {
    let _beside = beside_others();
    let world = ftp_world();
    let _agent = world.agent();
    let folder = "/mnt/run/millrace";
    sh(&world.guest, &format!("mkdir -p {folder} && mount --bind /run/millrace {folder}"));
    let server = vsftpd(&world);
    let all = 2 * FILES.iter().sum::<u64>();
    let moved = get_files(&world);
    // What is left of a file behind the server's parts of it may be below the threshold.
    assert!(moved > 0.95 * all as f64 && moved <= all as f64, "{moved} of {all}");
    server.kill().unwrap();
}
