//! The agent's loop: reads requests, runs each in its turn or its own thread, sends answers.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::process::{Pid, Signal};

use crate::command;
use crate::files::{self, Incoming};
use crate::proto::{self, Reply, Request};
use crate::{AgentError, init};

/// Most commands and file reads at once.
pub const MAX_COMMANDS: usize = 64;
/// Most files being put at once.
pub const MAX_INCOMING: usize = 16;

type Groups = Arc<Mutex<HashMap<u32, Option<Pid>>>>;

/// Writer of answers; clones share one lock, so frames never mix.
struct Answers<W> {
    to: Arc<Mutex<W>>,
}

impl<W> Clone for Answers<W> {
    fn clone(&self) -> Self {
        Self { to: Arc::clone(&self.to) }
    }
}

impl<W: Write> Answers<W> {
    fn send(&self, id: u32, reply: &Reply) -> Result<(), AgentError> {
        proto::write_frame(&mut *lock(&self.to), id, reply)
    }

    fn finish(&self, id: u32, result: Result<Reply, AgentError>) -> Result<(), AgentError> {
        self.send(id, &result.unwrap_or_else(|error| Reply::Failed(error.to_string())))
    }
}

/// A panic of one command's thread must not silence the others.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves one host until it closes the connection, which kills the commands that still run.
///
/// # Errors
/// A frame that does not decode, a version that differs, an I/O error. A failed request is not an
/// error here: its text goes back to the host.
pub fn serve<R: Read, W: Write + Send + 'static>(mut from: R, to: W) -> Result<(), AgentError> {
    let answers = Answers { to: Arc::new(Mutex::new(to)) };
    let groups = Groups::default();
    let mut incoming: HashMap<u32, Incoming> = HashMap::new();
    loop {
        let (id, request) = match proto::read_frame(&mut from) {
            Err(AgentError::Closed { .. }) => break,
            other => other?,
        };
        match request {
            Request::Hello { version } => {
                if version != proto::VERSION {
                    let error = AgentError::Version { theirs: version, ours: proto::VERSION };
                    answers.finish(id, Err(error))?;
                    continue;
                }
                let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
                answers.send(id, &Reply::Hello { version: proto::VERSION, kernel })?;
            }
            Request::Run { timeout_ms, script } => {
                in_thread(&answers, &groups, id, move |answers, groups| {
                    run(id, &script, timeout_ms, answers, groups)
                })?;
            }
            Request::Get { path } => {
                in_thread(&answers, &groups, id, move |answers, _| {
                    files::send_file(&path, &mut |reply| answers.send(id, &reply))
                })?;
            }
            Request::Signal { target, signal } => {
                let group = lock(&groups).get(&target).copied().flatten();
                let result = match group {
                    Some(pid) => command::signal_group(pid, signal),
                    None => Err(AgentError::Refused(format!("request {target} runs no command"))),
                };
                answers.finish(id, result.map(|()| Reply::Done { len: 0, hash: 0 }))?;
            }
            Request::Shutdown => init::shutdown(),
            put => {
                if let Some(result) = receive(&mut incoming, id, put) {
                    answers.finish(id, result)?;
                }
            }
        }
    }
    // Nobody is left who could end them or read what they print.
    for pid in lock(&groups).values().flatten() {
        // It may have ended by itself.
        let _ = command::signal_group(*pid, Signal::KILL.as_raw());
    }
    Ok(())
}

/// Steps of putting a file; an answer when the file is complete or failed.
fn receive(
    incoming: &mut HashMap<u32, Incoming>,
    id: u32,
    request: Request,
) -> Option<Result<Reply, AgentError>> {
    match request {
        Request::PutOpen { .. } if incoming.len() >= MAX_INCOMING => {
            Some(Err(AgentError::Refused(format!("{MAX_INCOMING} files are being put, the limit"))))
        }
        Request::PutOpen { mode, path } => match Incoming::open(&path, mode, id) {
            Ok(file) => {
                incoming.insert(id, file);
                None
            }
            Err(error) => Some(Err(error)),
        },
        // Data of a file that failed before: the failure has been answered already.
        Request::PutData(bytes) => match incoming.get_mut(&id)?.data(&bytes) {
            Ok(()) => None,
            Err(error) => {
                incoming.remove(&id);
                Some(Err(error))
            }
        },
        Request::PutEnd { hash } => Some(incoming.remove(&id)?.end(hash)),
        _ => None,
    }
}

/// Runs a request that takes its time beside the others.
fn in_thread<W: Write + Send + 'static>(
    answers: &Answers<W>,
    groups: &Groups,
    id: u32,
    work: impl FnOnce(&Answers<W>, &Groups) -> Result<Reply, AgentError> + Send + 'static,
) -> Result<(), AgentError> {
    {
        let mut open = lock(groups);
        if open.len() >= MAX_COMMANDS {
            let text = format!("{MAX_COMMANDS} requests are running, the limit");
            return answers.finish(id, Err(AgentError::Refused(text)));
        }
        open.insert(id, None);
    }
    let (theirs, their_groups) = (answers.clone(), Arc::clone(groups));
    let started = thread::Builder::new().stack_size(256 * 1024).spawn(move || {
        let result = work(&theirs, &their_groups);
        lock(&their_groups).remove(&id);
        // The port is gone when this fails, and the loop above ends by itself.
        let _ = theirs.finish(id, result);
    });
    match started {
        Ok(_) => Ok(()),
        Err(error) => {
            lock(groups).remove(&id);
            answers.finish(id, Err(AgentError::io("start a thread")(error)))
        }
    }
}

fn run<W: Write>(
    id: u32,
    script: &str,
    timeout_ms: u64,
    answers: &Answers<W>,
    groups: &Groups,
) -> Result<Reply, AgentError> {
    let command = command::start(script, timeout_ms)?;
    let pid = command.pid();
    lock(groups).insert(id, Some(pid));
    answers.send(id, &Reply::Started { pid: pid.as_raw_nonzero().get().unsigned_abs() })?;
    command.finish(&mut |reply| answers.send(id, &reply))
}

#[cfg(test)]
mod tests;
