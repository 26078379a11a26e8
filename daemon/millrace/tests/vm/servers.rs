//! Unmodified web servers with the preload shim: their files go by pipes, and nobody notices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::beside_others;
use crate::web::{Client, LARGE, Load, NGINX, SMALL, World, assert_served, world, wrk};

/// Config of lighttpd, with patience as the clients have: by default it closes a connection that
/// has been idle for 5 s, and on a busy machine its last bytes are on their way for longer.
const LIGHTTPD: &str = r#"
    server.document-root = "/mnt"
    server.port = 80
    server.compat-module-load = "disable"
    server.modules = ( "mod_staticfile" )
    server.network-backend = "sendfile"
    server.event-handler = "linux-sysepoll"
    server.max-keep-alive-requests = 1000000
    server.max-keep-alive-idle = 600
    server.max-read-idle = 600
    server.max-write-idle = 600
"#;

/// Runs `count` clients at a time, each asking for all files over one connection, each beginning
/// elsewhere.
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
                client.ask(&format!("/{name}"));
                assert_eq!(client.read_header(), name);
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

fn try_server(command: &str, config: &str) {
    let _beside = beside_others();
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
    let load = Load { connections: 100, secs: 5, paths: &[format!("/{}", LARGE[1])] };
    let told = wrk(&world, &load);
    assert_served(&told);
    assert!(!told.contains("Socket errors"), "{told}");
    clients(&world, 2, 1, &all);
    println!("in all:\n{}", world.reasons());
    server.kill().unwrap();
}

/// Parts of lighttpd's are 256 KiB: less than pays here. Files that have enough are gathered but
/// for their first parts.
#[test]
fn lighttpds_parts_go_together() {
    let _beside = beside_others();
    let world = world();
    let _agent = world.agent();
    let server = world.serve_from(1 << 20, "lighttpd -D -f /tmp/config", LIGHTTPD);
    clients(&world, 1, 2, &LARGE[..3]);
    assert_eq!(world.moved(), 0.0);

    let large = LARGE[3..].iter().sum::<u64>() as f64;
    clients(&world, 1, 2, &LARGE[3..]);
    println!("one client:\n{}", world.reasons());
    assert!(world.moved() >= 0.8 * 2.0 * large && world.moved() <= 2.0 * large);
    // Most parts did not cost a pipe.
    assert!(world.complete() <= 2.0 * large / f64::from(1 << 20));

    let all = [&SMALL[..], &LARGE].concat();
    with_a_lazy_client(&world, || clients(&world, 8, 2, &all));
    println!("many clients:\n{}", world.reasons());
    assert!(world.moved() >= 0.5 * 18.0 * large);
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
