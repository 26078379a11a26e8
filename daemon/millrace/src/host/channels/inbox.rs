//! Inbox of a VM's channel thread: commands, and signals that its ports changed.

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use base::sync::{lock, wait, wait_timeout};
use control::plane::PlaneError;

/// Command of the control API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Join,
    Leave,
}

/// Next task of the thread.
#[derive(Debug)]
pub enum Todo {
    /// Look at the ports: something may have changed, or it is time.
    Look,
    /// A command, and the sender of its answer.
    Command(Command, Answer),
    /// End.
    Stop,
}

/// Sender of a command's answer.
pub type Answer = SyncSender<Result<(), PlaneError>>;

#[derive(Debug, Default)]
struct Content {
    look: bool,
    stop: bool,
    /// Commands that wait: at most one per connection to the control socket.
    commands: VecDeque<(Command, Answer)>,
    why: Option<String>,
}

/// Commands and signals that wait for the thread. Two signals before the thread looks count once.
#[derive(Debug, Default)]
pub struct Inbox {
    content: Mutex<Content>,
    wake: Condvar,
}

impl Inbox {
    /// Signals that something of the ports may have changed.
    pub fn look(&self) {
        lock(&self.content).look = true;
        self.wake.notify_one();
    }

    /// Has the thread end.
    pub fn stop(&self) {
        let mut content = lock(&self.content);
        content.stop = true;
        // Who waits for an answer gets none.
        content.commands.clear();
        self.wake.notify_one();
    }

    /// Whether the thread is to end.
    pub fn is_stopping(&self) -> bool {
        lock(&self.content).stop
    }

    /// Sends a command, and waits for its answer.
    pub fn ask(&self, command: Command) -> Result<(), PlaneError> {
        let (answer, answered) = sync_channel(1);
        let stopped = || PlaneError::Failed("the daemon's channels were stopped".into());
        let mut content = lock(&self.content);
        if content.stop {
            return Err(stopped());
        }
        content.commands.push_back((command, answer));
        drop(content);
        self.wake.notify_one();
        answered.recv().unwrap_or_else(|_| Err(stopped()))
    }

    /// Waits for the next task; a look after `limit` at the latest.
    pub fn next(&self, limit: Option<Duration>) -> Todo {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut content = lock(&self.content);
        loop {
            if content.stop {
                return Todo::Stop;
            }
            if let Some((command, answer)) = content.commands.pop_front() {
                return Todo::Command(command, answer);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if std::mem::take(&mut content.look) || left == Some(Duration::ZERO) {
                return Todo::Look;
            }
            content = match left {
                None => wait(&self.wake, content),
                Some(left) => wait_timeout(&self.wake, content, left).0,
            };
        }
    }

    /// Why the VM is no member; none when it is one.
    pub fn why(&self) -> Option<String> {
        lock(&self.content).why.clone()
    }

    /// Records why the VM is no member. True when that is news.
    pub fn set_why(&self, why: Option<&str>) -> bool {
        let mut content = lock(&self.content);
        let news = content.why.as_deref() != why;
        if news {
            content.why = why.map(Into::into);
        }
        news
    }
}
