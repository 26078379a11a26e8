#![allow(non_snake_case)]
use std::os::unix::net::UnixStream;

use proptest::prelude::*;

use super::*;

fn requests() -> Vec<Request> {
    vec![
        Request::Hello { version: VERSION },
        Request::Run { timeout_ms: 1500, script: "echo ü".into() },
        Request::Signal { target: 7, signal: -9 },
        Request::PutOpen { mode: 0o755, path: "/a/b".into() },
        Request::PutData(vec![1; CHUNK_BYTES]),
        Request::PutEnd { hash: u128::MAX - 5 },
        Request::Get { path: "/a".into() },
        Request::Shutdown,
    ]
}

fn replies() -> Vec<Reply> {
    vec![
        Reply::Hello { version: 3, kernel: "6.1".into() },
        Reply::Started { pid: 12 },
        Reply::Stdout(vec![0, 255]),
        Reply::Stderr(vec![]),
        Reply::Exit { code: -1, timed_out: true },
        Reply::Exit { code: 0, timed_out: false },
        Reply::Data(vec![9; 3]),
        Reply::Done { len: u64::MAX, hash: 1 << 100 },
        Reply::Failed("no".into()),
    ]
}

#[test]
fn every_message_survives_a_socket() {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    for (id, request) in (0..).zip(requests()) {
        write_frame(&mut ours, id, &request).unwrap();
        assert_eq!(read_frame::<Request>(&mut theirs).unwrap(), (id, request));
    }
    for (id, reply) in (u32::MAX - 20..).zip(replies()) {
        write_frame(&mut ours, id, &reply).unwrap();
        assert_eq!(read_frame::<Reply>(&mut theirs).unwrap(), (id, reply));
    }
    drop(ours);
    assert!(matches!(read_frame::<Reply>(&mut theirs), Err(AgentError::Closed { .. })));
}

#[test]
fn a_cut_body_is_an_error_and_never_a_panic() {
    let fixed_bytes = [(129, 12), (130, 4), (133, 5), (135, 24)];
    for (kind, needed) in fixed_bytes {
        for len in 0..needed {
            assert!(Reply::decode(kind, &vec![0; len]).is_err(), "kind {kind} with {len} bytes");
        }
    }
    let fixed_bytes = [(1, 12), (2, 8), (3, 8), (4, 4), (6, 16)];
    for (kind, needed) in fixed_bytes {
        for len in 0..needed {
            assert!(Request::decode(kind, &vec![0; len]).is_err(), "kind {kind} with {len} bytes");
        }
    }
    assert!(Reply::decode(129, b"not-us!!\x01\0\0\0").is_err());
    assert!(Reply::decode(1, b"mr-agent\x01\0\0\0").is_err(), "a request is not an answer");
    assert!(Request::decode(2, b"\0\0\0\0\0\0\0\0\xff\xfe").is_err(), "not UTF-8");
}

#[test]
fn abuse_R10_frame_length_is_checked_before_allocation() {
    let mut claim = Vec::new();
    claim.extend_from_slice(&u32::MAX.to_le_bytes());
    let error = read_frame::<Reply>(&mut claim.as_slice()).unwrap_err();
    assert!(matches!(error, AgentError::FrameTooLong { got, .. } if got == u32::MAX as usize));
    let error = read_frame::<Reply>(&mut [4u8, 0, 0, 0].as_slice()).unwrap_err();
    assert!(matches!(error, AgentError::BadFrame { .. }));
    let long = Reply::Data(vec![0; MAX_BODY_BYTES + 1]);
    assert!(matches!(write_frame(&mut Vec::new(), 1, &long), Err(AgentError::FrameTooLong { .. })));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64), kind: u8) {
        let _ = Reply::decode(kind, &bytes);
        let _ = Request::decode(kind, &bytes);
        let _ = read_frame::<Reply>(&mut bytes.as_slice());
    }

    #[test]
    fn what_decodes_encodes_the_same(
        bytes in proptest::collection::vec(any::<u8>(), 0..64),
        kind: u8,
    ) {
        if let Ok(request) = Request::decode(kind, &bytes) {
            let mut again = Vec::new();
            request.encode(&mut again);
            prop_assert_eq!(Request::decode(kind, &again).unwrap(), request);
        }
    }
}
