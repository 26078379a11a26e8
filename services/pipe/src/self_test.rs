//! The self-test of a guest's file system: one block of placeholders, which the agent announces
//! before it writes it or reads over it.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use base::sync::lock;
use block::PlaceholderRequest;
use guest_abi::pipe::{PROBE_BLOCK_BYTES, ProbePlaces};

use crate::copy::write_all;
use crate::limits::SELF_TEST_TIMEOUT;
use crate::placed_request::{Direction, Tag, fetch, fill};

/// A self-test that was announced.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SelfTest {
    pub direction: Direction,
    /// The announcement.
    pub probe: ProbePlaces,
}

/// The self-test of a VM that is expected now, if one is.
pub(crate) struct ExpectedSelfTest {
    test: Mutex<Option<SelfTest>>,
    /// Milliseconds of `clock` until which it is waited for; 0: none is expected.
    until_ms: AtomicU64,
    clock: Instant,
}

impl ExpectedSelfTest {
    /// None is expected.
    pub fn new() -> Self {
        Self { test: Mutex::default(), until_ms: AtomicU64::new(0), clock: Instant::now() }
    }

    /// Expects this self-test, instead of the last one, for [`SELF_TEST_TIMEOUT`]; none: expects
    /// none.
    pub fn expect(&self, test: Option<SelfTest>) {
        let until =
            if test.is_some() { self.now_ms() + SELF_TEST_TIMEOUT.as_millis() as u64 } else { 0 };
        let mut expected = lock(&self.test);
        *expected = test;
        self.until_ms.store(until, Ordering::Release);
    }

    fn now_ms(&self) -> u64 {
        self.clock.elapsed().as_millis() as u64
    }

    /// Whether one is expected. One that does not come is forgotten.
    pub fn is_due(&self) -> bool {
        let until = self.until_ms.load(Ordering::Acquire);
        until > 0 && self.now_ms() < until
    }

    /// Takes the expected self-test, if it has this tag and direction: it comes once.
    pub fn take(&self, tag: &Tag, direction: Direction) -> Option<SelfTest> {
        let is_it = |test: &SelfTest| test.direction == direction && test.probe.tag == *tag;
        let mut expected = lock(&self.test);
        let test = expected.take_if(|test| self.is_due() && is_it(test))?;
        self.until_ms.store(0, Ordering::Release);
        Some(test)
    }
}

impl SelfTest {
    /// Completes the guest's request: writes the block that the agent expects, or looks whether the
    /// disk has it.
    pub fn complete(&self, placed: PlaceholderRequest) {
        let secret = self.probe.secret;
        let block = secret.repeat(PROBE_BLOCK_BYTES / secret.len());
        let range = usize::try_from(placed.at()).ok().and_then(|at| {
            block.get(at..at.checked_add(usize::try_from(placed.len_bytes()).ok()?)?)
        });
        let done = match (range, self.direction) {
            (Some(bytes), Direction::Read) => {
                let mut found = vec![0; bytes.len()];
                let read = fetch(&placed, &mut found);
                let wrong = || io::ErrorKind::InvalidData.into();
                read.and_then(|()| if found == bytes { Ok(()) } else { Err(wrong()) })
            }
            (Some(bytes), Direction::Write) => {
                fill(&placed, |file, offset| write_all(file, offset, bytes))
            }
            (None, _) => Err(io::ErrorKind::InvalidInput.into()),
        };
        placed.complete(done);
    }
}
