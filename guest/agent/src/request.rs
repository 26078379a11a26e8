//! Request of a program, served by a pipe that the program waits for or by one in the background.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::program::{Request, flag};

use crate::background;
use crate::outcome::PipeOutcome;
use crate::pipe::try_pipe;
use crate::shared::Shared;
use crate::socket::UNSENT_TIME;
use crate::wake::Wake;
use crate::watch::Watch;

/// Serves a request. Returns when the pipe needs nothing of it any more. `program` is the socket
/// that it came from, `wake` the event of the calling thread.
pub fn run(
    shared: &Shared,
    request: &Request,
    (source, sink): (OwnedFd, OwnedFd),
    program: BorrowedFd<'_>,
    wake: &Arc<Wake>,
) -> PipeOutcome {
    // Taken first: the time limit covers all steps.
    let timeout = Duration::from_millis(request.timeout_ms.get().into());
    let deadline = (!timeout.is_zero()).then(|| Instant::now() + timeout);
    if request.len_bytes.get() == 0 {
        return PipeOutcome::nothing(Reason::Complete);
    }
    let watch = Watch::new(shared, program, wake, deadline);
    if request.flags.get() & flag::BEHIND != 0 {
        return background::run(request, (source, sink), watch);
    }
    try_pipe(request, (source, sink), &watch, UNSENT_TIME)
}
