//! The host's end of the agent protocol.

use std::collections::HashMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use base::sync::lock;
use lab_agent::AgentError;
use lab_agent::proto::{self, Reply, Request};

/// Most bytes of one command's output that the host keeps.
pub const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Most bytes of one file that [`crate::Guest::get`] reads.
pub const MAX_FILE_BYTES: usize = 1 << 30;

type Waiting = Arc<Mutex<Option<HashMap<u32, Sender<Reply>>>>>;

/// A connection to one guest's agent. Requests of several threads run side by side.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    to: Arc<Mutex<UnixStream>>,
    waiting: Waiting,
    next: Arc<AtomicU32>,
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection ended: the guest is gone.
    Gone,
    /// The time is over.
    Late,
    /// The agent or the protocol said no.
    Agent(AgentError),
}

impl From<AgentError> for Failure {
    fn from(error: AgentError) -> Self {
        match error {
            AgentError::Closed { .. } => Self::Gone,
            // The socket's other end is QEMU; writing to it fails only when QEMU is gone.
            AgentError::Io { .. } => Self::Gone,
            other => Self::Agent(other),
        }
    }
}

impl Agent {
    /// Takes the socket that QEMU connected and starts the thread that sorts answers.
    pub(crate) fn new(stream: UnixStream) -> Result<Self, AgentError> {
        let mut from = stream.try_clone().map_err(AgentError::io("duplicate the agent socket"))?;
        let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let theirs = Arc::clone(&waiting);
        thread::Builder::new()
            .name("lab-agent".into())
            .spawn(move || {
                while let Ok((id, reply)) = proto::read_frame::<Reply>(&mut from) {
                    if let Some(sender) = lock(&theirs).as_ref().and_then(|all| all.get(&id)) {
                        // An asker that stopped waiting has dropped its end.
                        let _ = sender.send(reply);
                    }
                }
                // Dropping the senders wakes everyone who waits.
                lock(&theirs).take();
            })
            .map_err(AgentError::io("start the agent's reader"))?;
        Ok(Self { to: Arc::new(Mutex::new(stream)), waiting, next: Arc::default() })
    }

    /// Sends the first frame of a request.
    pub(crate) fn ask(&self, request: &Request) -> Result<Call, Failure> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answers) = channel();
        lock(&self.waiting).as_mut().ok_or(Failure::Gone)?.insert(id, sender);
        let call = Call { agent: self.clone(), id, answers };
        call.more(request)?;
        Ok(call)
    }

    /// Ends the connection, which ends the reader thread.
    pub(crate) fn close(&self) {
        // Fails when it has ended already.
        let _ = lock(&self.to).shutdown(std::net::Shutdown::Both);
    }
}

/// One request and its answers.
#[derive(Debug)]
pub(crate) struct Call {
    agent: Agent,
    id: u32,
    answers: Receiver<Reply>,
}

impl Call {
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Sends a further frame of the same request.
    pub(crate) fn more(&self, request: &Request) -> Result<(), Failure> {
        Ok(proto::write_frame(&mut *lock(&self.agent.to), self.id, request)?)
    }

    /// The next answer; [`Reply::Failed`] becomes an error.
    pub(crate) fn next(&self, until: Instant) -> Result<Reply, Failure> {
        let left = until.saturating_duration_since(Instant::now());
        match self.answers.recv_timeout(left) {
            Ok(Reply::Failed(text)) => Err(Failure::Agent(AgentError::Refused(text))),
            Ok(reply) => Ok(reply),
            Err(RecvTimeoutError::Timeout) => Err(Failure::Late),
            Err(RecvTimeoutError::Disconnected) => Err(Failure::Gone),
        }
    }

    /// The next answer, which must be the end of a request that moves data or nothing.
    pub(crate) fn done(&self, until: Instant) -> Result<(u64, u128), Failure> {
        match self.next(until)? {
            Reply::Done { len, hash } => Ok((len, hash)),
            other => Err(unexpected(&other)),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(waiting) = lock(&self.agent.waiting).as_mut() {
            waiting.remove(&self.id);
        }
    }
}

pub(crate) fn unexpected(reply: &Reply) -> Failure {
    use lab_agent::proto::Message;
    let what = "an answer that does not belong to the request";
    Failure::Agent(AgentError::BadFrame { kind: reply.kind(), what })
}

/// Puts a file; `mode` is its permissions.
pub(crate) fn put(
    agent: &Agent,
    path: &str,
    mode: u32,
    content: &[u8],
    time: Duration,
) -> Result<(), Failure> {
    let until = Instant::now() + time;
    let call = agent.ask(&Request::PutOpen { mode, path: path.into() })?;
    for chunk in content.chunks(proto::CHUNK_BYTES) {
        call.more(&Request::PutData(chunk.to_vec()))?;
    }
    call.more(&Request::PutEnd { hash: xxhash_rust::xxh3::xxh3_128(content) })?;
    call.done(until).map(|_| ())
}

/// Reads a file and checks its hash.
pub(crate) fn get(agent: &Agent, path: &str, time: Duration) -> Result<Vec<u8>, Failure> {
    let until = Instant::now() + time;
    let call = agent.ask(&Request::Get { path: path.into() })?;
    let mut content = Vec::new();
    loop {
        match call.next(until)? {
            Reply::Data(bytes) => {
                if content.len() + bytes.len() > MAX_FILE_BYTES {
                    let text = format!("{path} is larger than {MAX_FILE_BYTES} bytes, the limit");
                    return Err(Failure::Agent(AgentError::Refused(text)));
                }
                content.extend_from_slice(&bytes);
            }
            Reply::Done { len, hash } => {
                let ours = xxhash_rust::xxh3::xxh3_128(&content);
                if len != content.len() as u64 || hash != ours {
                    return Err(Failure::Agent(AgentError::Mismatch(format!(
                        "{path}: {} bytes with hash {ours:032x} arrived of {len} with {hash:032x}",
                        content.len()
                    ))));
                }
                return Ok(content);
            }
            other => return Err(unexpected(&other)),
        }
    }
}

/// Reads a host file with its permissions.
pub(crate) fn host_file(path: &Path) -> std::io::Result<(u32, Vec<u8>)> {
    use std::os::unix::fs::PermissionsExt;
    Ok((fs::metadata(path)?.permissions().mode() & 0o7777, fs::read(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> Agent {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let writer = theirs.try_clone().unwrap();
        thread::spawn(move || lab_agent::serve::serve(theirs, writer));
        Agent::new(ours).unwrap()
    }

    #[test]
    fn files_and_side_by_side_commands() {
        let agent = pair();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file").to_str().unwrap().to_owned();
        let content = vec![7; 300_000];
        let time = Duration::from_secs(60);
        put(&agent, &path, 0o600, &content, time).unwrap();
        assert!(get(&agent, &path, time).unwrap() == content);
        let missing = get(&agent, "/no/such/file", time).unwrap_err();
        let is_named = |text: &str| text.contains("/no/such/file");
        assert!(matches!(missing, Failure::Agent(AgentError::Refused(text)) if is_named(&text)));

        let run = |script: &str| {
            agent.ask(&Request::Run { timeout_ms: 0, script: script.into() }).unwrap()
        };
        let (slow, quick) = (run("sleep 1000"), run("true"));
        let until = Instant::now() + time;
        assert!(matches!(slow.next(until).unwrap(), Reply::Started { .. }));
        assert!(matches!(quick.next(until).unwrap(), Reply::Started { .. }));
        assert_eq!(quick.next(until).unwrap(), Reply::Exit { code: 0, timed_out: false });
        let signal = Request::Signal { target: slow.id(), signal: 9 };
        agent.ask(&signal).unwrap().done(until).unwrap();
        assert_eq!(slow.next(until).unwrap(), Reply::Exit { code: 137, timed_out: false });
    }

    #[test]
    fn everyone_who_waits_hears_of_the_end() {
        let agent = pair();
        let run = Request::Run { timeout_ms: 0, script: "sleep 1000".into() };
        let call = agent.ask(&run).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        assert!(matches!(call.next(until).unwrap(), Reply::Started { .. }));
        let signal = Request::Signal { target: call.id(), signal: 9 };
        agent.ask(&signal).unwrap().done(until).unwrap();
        assert!(matches!(call.next(until).unwrap(), Reply::Exit { .. }));
        agent.close();
        assert!(matches!(call.next(until), Err(Failure::Gone)));
        assert!(matches!(call.next(Instant::now()), Err(Failure::Gone | Failure::Late)));
    }
}
