//! The client of part two: keep-alive connections that ask for one file over and over.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use lab::NetLab;

use super::fetch::{BUFFER_BYTES, connect, on_cpu};
use crate::harness::error::BenchError;

/// Longest head of an answer; servers here send a few hundred bytes.
const HEAD_BYTES: u64 = 8 << 10;

/// Connections to a web server.
#[derive(Debug)]
pub struct Clients {
    connections: Vec<BufReader<TcpStream>>,
    request: Vec<u8>,
    size_bytes: u64,
}

/// Answers that the clients saw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answer {
    /// Whole answers.
    pub requests: u64,
    /// From the first request to the last answer.
    pub took: Duration,
    /// CPU time of all of them.
    pub client_ns: u64,
}

impl Clients {
    /// Connects and asks for the file, of `size_bytes`, once on each connection.
    pub fn open(
        net: &NetLab,
        to: SocketAddr,
        path: &str,
        (count, size_bytes): (usize, u64),
    ) -> Result<Clients, BenchError> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {to}\r\n\r\n").into_bytes();
        let connections = (0..count).map(|_| Ok(BufReader::new(connect(net, to)?)));
        let connections = connections.collect::<Result<_, BenchError>>()?;
        let mut clients = Clients { connections, request, size_bytes };
        let mut buffer = vec![0; BUFFER_BYTES];
        for connection in &mut clients.connections {
            ask(connection, &clients.request, size_bytes, &mut buffer)?;
        }
        Ok(clients)
    }

    /// Asks on all connections at once, each for so long and to the end of its last answer.
    pub fn run(&mut self, cpu: usize, length: Duration) -> Result<Answer, BenchError> {
        let (request, size_bytes) = (&self.request, self.size_bytes);
        let begin = Barrier::new(self.connections.len());
        let one = |connection: &mut BufReader<TcpStream>| {
            on_cpu(cpu, || {
                let mut buffer = vec![0; BUFFER_BYTES];
                begin.wait();
                let (from, mut requests) = (Instant::now(), 0);
                while requests == 0 || from.elapsed() < length {
                    ask(connection, request, size_bytes, &mut buffer)?;
                    requests += 1;
                }
                Ok((from, Instant::now(), requests))
            })
        };
        let one = &one;
        let done: Vec<_> = std::thread::scope(|scope| {
            let connections = self.connections.iter_mut();
            let running: Vec<_> = connections.map(|c| scope.spawn(move || one(c))).collect();
            running.into_iter().map(|t| t.join()).collect()
        });
        let mut sum = Answer { requests: 0, took: Duration::ZERO, client_ns: 0 };
        let mut times: Option<(Instant, Instant)> = None;
        for client in done {
            let client = client.map_err(|_| BenchError::lab("a client", "it panicked"))?;
            let ((from, to, requests), client_ns) = client?;
            sum.requests += requests;
            sum.client_ns += client_ns;
            let (first, last) = times.unwrap_or((from, to));
            times = Some((first.min(from), last.max(to)));
        }
        sum.took = times.map_or(Duration::ZERO, |(first, last)| last - first);
        Ok(sum)
    }
}

/// One request and its whole answer.
fn ask(
    connection: &mut BufReader<TcpStream>,
    request: &[u8],
    size_bytes: u64,
    buffer: &mut [u8],
) -> Result<(), BenchError> {
    let failed = |e: std::io::Error| BenchError::lab("ask a web server", e);
    connection.get_mut().write_all(request).map_err(failed)?;
    let len_bytes = head(connection)?;
    if len_bytes != size_bytes {
        let why = format!("a body of {len_bytes} bytes instead of {size_bytes}");
        return Err(BenchError::lab("ask a web server", why));
    }
    let mut left = len_bytes;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let got = connection.read(&mut buffer[..most]).map_err(failed)?;
        if got == 0 {
            let why = format!("the connection ended {left} bytes too early");
            return Err(BenchError::lab("ask a web server", why));
        }
        left -= got as u64;
    }
    Ok(())
}

/// Reads the head of an answer; the length of its body.
fn head(connection: &mut BufReader<TcpStream>) -> Result<u64, BenchError> {
    let (mut limited, mut line) = (connection.take(HEAD_BYTES), String::new());
    let (mut first, mut len_bytes) = (None, None);
    loop {
        line.clear();
        let got = limited.read_line(&mut line);
        if got.map_err(|e| BenchError::lab("read an answer's head", e))? == 0 {
            let why = format!("it ended, or has more than {HEAD_BYTES} bytes");
            return Err(BenchError::lab("read an answer's head", why));
        }
        let text = line.trim_end();
        if text.is_empty() {
            break;
        }
        if let Some((name, value)) = text.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            len_bytes = value.trim().parse().ok();
        }
        first.get_or_insert_with(|| text.to_owned());
    }
    let first = first.unwrap_or_default();
    match len_bytes {
        Some(len_bytes) if first.starts_with("HTTP/1.1 200") => Ok(len_bytes),
        _ => Err(BenchError::lab("ask a web server", format!("it answered {first:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Answers each request, whatever it is, with the same text.
    fn clients(answer: &'static str, count: usize, size_bytes: u64) -> Clients {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut request = [0; 4];
                    while stream.read_exact(&mut request).is_ok() {
                        stream.write_all(answer.as_bytes()).unwrap();
                    }
                });
            }
        });
        let connect = || BufReader::new(TcpStream::connect(to).unwrap());
        let connections = (0..count).map(|_| connect()).collect();
        Clients { connections, request: b"GET ".to_vec(), size_bytes }
    }

    #[test]
    fn whole_answers_are_counted_on_all_connections() {
        let mut clients = clients("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", 3, 3);
        let answer = clients.run(0, Duration::from_millis(20)).unwrap();
        assert!(answer.requests >= 3, "{answer:?}");
        assert!(answer.took >= Duration::from_millis(20) && answer.client_ns > 0, "{answer:?}");
    }

    #[test]
    fn what_is_no_such_file_is_told() {
        let e = |answer| clients(answer, 1, 3).run(0, Duration::ZERO).unwrap_err().to_string();
        assert!(e("HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nabc").contains("404"));
        assert!(
            e("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd").contains("4 bytes instead of 3")
        );
        assert!(e("HTTP/1.1 200 OK\r\n\r\n").contains("200 OK"));
    }
}
