//! The client of part one: asks for the file over one connection, again and again.

use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use lab::NetLab;

use crate::harness::error::BenchError;
use crate::harness::host::{self, Thread};

/// Bytes taken from a socket at once.
pub const BUFFER_BYTES: usize = 256 << 10;
/// Longest silence: an emulated guest that shares its CPU with three others is that slow at most.
const SILENCE: Duration = Duration::from_secs(60);

/// A connection to something that speaks `mrpipe`'s protocol.
#[derive(Debug)]
pub struct Connection {
    stream: BufReader<TcpStream>,
    round: u64,
    len_bytes: u64,
}

/// A transfer as the client saw it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// From the request to the end of the trailer.
    pub took: Duration,
    /// CPU time of the client.
    pub client_ns: u64,
    /// Hash of the file's bytes, if asked for.
    pub hash: Option<u64>,
}

/// Connects from a namespace.
pub fn connect(net: &NetLab, to: SocketAddr) -> Result<TcpStream, BenchError> {
    let failed = |why: String| BenchError::lab(format!("connect to {to}"), why);
    let dial = || {
        let stream = TcpStream::connect_timeout(&to, SILENCE)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    let dialled = net.inside(dial).map_err(|e| failed(e.to_string()))?;
    dialled.map_err(|e: std::io::Error| failed(e.to_string()))
}

/// Runs a client's work on a thread of its own, bound to a CPU; with the CPU time that it took.
pub fn on_cpu<T: Send>(
    cpu: usize,
    work: impl FnOnce() -> Result<T, BenchError> + Send,
) -> Result<(T, u64), BenchError> {
    let bound = || {
        base::cpu::pin_current_thread(cpu)
            .map_err(|e| BenchError::lab(format!("run on CPU {cpu}"), e))?;
        let value = work()?;
        Ok((value, host::times(Thread::current())?.ran_ns))
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("client".into()).spawn_scoped(scope, bound);
        let thread = thread.map_err(|e| BenchError::lab("start a client", e))?;
        thread.join().map_err(|_| BenchError::lab("a client", "it panicked"))?
    })
}

impl Connection {
    /// Connects from a namespace; the file has `len_bytes`.
    pub fn open(net: &NetLab, to: SocketAddr, len_bytes: u64) -> Result<Connection, BenchError> {
        Ok(Connection::over(connect(net, to)?, len_bytes))
    }

    /// Over a connection that stands.
    pub fn over(stream: TcpStream, len_bytes: u64) -> Connection {
        Connection { stream: BufReader::new(stream), round: 0, len_bytes }
    }

    /// Asks for the file and takes it, on a CPU. Hashing costs CPU time: not while measuring.
    pub fn transfer(&mut self, cpu: usize, hashed: bool) -> Result<Transfer, BenchError> {
        let ((took, hash), client_ns) = on_cpu(cpu, || {
            let begin = Instant::now();
            let hash = self.take(hashed)?;
            Ok((begin.elapsed(), hash))
        })?;
        Ok(Transfer { took, client_ns, hash })
    }

    fn take(&mut self, hashed: bool) -> Result<Option<u64>, BenchError> {
        let (round, len_bytes) = (self.round, self.len_bytes);
        self.round += 1;
        let failed = |e: std::io::Error| BenchError::lab(format!("take transfer {round}"), e);
        self.stream.get_mut().write_all(b"next\n").map_err(failed)?;
        self.line(&format!("MRPIPE {round} {len_bytes}\n"))?;
        let mut hash = hashed.then(DefaultHasher::new);
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut left = len_bytes;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let got = self.stream.read(&mut buffer[..most]).map_err(failed)?;
            if got == 0 {
                let why = format!("the connection ended {left} bytes too early");
                return Err(BenchError::lab(format!("take transfer {round}"), why));
            }
            if let Some(hash) = &mut hash {
                hash.write(&buffer[..got]);
            }
            left -= got as u64;
        }
        self.line(&format!("END {round}\n"))?;
        Ok(hash.map(|h| h.finish()))
    }

    fn line(&mut self, want: &str) -> Result<(), BenchError> {
        let mut got = Vec::new();
        // A line that never ends is no header: as much as is wanted is enough.
        let mut limited = (&mut self.stream).take(want.len() as u64);
        let read = limited.read_until(b'\n', &mut got);
        match read {
            Ok(_) if got == want.as_bytes() => Ok(()),
            Ok(_) => {
                let why = format!("{:?} instead", String::from_utf8_lossy(&got));
                Err(BenchError::lab(format!("wait for {want:?}"), why))
            }
            Err(e) => Err(BenchError::lab(format!("wait for {want:?}"), e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A server that sends some bytes to whoever connects, and a connection to it.
    fn against(answer: Vec<u8>, len_bytes: u64) -> Connection {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 5];
            stream.read_exact(&mut request).unwrap();
            stream.write_all(&answer).unwrap();
        });
        Connection::over(TcpStream::connect(to).unwrap(), len_bytes)
    }

    #[test]
    fn a_whole_answer_is_taken_and_hashed() {
        let answer = |body: &[u8]| [b"MRPIPE 0 4\n", body, b"END 0\n"].concat();
        let hash = |body| against(answer(body), 4).transfer(0, true).unwrap().hash.unwrap();
        assert_eq!(hash(b"abcd"), hash(b"abcd"));
        assert_ne!(hash(b"abcd"), hash(b"abce"));
        assert_eq!(against(answer(b"abcd"), 4).transfer(0, false).unwrap().hash, None);
    }

    #[test]
    fn wrong_and_short_answers_are_told() {
        let e =
            |answer: &[u8]| against(answer.to_vec(), 4).transfer(0, false).unwrap_err().to_string();
        assert!(e(b"MRPIPE 0 5\n").contains("\"MRPIPE 0 5\\n\" instead"));
        assert!(e(b"MRPIPE 0 4\nab").contains("ended 2 bytes too early"));
        assert!(e(b"MRPIPE 0 4\nabcdEND 1\n").contains("wait for \"END 0\\n\""));
    }
}
