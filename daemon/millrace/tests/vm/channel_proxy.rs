//! A peer's pages in the hands of programs that pass them on without a copy.

use lab::KernelChoice;

use crate::channel_world::{
    Machine, address, count, is_sound, load, nothing_is_held, recipe, unload, world,
};
use crate::common::{GIB, LONG, MIB, READY, alone, amount, until};

/// Splices connections to its first address into such to its second.
const PROXY: &str = r#"
import os, socket, sys, threading
def pump(a, b):
    r, w = os.pipe()
    while True:
        n = os.splice(a.fileno(), w, 1 << 20)
        if n == 0:
            break
        while n:
            n -= os.splice(r, b.fileno(), n)
    b.shutdown(socket.SHUT_WR)
listen = socket.create_server((sys.argv[1], 7002))
print("ready", flush=True)
a, _ = listen.accept()
b = socket.create_connection((sys.argv[2], 7002))
threads = [threading.Thread(target=pump, args=pair) for pair in ((a, b), (b, a))]
[t.start() for t in threads]
[t.join() for t in threads]
"#;

#[test]
fn a_peers_pages_can_be_spliced_to_the_ordinary_card() {
    let _alone = alone();
    let old = KernelChoice::V6_1;
    let machines = [
        Machine::new("a", old, 1),
        Machine::new("p", KernelChoice::V6_12, 1),
        Machine::new("b", old, 1),
        Machine::new("q", old, 1),
    ];
    let world = world(machines, &recipe().python_quic());
    let [a, p, b, q] = [0, 1, 2, 3].map(|at| &world.guests[at]);
    [a, p, q].into_iter().for_each(load);
    world.linked(&[a, p, q]);
    let len = amount(GIB).max(32 * MIB);
    // b has no module; p and q are proxies of both kernels.
    for (proxy, at) in [(p, 1), (q, 3)] {
        proxy.put_bytes("/proxy.py", 0o644, PROXY.as_bytes()).unwrap();
        for (from, to, to_at) in [(a, b, 2), (b, a, 0)] {
            let run = format!("python3 /proxy.py {} {}", address(at), address(to_at));
            let mut relay = proxy.spawn(&run).unwrap();
            relay.wait_line("ready", READY).unwrap();
            let receive = format!("agent xfer recv tcp listen {} {len}", address(to_at));
            let mut receiver = to.spawn(&receive).unwrap();
            receiver.wait_line("listening", READY).unwrap();
            let borrowed = count(proxy, "rx_borrowed");
            let send = format!("agent xfer send tcp connect {} {len}", address(at));
            let sent = from.run_for(&send, LONG).unwrap().json().unwrap();
            let received = receiver.wait(READY).unwrap().json().unwrap();
            assert_eq!(sent["hash"], received["hash"]);
            println!("{} -> {} -> {}: {sent}", from.name(), proxy.name(), to.name());
            relay.wait(READY).unwrap().ok().unwrap();
            assert!(from.name() == "b" || count(proxy, "rx_borrowed") > borrowed + 100);
        }
    }
    for guest in [a, p, q] {
        nothing_is_held(guest);
        is_sound(guest);
    }
    unload(p);
    until("gone", || world.links(a) == 1);
}
