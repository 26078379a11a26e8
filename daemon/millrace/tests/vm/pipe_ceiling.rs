//! Pipes of a VM with ceilings, and what they are charged.

use std::io::Read;

use serde_json::json;

use crate::common::{MIB, beside_others, until};
use crate::pipe_world::{READY, World, listening, report, world};

/// A counter of the VM's account.
fn of_vm(world: &World, counter: &str) -> u64 {
    let name = format!("millrace_vm_{counter}");
    world.daemon.metric_sum(&name, &[("vm", "srv")]).unwrap() as u64
}

/// Sets the VM's ceiling in bytes per second; 0: none.
fn set_ceiling(world: &World, bytes_per_s: u64) {
    let wanted = json!({"ceiling_bytes_per_s": bytes_per_s});
    world.daemon.request("PATCH", "/v1/vms/srv", Some(&wanted)).unwrap();
}

/// Counters, and not how long it takes: the ceiling's own clock is in the tests of crates.
#[test]
fn a_pipe_is_charged_to_its_vm_and_waits_at_its_ceiling() {
    let _beside = beside_others();
    let mut world = world(128, "ext4");
    let _agent = world.agent();
    let len_bytes = 12 * MIB + 345;
    world.file("f", len_bytes);
    let pipe = |world: &World, port: u64| {
        let before = ["charged_bytes_total", "thread_ns_total"].map(|name| of_vm(world, name));
        let server = listening(&world.guest, &format!("mrpipe -l {port} -p -r -n 1 /mnt/f"));
        world.fetch(&format!("10.0.0.1:{port}"), 1, len_bytes);
        report(server, len_bytes);
        let after = ["charged_bytes_total", "thread_ns_total"].map(|name| of_vm(world, name));
        [after[0] - before[0], after[1] - before[1]]
    };

    // Without a ceiling it is never held. The file is read once, and sent once.
    let read_before = world.count("srv", "read_bytes");
    let [charged, thread_ns] = pipe(&world, 7000);
    let read = world.count("srv", "read_bytes") - read_before;
    assert_eq!(read as u64, len_bytes);
    assert!(charged >= 2 * len_bytes, "{charged}");
    assert!(thread_ns > 0);
    assert_eq!(world.count("srv", "held"), 0.0);

    // With one it waits, again and again, and all of it arrives.
    set_ceiling(&world, 8 * MIB);
    pipe(&world, 7001);
    assert!(world.count("srv", "held") > 0.0);
    assert!(of_vm(&world, "held_by_ceiling_total") > 0);

    // One that waits goes on when the ceiling is raised, without having heard of it.
    let held = |world: &World| {
        let labels = [("vm", "srv")];
        world.daemon.metric_sum("millrace_pipe_held", &labels).unwrap() > 0.0
    };
    let server = listening(&world.guest, "mrpipe -l 7002 -p -r -n 1 /mnt/f");
    let mut client = world.connect("10.0.0.1:7002");
    set_ceiling(&world, 256 << 10);
    client.ask();
    until("no pipe waits", || held(&world));
    set_ceiling(&world, 0);
    client.read_round(0, len_bytes);
    // The server waits for the end of its one connection.
    drop(client);
    report(server, len_bytes);
    assert!(!held(&world));

    // One that waits when the daemon is killed costs its connection, and nothing else.
    let server = listening(&world.guest, "mrpipe -l 7003 -p -r -n 1 /mnt/f");
    let mut client = world.connect("10.0.0.1:7003");
    set_ceiling(&world, 256 << 10);
    client.ask();
    until("no pipe waits", || held(&world));
    world.daemon.restart().unwrap();
    set_ceiling(&world, 0);
    let mut rest = Vec::new();
    // Until the connection is reset.
    let _ = client.0.read_to_end(&mut rest);
    assert!((rest.len() as u64) < len_bytes);
    drop(client);
    let ended: serde_json::Value = server.wait(READY).unwrap().json().unwrap();
    assert_eq!(ended["whole"], false, "{ended}");
    world.wait_for_agent();
    pipe(&world, 7004);
}
