//! Every limit of this crate, with its reason. Those of the protocol are in `guest_abi::module`.

use std::time::Duration;

/// How long a client's state outlives its connection: a guest's program that lost it connects again at
/// once; transactions with locks should not wait much longer.
pub const LINGER: Duration = Duration::from_secs(10);

/// Clients of a module: a database has one for each of its sessions.
pub const MAX_CLIENTS: usize = 4096;

/// Connections of a VM that have not said hello.
pub const MAX_GREETING: usize = 64;

/// How long a hello may take.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes of replies that are kept for a client. Commits answer with a few dozen bytes.
pub use guest_abi::module::KEPT_BYTES;

/// Bytes of replies that wait for a client that does not read: then no request of it is read either.
pub const WAITING_BYTES: usize = 1 << 20;

/// Bytes of events of one call of a module: 64 rows of 64 KiB. One request fits in any case.
pub const CALL_BYTES: usize = 4 << 20;

/// Bytes of replies that a module may give in one call: 16 of the longest.
pub const GIVEN_BYTES: usize = 256 << 20;

/// Replies that a module may give in one call: to all requests of all clients.
pub const GIVEN_REPLIES: usize = MAX_CLIENTS * guest_abi::module::MAX_IN_FLIGHT as usize;

/// Bytes that are read of a connection at a time.
pub const READ_BYTES: usize = 256 << 10;

/// Bytes of requests of a module that have not come in whole: 16 of the longest. Further ones wait.
pub const PARTIAL_BYTES: usize = 256 << 20;

/// Most pieces of one `writev`.
pub const WRITE_PIECES: usize = 64;

/// CPU time between two looks at a call: a timer of the kernel, as fine as its tick of 4 ms allows.
pub const TICK: Duration = Duration::from_millis(10);

/// CPU time that a module may take for its start, when it reads its files: 1 GiB of log at 100 MB/s, six
/// times over.
pub const START_DEADLINE: Duration = Duration::from_secs(60);

/// Instances that may fail one after the other while they start, before the module is given up.
pub const MAX_FAILED_STARTS: u32 = 3;

/// Lines a module may log per second; more are counted.
pub const LOG_LINES_PER_S: u32 = 20;

/// Longest file of WebAssembly. Compiling takes about a second per MiB.
pub const MAX_WASM_BYTES: u64 = 16 << 20;

/// Largest memory of a module: what its pointers reach.
pub const MAX_MEMORY_BYTES: u64 = 4 << 30;

/// Stack of a module's native code.
pub const STACK_BYTES: usize = 1 << 20;
