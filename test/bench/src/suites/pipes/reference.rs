//! The reference: a process of the host, in a namespace of its own, that sends a file by `sendfile`
//! over a veth pair into the client's bridge. No VM can be better than that by more than chance.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::mpsc;

use lab::NetLab;

use crate::harness::error::BenchError;
use crate::harness::host::Thread;

/// Address that the reference listens on.
pub const ADDRESS: &str = "10.0.0.253";
/// Port that the reference listens on.
pub const PORT: u16 = 7000;

/// Joins a new namespace with the bridge of another, by a veth pair.
pub fn namespace(near: &NetLab, bridge: &str) -> Result<NetLab, BenchError> {
    let failed = |e| BenchError::lab("make a namespace for the reference", e);
    let far = NetLab::new().map_err(failed)?;
    let namespace = far.path().to_string_lossy().into_owned();
    let join = || {
        let peer = ["type", "veth", "peer", "name", "ref1", "netns", &namespace];
        near.ip(&[&["link", "add", "ref0"][..], &peer].concat())?;
        near.ip(&["link", "set", "ref0", "master", bridge, "up"])?;
        far.address("ref1", &format!("{ADDRESS}/24"))?;
        far.ip(&["link", "set", "ref1", "up"])
    };
    join().map_err(failed)?;
    Ok(far)
}

/// Sends the file to each client that asks, from a thread bound to a CPU; it ends with the program.
/// Returns where it listens, and the thread.
pub fn serve(far: &NetLab, file: &Path, cpu: usize) -> Result<(SocketAddr, Thread), BenchError> {
    let failed = |e: std::io::Error| BenchError::lab("listen for the reference", e);
    let listener = far
        .inside(|| TcpListener::bind((ADDRESS, PORT)))
        .map_err(|e| BenchError::lab("enter the reference's namespace", e))?
        .map_err(failed)?;
    let file = File::open(file).map_err(|e| BenchError::file("open", file, e))?;
    let to = listener.local_addr().map_err(failed)?;
    let (ready, started) = mpsc::sync_channel(1);
    let serve = move || {
        // The starter waits for this; it cannot be gone.
        let _ = ready.send(Thread::current());
        // It would only be slower on another CPU.
        let _ = base::cpu::pin_current_thread(cpu);
        for stream in listener.incoming().flatten() {
            // A client that goes away ends its connection, and its error says nothing.
            let _ = answer(&file, stream);
        }
    };
    std::thread::Builder::new().name("host-sendfile".into()).spawn(serve).map_err(failed)?;
    let thread = started.recv().map_err(|e| BenchError::lab("start the reference", e))?;
    Ok((to, thread))
}

/// `mrpipe`'s protocol.
fn answer(file: &File, stream: TcpStream) -> std::io::Result<()> {
    let len_bytes = file.metadata()?.len();
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    for round in 0u64.. {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            break;
        }
        let out = stream.get_mut();
        out.write_all(format!("MRPIPE {round} {len_bytes}\n").as_bytes())?;
        let mut at = 0;
        while at < len_bytes {
            let left = usize::try_from(len_bytes - at).unwrap_or(usize::MAX);
            if rustix::fs::sendfile(&*out, file, Some(&mut at), left)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        out.write_all(format!("END {round}\n").as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::suites::pipes::fetch::Connection;

    #[test]
    fn it_speaks_the_clients_protocol_round_after_round() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 300_000]).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = std::thread::spawn(move || answer(&file, listener.accept().unwrap().0));
        let mut connection = Connection::over(stream, 300_000);
        let hashes = [(); 2].map(|()| connection.transfer(0, true).unwrap().hash.unwrap());
        assert_eq!(hashes[0], hashes[1]);
        drop(connection);
        server.join().unwrap().unwrap();
    }
}
