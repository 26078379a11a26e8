//! The `CONNECT` line, listeners, stale sockets.
#![allow(non_snake_case)]

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use super::*;

#[test]
fn connect_lines_are_taken_or_refused() {
    let cases: [(&[u8], Option<u32>); 14] = [
        (b"CONNECT 52", Some(52)),
        (b"connect 0", Some(0)),
        (b"CONNECT 4294967295", Some(u32::MAX)),
        (b"CONNECT  7 \r", Some(7)),
        (b"CONNECT 4294967296", None),
        (b"CONNECT -1", None),
        (b"CONNECT +1", None),
        (b"CONNECT 0x10", None),
        (b"CONNECT", None),
        (b"CONNECT 1 2", None),
        (b"CONNECT1", None),
        (b"HELLO 1", None),
        (b"", None),
        (b"CONNECT \xff", None),
    ];
    for (line, port) in cases {
        assert_eq!(parse_connect(line), port, "{:?}", String::from_utf8_lossy(line));
    }
}

fn pair() -> (OwnedFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    (ours.into(), theirs)
}

#[test]
fn a_line_leaves_what_follows_and_waits_for_its_end() {
    let (ours, mut theirs) = pair();
    assert_eq!(read_line(&ours), ConnectLine::Partial);
    theirs.write_all(b"CONNECT 5").unwrap();
    assert_eq!(read_line(&ours), ConnectLine::Partial);
    theirs.write_all(b"\nrest").unwrap();
    assert_eq!(read_line(&ours), ConnectLine::Port(5));
    let mut rest = [0; 10];
    assert_eq!(rustix::net::recv(&ours, &mut rest, RecvFlags::DONTWAIT).unwrap().1, 4);
    assert_eq!(&rest[..4], b"rest");
}

#[test]
fn a_line_is_at_most_32_bytes() {
    let (ours, mut theirs) = pair();
    theirs.write_all(&[b' '; MAX_LINE_BYTES - 1]).unwrap();
    assert_eq!(read_line(&ours), ConnectLine::Partial);
    theirs.write_all(b" ").unwrap();
    assert!(matches!(read_line(&ours), ConnectLine::Bad(_)));
}

#[test]
fn a_program_that_goes_is_not_waited_for() {
    let (ours, theirs) = pair();
    drop(theirs);
    assert!(matches!(read_line(&ours), ConnectLine::Bad(_)));
}

#[test]
fn listeners_are_the_owners_and_clean_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm");
    let listener = Listener::bind("vm", &path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let taken = Listener::bind("other", &path).unwrap_err().to_string();
    assert!(taken.contains("somebody listens there"), "{taken}");
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn a_stale_socket_is_replaced_and_a_file_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm");
    // A daemon that was killed leaves its socket's file.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let listener = Listener::bind("vm", &path).unwrap();
    assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
    drop(listener);
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(Listener::bind("vm", &path), Err(VsockError::Socket { .. })));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn abuse_V5_a_port_has_its_own_path_which_no_link_of_another_user_leads_from() {
    use std::os::unix::fs::{lchown, symlink};
    use std::os::unix::net::UnixListener;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm");
    let programs = ProgramSockets::at("vm", &path).unwrap();
    let _program = UnixListener::bind(dir.path().join("vm_52")).unwrap();
    programs.connect(52).unwrap();
    assert_eq!(programs.connect(53).unwrap_err().kind(), io::ErrorKind::NotFound);
    let _other = UnixListener::bind(dir.path().join("other")).unwrap();
    symlink("other", dir.path().join("vm_54")).unwrap();
    programs.connect(54).unwrap();
    if rustix::process::geteuid().is_root() {
        lchown(dir.path().join("vm_54"), Some(65_534), None).unwrap();
        let error = programs.connect(54).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
    let error = ProgramSockets::at("vm", &dir.path().join("missing/vm")).unwrap_err().to_string();
    assert!(error.contains("opening its folder"), "{error}");
}
