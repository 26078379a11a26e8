//! Ground of all VM tests: the lock on the machine, guests on the daemon, transfers compared by
//! hash.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use lab::{Daemon, DaemonBuilder, Guest, GuestBuilder, Lab};
use serde_json::Value;

/// Boot under emulation takes 3 s on a quiet machine.
pub const BOOT: Duration = Duration::from_secs(90);
/// Anything that only moves data.
pub const LONG: Duration = Duration::from_secs(3600);
/// For what takes milliseconds on a quiet machine.
pub const READY: Duration = Duration::from_secs(60);
/// Between two looks at what announces itself to nobody.
const LOOK: Duration = Duration::from_millis(5);

/// Lock on the machine.
static MACHINE: RwLock<()> = RwLock::new(());

/// For tests that have it for themselves: they look at what all of it does, or have a guest for
/// each of two cores.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().unwrap_or_else(|e| e.into_inner())
}

/// For tests with one guest at work: as many of them at a time as the test runner has threads, one
/// a core. Each has a lab of its own, with its network, folder and daemon.
pub fn beside_others() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().unwrap_or_else(|e| e.into_inner())
}

/// Asks again and again for what nobody tells.
#[track_caller]
pub fn until(complaint: &str, mut is_so: impl FnMut() -> bool) {
    until_ok(complaint, || if is_so() { Ok(()) } else { Err("") });
}

/// Waits as [`until`] does; the last error is part of the complaint.
#[track_caller]
pub fn until_ok<T, E: std::fmt::Display>(
    complaint: &str,
    mut get: impl FnMut() -> Result<T, E>,
) -> T {
    let end = Instant::now() + READY;
    loop {
        match get() {
            Ok(it) => return it,
            Err(e) => assert!(Instant::now() < end, "not within {READY:?}: {complaint}\n{e}"),
        }
        std::thread::sleep(LOOK);
    }
}

/// Packets counted by a rule in the listing of `nft`: `… counter packets 12 bytes 345 …`.
pub fn packets(rule: &str) -> u64 {
    let (_, rest) = rule.split_once("packets ").unwrap();
    rest.split(' ').next().unwrap().parse().unwrap()
}

/// The full amount in a soak run; otherwise a 64th of it, in whole MiB and at least 4.
pub fn amount(full_bytes: u64) -> u64 {
    if std::env::var_os("MILLRACE_SOAK").is_some() {
        return full_bytes;
    }
    (full_bytes / 64).max(4 << 20) >> 20 << 20
}

/// In front of a command: some user of a guest runs it.
pub const USER: &str = "setpriv --reuid 1000 --regid 1000 --clear-groups";

pub const GIB: u64 = 1 << 30;
pub const MIB: u64 = 1 << 20;

pub fn daemon(name: &str) -> DaemonBuilder {
    Daemon::builder(name).binary(env!("CARGO_BIN_EXE_millrace"))
}

/// Boots all guests at once.
pub fn boot<const N: usize>(lab: &Lab, guests: [GuestBuilder; N]) -> [Guest; N] {
    lab::boot(lab, guests, BOOT).unwrap()
}

/// A transfer's result as the agent prints it; the sender has compared the hashes already.
fn same_hash(sent: &Value, received: &Value, len_bytes: u64) {
    assert_eq!(sent["hash"], received["hash"]);
    assert_eq!(sent["bytes"], len_bytes);
    assert_eq!(received["bytes"], len_bytes);
}

/// `from` sends to `to`, which listens at `address`.
pub fn transfer(from: &Guest, to: &Guest, kind: &str, address: &str, len_bytes: u64) {
    transfer_during(from, to, kind, address, len_bytes, || ());
}

/// Transfers as [`transfer`] does; `mid` is done while it runs.
pub fn transfer_during(
    from: &Guest,
    to: &Guest,
    kind: &str,
    address: &str,
    len_bytes: u64,
    mid: impl FnOnce(),
) {
    let mut receiver =
        to.spawn(&format!("agent xfer recv {kind} listen {address} {len_bytes}")).unwrap();
    receiver.wait_line("listening", READY).unwrap();
    let send = format!("agent xfer send {kind} connect {address} {len_bytes}");
    let sender = from.spawn(&send).unwrap();
    mid();
    let sent = sender.wait(LONG).unwrap().json().unwrap();
    let received = receiver.wait(READY).unwrap().json().unwrap();
    same_hash(&sent, &received, len_bytes);
    println!("{} -> {} {kind} {address}: {sent}", from.name(), to.name());
}

/// A guest sends to a receiver in this process, on the host.
pub fn transfer_to_host(
    guest: &Guest,
    host: (&str, &str),
    peer: (&str, &str),
    len_bytes: u64,
    inside: impl Fn(&(dyn Fn() -> Value + Sync)) -> Value + Sync,
) {
    let ((host_kind, host_address), (guest_kind, guest_address)) = (host, peer);
    let content = lab_agent::tools::xfer::Content { bytes: len_bytes, seed: 1 };
    std::thread::scope(|scope| {
        let receive = || {
            inside(&|| {
                lab_agent::tools::xfer::run("recv", host_kind, "listen", host_address, content)
                    .unwrap()
                    .json()
            })
        };
        let receiver = scope.spawn(receive);
        // The receiver in this process says nothing when it listens: the guest tries until it does.
        let send = format!(
            "until agent xfer send {guest_kind} connect {guest_address} {len_bytes}; do \
             n=$((n+1)); [ $n -lt 50 ] || exit 1; sleep 0.1; done"
        );
        let sent = guest.run_for(&send, LONG).unwrap().json().unwrap();
        same_hash(&sent, &receiver.join().unwrap(), len_bytes);
        println!("{} -> host {host_kind}: {sent}", guest.name());
    });
}

/// A sender in this process sends to a guest.
pub fn transfer_from_host(
    guest: &Guest,
    listen: (&str, &str),
    len_bytes: u64,
    send: impl FnOnce(lab_agent::tools::xfer::Content) -> Value,
) {
    let (kind, address) = listen;
    let mut receiver =
        guest.spawn(&format!("agent xfer recv {kind} listen {address} {len_bytes}")).unwrap();
    receiver.wait_line("listening", READY).unwrap();
    let sent = send(lab_agent::tools::xfer::Content { bytes: len_bytes, seed: 1 });
    let received = receiver.wait(READY).unwrap().json().unwrap();
    same_hash(&sent, &received, len_bytes);
    println!("host -> {} {kind}: {sent}", guest.name());
}
