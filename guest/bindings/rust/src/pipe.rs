//! Calls for pipes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use guest_abi::Reason;
use guest_abi::program::{Answer, MAGIC, OWN_POSITION, Request, VERSION, op};
use zerocopy::little_endian::{U16, U32, U64};

use crate::Error;
use crate::connection::{Connection, Wait, reason};

/// Offsets and time limit of a pipe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Start in a file that is read, in bytes; none: its own position, which advances. None for a
    /// socket.
    pub in_offset: Option<u64>,
    /// Start in a file that is written, likewise.
    pub out_offset: Option<u64>,
    /// Time limit, rounded up to milliseconds: then the bytes moved so far are the result. None: no
    /// limit.
    pub timeout: Option<Duration>,
}

impl Options {
    fn timeout_ms(&self) -> u32 {
        // 0 would mean no limit.
        let ms = |time: Duration| time.as_nanos().div_ceil(1_000_000).max(1);
        self.timeout.map_or(0, |time| u32::try_from(ms(time)).unwrap_or(u32::MAX))
    }

    fn request(&self, count: u64) -> Result<Request, Error> {
        let numbers = [self.in_offset, self.out_offset, Some(count)];
        if numbers.into_iter().flatten().any(|number| i64::try_from(number).is_err()) {
            return Err(Error::of(Reason::Malformed));
        }
        Ok(Request {
            timeout_ms: U32::new(self.timeout_ms()),
            source_offset: U64::new(self.in_offset.unwrap_or(OWN_POSITION)),
            sink_offset: U64::new(self.out_offset.unwrap_or(OWN_POSITION)),
            len_bytes: U64::new(count),
            ..request(op::PIPE)
        })
    }
}

fn request(op: u16) -> Request {
    Request {
        magic: U32::new(MAGIC),
        version: U16::new(VERSION),
        op: U16::new(op),
        flags: U32::ZERO,
        timeout_ms: U32::ZERO,
        source_offset: U64::ZERO,
        sink_offset: U64::ZERO,
        len_bytes: U64::ZERO,
    }
}

/// Returns the bytes moved, or the reason why there are none.
fn judge(answer: &Answer) -> Result<u64, Error> {
    match (answer.moved_bytes.get(), answer.errno.get()) {
        (0, errno) if errno > 0 => Err(Error::new(reason(answer), errno as i32)),
        (moved, _) => Ok(moved),
    }
}

/// Moves up to `count` bytes from `input` to `out` and returns when they have arrived. Returns
/// their number, which may be fewer, and 0 at the end of a file.
///
/// # Errors
/// Nothing was moved.
pub fn pipe(out: impl AsFd, input: impl AsFd, count: u64, options: &Options) -> Result<u64, Error> {
    begin(&out, &input, count, options, Wait::Yes)?.wait()
}

fn begin(
    out: &impl AsFd,
    input: &impl AsFd,
    count: u64,
    options: &Options,
    wait: Wait,
) -> Result<Pipe, Error> {
    let request = options.request(count)?;
    let connection = Connection::send(&request, &[input.as_fd(), out.as_fd()], wait)?;
    Ok(Pipe { connection, result: None })
}

/// Pipe that runs beside the program. Its descriptor is readable when it is over; dropping it
/// earlier cancels it.
#[derive(Debug)]
pub struct Pipe {
    connection: Connection,
    result: Option<Result<u64, Error>>,
}

impl Pipe {
    /// Begins a pipe without ever waiting. The descriptors may be closed at once.
    ///
    /// # Errors
    /// It could not begin, [`Reason::AgentBusy`] among others.
    pub fn start(
        out: impl AsFd,
        input: impl AsFd,
        count: u64,
        options: &Options,
    ) -> Result<Self, Error> {
        begin(&out, &input, count, options, Wait::No)
    }

    /// Returns the result, as [`pipe`] does, when the pipe is over; none while it runs.
    pub fn status(&mut self) -> Option<Result<u64, Error>> {
        self.look(Wait::No)
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// Nothing was moved.
    pub fn wait(mut self) -> Result<u64, Error> {
        let lost = Err(Error::of(Reason::Lost));
        self.look(Wait::Yes).unwrap_or(lost)
    }

    fn look(&mut self, wait: Wait) -> Option<Result<u64, Error>> {
        if self.result.is_none() {
            self.result = match self.connection.answer(wait) {
                Ok(None) => None,
                Ok(Some(answer)) => Some(judge(&answer)),
                // An agent that died may have moved bytes: their number is not known.
                Err(_) => Some(Err(Error::of(Reason::Lost))),
            };
        }
        self.result
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        let answered = match self.result {
            Some(Err(error)) => error.reason != Reason::Lost,
            Some(Ok(_)) => true,
            None => false,
        };
        if answered {
            self.connection.keep();
        }
    }
}

/// Offer of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Break-even size of pipes in this guest, as the agent has measured it; none: not known.
    pub min_bytes: Option<u64>,
}

/// Asks whether the host offers pipes now.
///
/// # Errors
/// It does not, or there is no agent.
pub fn query() -> Result<Offer, Error> {
    let connection = Connection::send(&request(op::QUERY), &[], Wait::Yes)?;
    let Ok(Some(answer)) = connection.answer(Wait::Yes) else { return Err(Error::no_agent()) };
    connection.keep();
    match reason(&answer) {
        Reason::Complete => {
            let kib = u64::from(answer.min_bytes_kib.get());
            Ok(Offer { min_bytes: (kib > 0).then_some(kib << 10) })
        }
        reason => Err(Error::new(reason, answer.errno.get() as i32)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up_and_numbers_limited() {
        let ms = |timeout| Options { timeout, ..Options::default() }.timeout_ms();
        assert_eq!(ms(None), 0);
        assert_eq!(ms(Some(Duration::ZERO)), 1);
        assert_eq!(ms(Some(Duration::from_micros(1001))), 2);
        assert_eq!(ms(Some(Duration::MAX)), u32::MAX);
        let at = |offset| Options { in_offset: Some(offset), ..Options::default() };
        assert_eq!(at(OWN_POSITION).request(1).unwrap_err().reason, Reason::Malformed);
        assert!(at(i64::MAX as u64).request(1).is_ok());
        assert!(Options::default().request(1 << 63).is_err());
    }
}
