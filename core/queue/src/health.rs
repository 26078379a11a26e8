//! Health of a port: whether it still works, and why not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use base::event::Event;
use base::log_limit::LogLimit;
use base::sync::lock;

/// Health of a port, shared by all its queues and its session. A broken ring breaks the port, and
/// only the port.
#[derive(Debug)]
pub struct PortHealth {
    name: Arc<str>,
    broken: AtomicBool,
    reason: Mutex<Option<String>>,
    log: LogLimit,
    alarm: OnceLock<Event>,
}

impl PortHealth {
    /// A healthy port.
    pub fn new(name: &str) -> Arc<Self> {
        Arc::new(Self {
            name: name.into(),
            broken: AtomicBool::new(false),
            log: LogLimit::default(),
            reason: Mutex::new(None),
            alarm: OnceLock::new(),
        })
    }

    /// Sets the event that rings whenever the port breaks; the first one stays.
    pub fn set_alarm(&self, alarm: Event) {
        let _ = self.alarm.set(alarm);
    }

    /// The port's name (`vm/port`).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True while nothing has failed. One relaxed load.
    #[inline]
    pub fn is_live(&self) -> bool {
        !self.broken.load(Ordering::Relaxed)
    }

    /// Declares the port broken; the first reason is kept and logged.
    pub fn fail(&self, queue: Option<u16>, reason: &dyn std::fmt::Display) {
        let text = match queue {
            Some(q) => format!("queue {q}: {reason}"),
            None => reason.to_string(),
        };
        if !self.broken.swap(true, Ordering::SeqCst) {
            if let Some(left_out) = self.log.admit() {
                tracing::error!(port = %self.name, left_out, "port stopped: {text}");
            }
            *lock(&self.reason) = Some(text);
            // An event of our own does not fail; the reason is there in any case.
            let _ = self.alarm.get().map(Event::signal);
        }
    }

    /// Limit of the log lines that the port's front end can cause.
    pub fn log(&self) -> &LogLimit {
        &self.log
    }

    /// Reason why the port is broken; none while it is live.
    pub fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// Makes the port healthy again, for a new session.
    pub fn reset(&self) {
        *lock(&self.reason) = None;
        self.broken.store(false, Ordering::SeqCst);
    }
}
