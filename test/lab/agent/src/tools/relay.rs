//! A vsock connection from a port of one's choice, handed on to a TCP listener: so that a test on
//! the host can say to the daemon whatever a guest can.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;

use socket2::{Domain, SockAddr, Socket, Type};

use crate::AgentError;

/// Bytes handed on at once: more than the longest message of any protocol here.
const BUFFER_BYTES: usize = 128 << 10;

/// Connects to `(cid, port)` from `own_port` (0: any), then to the listener, and hands bytes on
/// until both sides have ended.
///
/// # Errors
/// One of the connections cannot be made.
pub fn run((cid, port): (u32, u32), own_port: u32, to: SocketAddr) -> Result<(), AgentError> {
    let vsock =
        Socket::new(Domain::VSOCK, Type::STREAM, None).map_err(AgentError::io("vsock socket"))?;
    if own_port != 0 {
        let own = SockAddr::vsock(libc::VMADDR_CID_ANY, own_port);
        vsock.bind(&own).map_err(AgentError::io(format!("bind vsock port {own_port}")))?;
    }
    let what = format!("connect to vsock {cid}:{port}");
    vsock.connect(&SockAddr::vsock(cid, port)).map_err(AgentError::io(what))?;
    let tcp = TcpStream::connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    tcp.set_nodelay(true).map_err(AgentError::io("TCP_NODELAY"))?;
    thread::scope(|scope| {
        scope.spawn(|| {
            hand_on(&vsock, &tcp);
            let _ = tcp.shutdown(Shutdown::Write);
        });
        hand_on(&tcp, &vsock);
        // The listener's end is the end: nobody reads what may still come.
        let _ = vsock.shutdown(Shutdown::Both);
    });
    Ok(())
}

/// Until one of them ends or fails, which the other side then sees as an end.
fn hand_on(mut from: impl Read, mut to: impl Write) {
    let mut buffer = vec![0; BUFFER_BYTES];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..len]).is_err() {
            return;
        }
    }
}
