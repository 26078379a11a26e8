//! A client that asks `mrpipe` for files over one connection and compares every byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use serde_json::{Value, json};

use crate::AgentError;
use crate::stream::Check;

/// Bytes read at once.
const CHUNK_BYTES: u64 = 1 << 20;

/// Asks for `rounds` times `bytes` of seed 1, each behind a header line and before a trailer line.
///
/// # Errors
/// The connection fails or ends early; a line or a byte is not what it must be.
pub fn run(to: SocketAddr, rounds: u64, bytes: u64) -> Result<Value, AgentError> {
    let start = Instant::now();
    let stream = TcpStream::connect(to).map_err(AgentError::io(format!("connect to {to}")))?;
    let mut stream = BufReader::new(stream);
    for round in 0..rounds {
        stream.get_mut().write_all(b"next\n").map_err(AgentError::io("ask"))?;
        read_line(&mut stream, &format!("MRPIPE {round} {bytes}\n"))?;
        read_content(&mut stream, bytes)?;
        read_line(&mut stream, &format!("END {round}\n"))?;
    }
    let secs = start.elapsed().as_secs_f64();
    Ok(json!({"op": "fetch", "rounds": rounds, "bytes": rounds * bytes, "secs": secs}))
}

fn read_line(stream: &mut impl BufRead, want: &str) -> Result<(), AgentError> {
    let mut line = Vec::new();
    // No more than what is due: behind a wrong byte may be any number of others without an end.
    stream
        .take(want.len() as u64)
        .read_until(b'\n', &mut line)
        .map_err(AgentError::io("read a line"))?;
    if line == want.as_bytes() {
        return Ok(());
    }
    Err(AgentError::Mismatch(format!("{:?} for {want:?}", String::from_utf8_lossy(&line))))
}

fn read_content(stream: &mut impl Read, bytes: u64) -> Result<(), AgentError> {
    let (mut check, mut chunk) = (Check::new(1), vec![0; CHUNK_BYTES as usize]);
    while check.received() < bytes {
        let n = (bytes - check.received()).min(CHUNK_BYTES) as usize;
        stream.read_exact(&mut chunk[..n]).map_err(AgentError::io("read"))?;
        check.take(&chunk[..n])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::Stream;

    fn serve(wrong: bool) -> Result<Value, AgentError> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            for round in 0..2 {
                stream.read_line(&mut String::new()).unwrap();
                let mut bytes = vec![0; 5000];
                Stream::new(1).fill(&mut bytes);
                bytes[4321] ^= u8::from(wrong && round == 1);
                let out = stream.get_mut();
                writeln!(out, "MRPIPE {round} 5000").unwrap();
                out.write_all(&bytes).unwrap();
                writeln!(out, "END {round}").unwrap();
            }
        });
        let got = run(to, 2, 5000);
        server.join().unwrap();
        got
    }

    #[test]
    fn each_byte_of_each_round_is_compared() {
        assert_eq!(serve(false).unwrap()["bytes"], 10_000);
        let error = serve(true).unwrap_err().to_string();
        assert!(error.contains("byte 4321"), "{error}");
    }
}
