//! The private network namespace. Needs root.

use std::net::{TcpListener, TcpStream};

use lab::NetLab;

#[test]
fn two_labs_have_networks_of_their_own() {
    let (one, two) = (NetLab::new().unwrap(), NetLab::new().unwrap());
    for lab in [&one, &two] {
        lab.bridge("br0").unwrap();
        lab.tap("tap0", Some("br0")).unwrap();
        lab.address("br0", "10.9.9.9/24").unwrap();
        lab.address("br0", "fd09::9/64").unwrap();
    }
    assert!(one.bridge("br0").unwrap_err().to_string().contains("br0"));
    let listener = one.inside(|| TcpListener::bind("10.9.9.9:7").unwrap()).unwrap();
    // The same address is free in the other namespace, and does not exist in our own.
    two.inside(|| drop(TcpListener::bind("10.9.9.9:7").unwrap())).unwrap();
    assert!(TcpListener::bind("10.9.9.9:7").is_err());
    one.inside(|| drop(TcpStream::connect("10.9.9.9:7").unwrap())).unwrap();
    listener.accept().unwrap();
}
