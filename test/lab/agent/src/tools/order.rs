//! Whether datagrams keep their order: numbered ones in bursts, and a count of those that came
//! after a later one.

use std::net::{SocketAddr, UdpSocket};
use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use crate::AgentError;

/// Datagrams sent without a pause: enough to fill rings and queues on the way.
const BURST: u32 = 16;
/// Between two bursts. A receiver on the same core takes what it was sent meanwhile.
const PAUSE: Duration = Duration::from_millis(2);
/// The number that ends a run.
const END: u32 = u32::MAX;
/// How often the end is said, since it may be lost like any datagram.
const ENDS: u32 = 20;
/// Without any datagram for so long the receiver gives up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends until `is_over`, which is asked before each burst. Returns `{"op": "order_send", "sent":
/// …}`.
///
/// # Errors
/// Socket errors.
pub fn send(to: SocketAddr, is_over: impl Fn() -> bool) -> Result<Value, AgentError> {
    let any: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0; 16], 0).into() };
    let socket = UdpSocket::bind(any).map_err(AgentError::io("bind UDP"))?;
    socket.connect(to).map_err(AgentError::io(format!("connect UDP {to}")))?;
    let mut sent = 0u32;
    while !is_over() {
        for _ in 0..BURST {
            socket.send(&datagram(sent)).map_err(AgentError::io("send a datagram"))?;
            sent += 1;
        }
        sleep(PAUSE);
    }
    for _ in 0..ENDS {
        sleep(PAUSE);
        // A receiver that has seen the end is gone, and its system says so.
        let _ = socket.send(&datagram(END));
    }
    Ok(json!({"op": "order_send", "sent": sent}))
}

fn datagram(number: u32) -> [u8; 64] {
    let mut datagram = [0; 64];
    datagram[..4].copy_from_slice(&number.to_le_bytes());
    datagram
}

/// Receives until the end. Returns `{"op": "order_recv", "received": …, "overtaken": …}`, the
/// latter those that came after one with a higher number, or twice.
///
/// # Errors
/// Socket errors; nothing comes for a minute.
pub fn receive(socket: &UdpSocket) -> Result<Value, AgentError> {
    socket.set_read_timeout(Some(PATIENCE)).map_err(AgentError::io("set a time-out"))?;
    let (mut received, mut overtaken, mut next) = (0u64, 0u64, 0u32);
    let mut buffer = [0; 64];
    loop {
        let len = socket.recv(&mut buffer).map_err(AgentError::io("receive a datagram"))?;
        let Some(number) = buffer[..len].first_chunk().copied().map(u32::from_le_bytes) else {
            continue;
        };
        if number == END {
            return Ok(json!({
                "op": "order_recv", "received": received, "overtaken": overtaken,
            }));
        }
        received += 1;
        overtaken += u64::from(number < next);
        next = next.max(number + 1);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn what_is_late_or_doubled_is_counted() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        for number in [0, 1, 3, 2, 4, 4, 9, END] {
            from.send_to(&datagram(number), to).unwrap();
        }
        let got = receive(&socket).unwrap();
        assert_eq!((&got["received"], &got["overtaken"]), (&json!(7), &json!(2)));
    }

    #[test]
    fn a_run_over_loopback_is_in_order() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = socket.local_addr().unwrap();
        let sent = std::thread::scope(|scope| {
            let bursts = Cell::new(0);
            let is_over = move || bursts.replace(bursts.get() + 1) == 20;
            let sent = scope.spawn(move || send(to, is_over).unwrap());
            assert_eq!(receive(&socket).unwrap()["overtaken"], 0);
            sent.join().unwrap()
        });
        assert_eq!(sent["sent"], 20 * BURST);
    }
}
