//! Millrace's guest pieces in a guest whose host offers nothing: everything falls back.

use std::time::Duration;

use lab::{AGENT_SERVICE, Guest, Image, Lab};

const BOOT: Duration = Duration::from_secs(180);
const LONG: Duration = Duration::from_secs(60);

/// `mrpipe` sends to busybox' netcat; what arrived, less header and trailer, is compared.
fn script(before: &str, options: &str) -> String {
    // What an earlier one was told is not taken for its own.
    format!(
        "set -e; cd /tmp; rm -f told; {before} mrpipe -l 127.0.0.1:7000 {options} -k file > told &
         until grep -qs listening told; do sleep 0.05; done
         nc 127.0.0.1 7000 < /dev/null > got; wait; tail -n +2 got | head -c 1000000 | cmp - file
         tail -n 1 told"
    )
}

#[test]
fn the_guest_pieces_run_and_fall_back() {
    let lab = Lab::new().unwrap();
    let recipe = Image::builder().guest_pieces();
    let [guest] = lab::boot(&lab, [Guest::builder("a").image(recipe)], BOOT).unwrap();
    guest.sh("head -c 1000000 /dev/urandom > /tmp/file").unwrap();
    let told = |before: &str, options: &str| {
        guest.run_for(&script(before, options), LONG).unwrap().json().unwrap()
    };
    let both = told("", "-b");
    assert_eq!((&both["piped"], &both["sent"]), (&0.into(), &1_000_000.into()));
    assert_eq!(both["reason_text"], "no agent runs in this guest");

    let mut agent = guest.spawn(&format!("{AGENT_SERVICE} 2>&1")).unwrap();
    agent.wait_line("no pipes from the host", LONG).unwrap();
    let both = told("", "-b");
    assert_eq!((&both["piped"], &both["sent"]), (&0.into(), &1_000_000.into()));
    // A file on tmpfs would be none for a pipe, but the agent looks at the file first.
    assert_eq!(both["reason_text"], "a file system that is not supported");
    let shim = told("MILLRACE_MIN_BYTES=65536 LD_PRELOAD=libmillrace-preload.so", "-s");
    assert_eq!((&shim["sent"], &shim["reason"]), (&1_000_000.into(), &0.into()));
    agent.kill().unwrap();
    guest.shutdown(LONG).unwrap();
}
