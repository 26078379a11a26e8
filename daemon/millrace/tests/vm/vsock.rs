//! Tests of vsock: guest to guest in a trust domain, guest to host, host to guest.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use lab::Vm;
use lab::{Guest, Lab, Vsock};

use crate::common::{
    MIB, alone, amount, boot, daemon, transfer, transfer_from_host, transfer_to_host,
};

#[test]
fn streams_in_all_directions() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let trust = "trust_domain = \"t\"";
    let daemon = daemon("d")
        .vm(Vm::new("a", trust).vsock(11))
        .vm(Vm::new("b", trust).vsock(12))
        .start(&lab)
        .unwrap();
    let guest =
        |name: &str| Guest::builder(name).vsock(Vsock::vhost_user(daemon.socket(name, "vsock")));
    let [a, b] = boot(&lab, [guest("a"), guest("b")]);
    let len_bytes = amount(256 * MIB);

    transfer(&a, &b, "vsock", "12:9000", len_bytes);
    transfer(&b, &a, "vsock", "11:9000", len_bytes);

    let host_socket = format!("{}_9001", daemon.vsock_path("a").display());
    let host = ("unix", host_socket.as_str());
    transfer_to_host(&a, host, ("vsock", "2:9001"), len_bytes, |run| run());

    transfer_from_host(&b, ("vsock", "12:9002"), len_bytes, |content| {
        let mut stream = UnixStream::connect(daemon.vsock_path("b")).unwrap();
        stream.write_all(b"CONNECT 9002\n").unwrap();
        let mut answer = Vec::new();
        let mut byte = [0];
        while byte != *b"\n" {
            stream.read_exact(&mut byte).unwrap();
            answer.push(byte[0]);
        }
        assert!(answer.starts_with(b"OK "), "{answer:?}");
        lab_agent::tools::xfer::send(stream, content).unwrap().json()
    });
}
