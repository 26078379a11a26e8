//! Log lines about failed requests: at most one a second for each queue, since a guest can cause as
//! many failures as it likes.

use std::io;

use crate::limits::LOG_INTERVAL_NS;
use crate::request::Refusal;
use crate::slab::Job;

/// Rate-limited log of one queue.
#[derive(Debug, Default)]
pub(crate) struct ErrorLog {
    /// Time of this poll.
    pub now_ns: u64,
    /// Time of the last line; `None` before the first.
    last_ns: Option<u64>,
    left_out: u64,
}

impl ErrorLog {
    /// Asks for a line: the number of lines left out before it, or `None` where it is too early.
    fn admit(&mut self) -> Option<u64> {
        let early = |last: u64| self.now_ns.saturating_sub(last) < LOG_INTERVAL_NS;
        if self.last_ns.is_some_and(early) {
            self.left_out += 1;
            return None;
        }
        self.last_ns = Some(self.now_ns);
        Some(std::mem::take(&mut self.left_out))
    }

    /// Logs a request that was refused.
    pub fn refused(&mut self, port: &str, queue: u16, refusal: Refusal) {
        if let Some(left_out) = self.admit() {
            let reason = refusal.name();
            tracing::warn!(port, queue, reason, left_out, "disk request refused");
        }
    }

    /// Logs a request that the back end failed.
    pub fn failed(&mut self, port: &str, queue: u16, job: &Job, errno: i32) {
        if let Some(left_out) = self.admit() {
            let error = io::Error::from_raw_os_error(errno);
            let offset = job.range.offset + job.done;
            let work = job.kind;
            tracing::warn!(port, queue, ?work, offset, %error, left_out, "disk I/O failed");
        }
    }

    /// Logs the first failed flush of an image: never left out.
    pub fn flush_failed(port: &str, queue: Option<u16>, errno: i32) {
        let error = io::Error::from_raw_os_error(errno);
        tracing::error!(
            port,
            queue,
            %error,
            "a flush failed: what was written since the last good one may be lost; all flushes of the \
             image fail until it is detached and attached again"
        );
    }

    /// Logs that requests are held from now on.
    pub fn held(&mut self, port: &str, queue: u16, job: &Job, errno: i32) {
        if let Some(left_out) = self.admit() {
            let error = io::Error::from_raw_os_error(errno);
            let offset = job.range.offset + job.done;
            tracing::warn!(
                port,
                queue,
                work = ?job.kind,
                offset,
                %error,
                left_out,
                "disk I/O failed: requests are held, and go on when the storage does, or by \
                 `millrace resume`"
            );
        }
    }

    /// Logs that held requests go on.
    pub fn resumed(&mut self, port: &str, queue: u16, requests: usize) {
        if let Some(left_out) = self.admit() {
            tracing::info!(port, queue, requests, left_out, "held disk requests go on");
        }
    }

    /// Logs that the disk takes no operations.
    pub fn broken_disk(&mut self, port: &str, queue: u16, error: &io::Error) {
        if let Some(left_out) = self.admit() {
            tracing::error!(port, queue, %error, left_out, "disk takes no operations");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_and_the_rest_is_counted() {
        let mut log = ErrorLog { now_ns: 5, ..ErrorLog::default() };
        assert_eq!(log.admit(), Some(0));
        assert_eq!(log.admit(), None);
        log.now_ns += LOG_INTERVAL_NS - 1;
        assert_eq!(log.admit(), None);
        log.now_ns += 1;
        assert_eq!(log.admit(), Some(2));
        assert_eq!(log.admit(), None);
    }
}
