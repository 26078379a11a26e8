#![allow(non_snake_case)]
use std::os::unix::net::UnixStream;

use xxhash_rust::xxh3::xxh3_128;

use super::*;
use crate::proto::{read_frame, write_frame};

/// An agent on one end of a socket pair; it ends when the returned end is dropped.
fn agent() -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let writer = theirs.try_clone().unwrap();
    thread::spawn(move || serve(theirs, writer));
    ours
}

/// Reads answers to `id` until one that ends the request; other ids must not appear.
fn answers(host: &mut UnixStream, id: u32) -> Vec<Reply> {
    let mut got = Vec::new();
    loop {
        let (from, reply) = read_frame::<Reply>(host).unwrap();
        assert_eq!(from, id);
        let last = matches!(
            reply,
            Reply::Hello { .. } | Reply::Exit { .. } | Reply::Done { .. } | Reply::Failed(_)
        );
        got.push(reply);
        if last {
            return got;
        }
    }
}

fn output(replies: &[Reply]) -> (String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    for reply in replies {
        match reply {
            Reply::Stdout(bytes) => out.extend(bytes),
            Reply::Stderr(bytes) => err.extend(bytes),
            _ => {}
        }
    }
    (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
}

#[test]
fn hello_names_the_kernel_and_refuses_another_version() {
    let mut host = agent();
    write_frame(&mut host, 1, &Request::Hello { version: proto::VERSION }).unwrap();
    let got = answers(&mut host, 1);
    assert!(matches!(&got[0], Reply::Hello { kernel, .. } if kernel.contains('.')));
    write_frame(&mut host, 2, &Request::Hello { version: 99 }).unwrap();
    let got = answers(&mut host, 2);
    assert!(matches!(&got[0], Reply::Failed(text) if text.contains("99")), "{got:?}");
}

#[test]
fn a_command_returns_code_and_both_outputs() {
    let mut host = agent();
    let script = "echo out; echo err >&2; exit 3".to_string();
    write_frame(&mut host, 5, &Request::Run { timeout_ms: 0, script }).unwrap();
    let got = answers(&mut host, 5);
    assert!(matches!(got[0], Reply::Started { pid } if pid > 0));
    assert_eq!(output(&got), ("out\n".into(), "err\n".into()));
    assert_eq!(got.last(), Some(&Reply::Exit { code: 3, timed_out: false }));
}

#[test]
fn a_background_child_does_not_hold_the_answer() {
    let mut host = agent();
    let script = "sleep 1000 & echo $!".to_string();
    write_frame(&mut host, 5, &Request::Run { timeout_ms: 0, script }).unwrap();
    let got = answers(&mut host, 5);
    assert_eq!(got.last(), Some(&Reply::Exit { code: 0, timed_out: false }));
    let child: i32 = output(&got).0.trim().parse().unwrap();
    let script = format!("kill -9 {child}");
    write_frame(&mut host, 6, &Request::Run { timeout_ms: 0, script }).unwrap();
    assert_eq!(answers(&mut host, 6).last(), Some(&Reply::Exit { code: 0, timed_out: false }));
}

#[test]
fn a_command_over_its_time_is_killed_and_says_so() {
    let mut host = agent();
    let script = "sleep 1000".to_string();
    write_frame(&mut host, 5, &Request::Run { timeout_ms: 50, script }).unwrap();
    assert_eq!(answers(&mut host, 5).last(), Some(&Reply::Exit { code: 128 + 9, timed_out: true }));
}

#[test]
fn commands_run_side_by_side_and_a_signal_ends_one() {
    let mut host = agent();
    let script = "sleep 1000".to_string();
    write_frame(&mut host, 5, &Request::Run { timeout_ms: 0, script }).unwrap();
    assert!(matches!(read_frame::<Reply>(&mut host).unwrap(), (5, Reply::Started { .. })));
    write_frame(&mut host, 6, &Request::Run { timeout_ms: 0, script: "true".into() }).unwrap();
    assert_eq!(answers(&mut host, 6).last(), Some(&Reply::Exit { code: 0, timed_out: false }));
    write_frame(&mut host, 7, &Request::Signal { target: 5, signal: 15 }).unwrap();
    let mut ends = vec![read_frame::<Reply>(&mut host).unwrap()];
    ends.push(read_frame::<Reply>(&mut host).unwrap());
    assert!(ends.contains(&(7, Reply::Done { len: 0, hash: 0 })), "{ends:?}");
    assert!(ends.contains(&(5, Reply::Exit { code: 143, timed_out: false })), "{ends:?}");
    write_frame(&mut host, 8, &Request::Signal { target: 5, signal: 15 }).unwrap();
    assert!(matches!(&answers(&mut host, 8)[0], Reply::Failed(text) if text.contains('5')));
}

#[test]
fn commands_end_with_their_host() {
    let mut host = agent();
    let script = "sleep 1000".to_string();
    write_frame(&mut host, 5, &Request::Run { timeout_ms: 0, script }).unwrap();
    let (_, Reply::Started { pid }) = read_frame::<Reply>(&mut host).unwrap() else { panic!() };
    let pid = Pid::from_raw(pid as i32).unwrap();
    let ended = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    drop(host);
    let fd = rustix::event::PollFd::new(&ended, rustix::event::PollFlags::IN);
    // Fails by hanging if the command lives on.
    assert_eq!(rustix::event::poll(&mut [fd], None).unwrap(), 1);
}

#[test]
fn a_file_goes_in_and_comes_back_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/file").to_str().unwrap().to_owned();
    let content: Vec<u8> = (0..200_000u32).map(|n| (n * 7) as u8).collect();
    let mut host = agent();
    write_frame(&mut host, 1, &Request::PutOpen { mode: 0o640, path: path.clone() }).unwrap();
    for chunk in content.chunks(proto::CHUNK_BYTES) {
        write_frame(&mut host, 1, &Request::PutData(chunk.to_vec())).unwrap();
    }
    let hash = xxh3_128(&content);
    write_frame(&mut host, 1, &Request::PutEnd { hash }).unwrap();
    assert_eq!(answers(&mut host, 1), [Reply::Done { len: 200_000, hash }]);
    write_frame(&mut host, 2, &Request::Get { path }).unwrap();
    let got = answers(&mut host, 2);
    let bytes: Vec<u8> = got
        .iter()
        .filter_map(|reply| if let Reply::Data(bytes) = reply { Some(bytes) } else { None })
        .flatten()
        .copied()
        .collect();
    assert!(bytes == content);
    assert_eq!(got.last(), Some(&Reply::Done { len: 200_000, hash }));
}

#[test]
fn a_wrong_hash_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file").to_str().unwrap().to_owned();
    let mut host = agent();
    write_frame(&mut host, 1, &Request::PutOpen { mode: 0o600, path }).unwrap();
    write_frame(&mut host, 1, &Request::PutData(b"abc".to_vec())).unwrap();
    write_frame(&mut host, 1, &Request::PutEnd { hash: 1 }).unwrap();
    assert!(matches!(&answers(&mut host, 1)[0], Reply::Failed(text) if text.contains("3 bytes")));
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}

#[test]
fn abuse_R10_too_many_requests_get_an_answer_that_names_the_limit() {
    let mut host = agent();
    let run = Request::Run { timeout_ms: 0, script: "sleep 1000".into() };
    for id in 0..MAX_COMMANDS as u32 {
        write_frame(&mut host, id, &run).unwrap();
        assert!(matches!(read_frame::<Reply>(&mut host).unwrap(), (_, Reply::Started { .. })));
    }
    write_frame(&mut host, 1000, &run).unwrap();
    assert!(matches!(&answers(&mut host, 1000)[0], Reply::Failed(text) if text.contains("64")));
    for id in 0..MAX_COMMANDS as u32 {
        write_frame(&mut host, 2000 + id, &Request::Signal { target: id, signal: 9 }).unwrap();
    }
    let mut exits = 0;
    while exits < MAX_COMMANDS {
        if let (_, Reply::Exit { .. }) = read_frame::<Reply>(&mut host).unwrap() {
            exits += 1;
        }
    }
}
