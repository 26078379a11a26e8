//! Numbers of this crate, each with its reason.

use std::time::Duration;

use guest_abi::pipe::MAX_TAKE_BYTES;

/// Most bytes of one pipe; more is moved in parts. Half of the sequence space, by which numbers are
/// compared, and half again for what is sent meanwhile.
pub const MAX_LEN_BYTES: u64 = 1 << 30;

/// Bytes that a thread moves for one pipe before it looks after others: 1 MiB takes a fraction of a
/// millisecond from the page cache, and a disk likes it.
pub const QUANTUM_BYTES: usize = 1 << 20;

/// Time that the guest's last bytes may take from its socket to the switch. They are in its
/// transmit ring; a guest that does not get a CPU for so long would not have sent the file soon
/// either.
pub const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// Period after which a pipe that waits is looked at without a reason: a net below the events.
pub const RECHECK_PERIOD: Duration = Duration::from_millis(500);

/// Time, on average, that a pipe at its VM's ceiling waits beyond the moment at which there are
/// bytes again: as long as the sidecores let a queue wait then, so that both get some.
pub const HELD_PAUSE: Duration = Duration::from_micros(500);

/// Pause before acknowledgements are looked for again that the switch has seen and the twin not
/// yet.
pub const RECHECK_SOON: Duration = Duration::from_millis(1);

/// Time that the peer has, once a pipe is given up, to acknowledge what it has been sent
/// already. Until then the bytes stay where they are, and so does the guest's lease, which its
/// kernel breaks after 45 s. For a peer that takes longer a file's bytes are copied, and the pipe
/// ends; those of another connection cannot be had again, and both connections are lost.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Silence after which a peer that acknowledges nothing is lost: about as long as Linux tries
/// (`tcp_retries2`).
pub const SILENCE_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Time that the peer has to acknowledge where somebody waits to write to the file: most peers
/// acknowledge within a round trip.
pub const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time that the peer has to acknowledge where the program or the agent wants no more of the
/// pipe: an agent that stops waits for 10 s, and then its leases are gone.
pub const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections of a VM whose peers acknowledge copied bytes: each holds as many as a socket may
/// have on its way, some megabytes. One more is lost.
pub const MAX_DETACHED: u64 = 32;

/// Time that a daemon that stops waits for peers to acknowledge what they were sent: most do within
/// a round trip, and whoever restarts a daemon waits for it.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Time that an agent has for its hello, and for taking a message. It is a local program; one
/// that stopped must not hold a thread for ever.
pub const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Most messages that are taken from an agent in [`MESSAGE_PERIOD`]: a pipe asks the switch's
/// worker, which serves others. A pipe of 1 MiB for each message would be 10 GB/s.
pub const MAX_MESSAGES: u32 = 1000;

/// Period of [`MAX_MESSAGES`].
pub const MESSAGE_PERIOD: Duration = Duration::from_millis(100);

/// Time that a self-test with placeholders is waited for, once it was announced: meanwhile the
/// disks look at each write of the guest. An emulated guest on a busy host takes some seconds.
pub const SELF_TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Most disks that an agent can know: as many as a VM can have ports.
pub const MAX_PROBED_DISKS: usize = 256;

/// Most pipes of a VM, if its config says nothing.
pub const DEFAULT_MAX_PIPES: u32 = 256;

/// Threads of a VM's pool, if its config says nothing: sending from the page cache fills a core
/// with one or two, the others wait for disks.
pub const DEFAULT_THREADS: u16 = 4;

/// Bytes on their way from one connection to another, or from one file to another, in a pipe(2) of
/// the kernel: most that an unprivileged one may hold.
pub const SPLICE_BYTES: usize = 1 << 20;

/// Most answers of an agent about one pipe that wait for its next step: two are outstanding at
/// most.
pub const MAX_ANSWERS: usize = 8;

/// Most bytes of a file in answers that wait: a range of each piece ([`MAX_PIECES`]), and one more.
pub const MAX_ANSWER_BYTES: usize = (MAX_PIECES + 1) * MAX_TAKE_BYTES;

/// Time that the guest has to move the bytes that came to it before the pipe: some of them may
/// still be lost on their way, and sent again.
pub const OWN_BYTES_TIMEOUT: Duration = Duration::from_secs(60);

/// Most bytes of a file that the guest is asked to write at a time: each request costs it a message
/// and a few requests to its disk.
pub const WRITE_REQUEST_BYTES: usize = 4 << 20;

/// Most bytes of a request whose bytes wait in the daemon's memory: those of a connection, or of a
/// file without a lease.
pub const BUFFER_BYTES: usize = 1 << 20;

/// Most requests to write, or to read, that are outstanding at a time: while the guest does one,
/// the next is made.
pub const MAX_OPEN_REQUESTS: usize = 2;

/// Least bytes of a read over placeholders: memory that once had some is not read over by so many
/// requests of others in just their order. Less than that is sent as bytes ([`MAX_TAKE_BYTES`]).
pub const MIN_READ_BYTES: u64 = 64 << 10;

/// Most pieces of a file without a lease, of [`BUFFER_BYTES`], that wait in memory: those that the
/// guest reads, and one that goes to the peer meanwhile.
pub const MAX_PIECES: usize = MAX_OPEN_REQUESTS + 1;

/// Most pipes of a VM at a time that hold bytes in memory: from connections to files, and from
/// files without a lease. They hold [`BUFFER_BYTES`] for each outstanding request, and for the next
/// one.
pub const MAX_BUFFERING_PIPES: usize = 64;

/// Most requests over a pipe's placeholders that wait: the guest cuts what it is asked for into
/// requests of a megabyte or so. Those that find no room are done as they are, and what they stand
/// for is sent.
pub const MAX_WAITING_REQUESTS: usize = 256;
