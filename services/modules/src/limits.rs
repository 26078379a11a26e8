//! Every limit of this crate, with its reason. Those of the protocol are in `guest_abi::module`.

use std::time::Duration;

/// Time for which a client's state outlives its connection: a guest's program that lost it connects
/// again at once; transactions with locks should not wait much longer.
pub const LINGER: Duration = Duration::from_secs(10);

/// Limit of clients of a module: a database has one for each of its sessions.
pub const MAX_CLIENTS: usize = 4096;

/// Limit of connections of a VM that have not said hello.
pub const MAX_GREETING: usize = 64;

/// Time that a hello may take.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes of replies that are kept for a client. Commits answer with a few dozen bytes.
pub use guest_abi::module::KEPT_BYTES;

/// Bytes of replies that wait for a client that does not read: then no request of it is read
/// either.
pub const WAITING_BYTES: usize = 1 << 20;

/// Bytes of events of one call of a module: 64 rows of 64 KiB. One request fits in any case.
pub const CALL_BYTES: usize = 4 << 20;

/// Replies that a module may give in one call: to all requests of all clients.
pub const GIVEN_REPLIES: usize = MAX_CLIENTS * guest_abi::module::MAX_IN_FLIGHT as usize;

/// Bytes that are read of a connection at a time.
pub const READ_BYTES: usize = 256 << 10;

/// Bytes of a process that hold what came of clients, what waits for them and what is kept for
/// them, beyond each module's [`SHARE_BYTES`]: 16 of the longest requests.
pub const POT_BYTES: usize = 256 << 20;

/// Bytes of that kind that each module has in any case, so that clients of one cannot starve
/// another: a longest request, with room for its buffer to grow.
pub const SHARE_BYTES: usize = 32 << 20;

/// Room that is made in front of a call, at the cost of the client that holds most: a longest
/// reply.
pub const ROOM_BYTES: usize = 17 << 20;

/// A buffer of a connection that is empty keeps no more: thousands of them may be idle.
pub const IDLE_BYTES: usize = 4 << 10;

/// Memory that a frame takes beside its bytes: its place in lists, and the allocator's own.
pub const FRAME_OVERHEAD_BYTES: usize = 96;

/// Replies up to here are taken when there is no room, too: they say what became of a transaction.
pub const SMALL_BYTES: usize = 256;

/// Kept replies of a client that stay when there is no room: the small ones of all its requests.
pub const KEPT_ANYWAY_BYTES: usize = 16 << 10;

/// Memory of a process beside all this and its modules' own: code, stacks, the allocator's slack.
pub const OWN_MEMORY_BYTES: u64 = 512 << 20;

/// Memory of a process for each module: the batch of a call while its buffer grows, and small
/// replies of all clients.
pub const MODULE_MEMORY_BYTES: u64 = 192 << 20;

/// Limit of pieces of one `writev`.
pub const WRITE_PIECES: usize = 64;

/// CPU time between two looks at a call: a timer of the kernel, as fine as its tick of 4 ms allows.
pub const TICK: Duration = Duration::from_millis(10);

/// CPU time that a module may take for its start, when it reads its files: 1 GiB of log at 100
/// MB/s, six times over.
pub const START_DEADLINE: Duration = Duration::from_secs(60);

/// Instances that may fail one after the other while they start, before requests are told so.
pub const MAX_FAILED_STARTS: u32 = 3;

/// Pause in front of the next start from then on; doubled each time.
pub const FIRST_RETRY: Duration = Duration::from_secs(1);

/// The longest such pause: whatever was mended is noticed soon.
pub const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// Least charge for a sync: as a disk's smallest request.
pub const SYNC_CHARGE_BYTES: u64 = 4096;

/// Use of the disk, about, after which it is reported to the daemon, which charges it:
/// ledgers forget larger ones in part.
pub const USED_BYTES: u64 = 1 << 20;

/// Time after which less is reported, too.
pub const USED_INTERVAL: Duration = Duration::from_millis(100);

/// Lines that a module may log per second; more are counted.
pub const LOG_LINES_PER_S: u32 = 20;

/// Longest file of WebAssembly. Compiling takes about a second per MiB.
pub const MAX_WASM_BYTES: u64 = 16 << 20;

/// Largest memory of a module: what its pointers reach.
pub const MAX_MEMORY_BYTES: u64 = 4 << 30;

/// Stack of a module's native code.
pub const STACK_BYTES: usize = 1 << 20;

/// Bytes that are copied at a time where files are written anew.
pub const COPY_BYTES: usize = 1 << 20;

/// Time for which a new process waits for a folder that another one has locked: longer than that
/// one is given to end before it is killed.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// Time after which it logs whom it waits for.
pub const LOCK_PATIENCE: Duration = Duration::from_secs(5);

/// Time that a process may take to end once it was told to; then it is killed.
pub const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for which a killed process is waited for when all is to end: one whose disk hangs does not
/// end.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Time that other modules may take to load their code, take over the folders and start; then they
/// are given up, and the old ones go on.
pub const LOAD_TIMEOUT: Duration = Duration::from_secs(150);

/// Time for which a copy may hold a module's files still: it reads [`HELD_BYTES`] in a tenth of
/// that.
pub const HOLD_LEASE: Duration = Duration::from_secs(2);

/// Time that a module may take to come to the end of a call, when a copy waits for that.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// Limit of bytes that are copied while the files are held still. They wait in memory until they
/// are written.
pub const HELD_BYTES: u64 = 64 << 20;

/// The files are held once no more than this was written while what was written before was copied.
pub const LITTLE_BYTES: u64 = 4 << 20;

/// Rounds of copying what was written meanwhile after which the files are held anyway.
pub const COPY_ROUNDS: u32 = 30;

/// Limit of a line of a process's log; the rest of it is dropped.
pub const LOG_LINE_BYTES: usize = 2048;

/// Lines of a process that reach the daemon's log per second; more are counted.
pub const PROCESS_LINES_PER_S: u32 = 200;

/// Bytes of its log that are read per second: beyond, it waits.
pub const PROCESS_LOG_BYTES_PER_S: usize = 1 << 20;
