//! Every limit of this crate, with its reason.

/// Lowest CID of a guest: 0 and 1 are reserved, 2 is the host (virtio 1.2, 5.10.4).
pub const LOWEST_CID: u64 = 3;

/// Highest CID of a guest: 2^32 - 1 means "any", and the upper 32 bits are reserved.
pub const HIGHEST_CID: u64 = (1 << 32) - 2;

/// Most connections of one port that a configuration may ask for: each may hold a descriptor of
/// the daemon and a buffer.
pub const HIGHEST_MAX_CONNECTIONS: u32 = 16_384;

/// Connections of one port unless configured otherwise: more than any agent opens, and 1,024
/// buffers of the default size are 128 MiB. Another guest may have as many of them as it leaves
/// free: one alone half of them.
pub const DEFAULT_MAX_CONNECTIONS: u32 = 1024;

/// Connections of one port that wait for an answer, unless configured otherwise: half of the
/// backlog of 128 that listeners commonly ask for. Another guest may have as many of them as it
/// leaves free, as above.
pub const DEFAULT_MAX_HALF_OPEN: u32 = 64;

/// Buffer of one connection, for bytes that a guest sent and the other end does not take yet,
/// unless configured otherwise. It is the credit that the guest sees: two packets of the largest
/// size, so that one can be under way while the other is taken.
pub const DEFAULT_BUFFER_BYTES: u32 = 128 << 10;

/// Smallest buffer: one page.
pub const LOWEST_BUFFER_BYTES: u32 = 4 << 10;

/// Largest buffer: more credit than this gives no more speed on one machine.
pub const HIGHEST_BUFFER_BYTES: u32 = 1 << 20;

/// Memory for the buffers of all connections of a domain, unless configured otherwise. Each port is
/// sure of its equal share, and may have more while that leaves the others theirs. Ports that join
/// a domain whose memory is in use have their share all the same: until connections end, the domain
/// may then hold up to twice this.
pub const DEFAULT_DOMAIN_BUFFER_BYTES: u64 = 512 << 20;

/// Freed buffers kept for the next connections, so that a busy server does not allocate.
pub const SPARE_BUFFERS: usize = 16;

/// Most ports of one domain: a round looks at each.
pub const MAX_PORTS: usize = 256;

/// Accepted Unix sockets of one port that have not sent their `CONNECT` line yet.
pub const MAX_HANDSHAKES: u32 = 64;

/// Longest `CONNECT <port>` line, with its newline; the longest sensible one has 19 bytes.
pub const MAX_LINE_BYTES: usize = 32;

/// Time limit of a host program for its `CONNECT` line.
pub const HANDSHAKE_TIMEOUT_NS: u64 = 5_000_000_000;

/// Time limit of a guest for its answer to a connection request. Linux itself gives up after 2 s.
pub const CONNECT_TIMEOUT_NS: u64 = 10_000_000_000;

/// Time limit of a guest to confirm that both directions are shut. Linux itself waits 8 s.
pub const CLOSE_TIMEOUT_NS: u64 = 8_000_000_000;

/// Time for which bytes of a guest that has closed wait for a host program that does not read;
/// every byte taken starts it anew.
pub const DRAIN_TIMEOUT_NS: u64 = 30_000_000_000;

/// Least time between two scans of all deadlines: a scan costs a walk over all connections.
pub const SCAN_INTERVAL_NS: u64 = 100_000_000;

/// Least time between two polls of the Unix sockets: one system call each.
pub const SOCKET_POLL_INTERVAL_NS: u64 = 20_000;

/// Least time between two polls while there are only listeners: a new connection can wait a little
/// on a sidecore that never sleeps, and the other devices on it need not pay for polling.
pub const IDLE_SOCKET_POLL_INTERVAL_NS: u64 = 1_000_000;

/// Unix socket events taken per poll.
pub const SOCKET_POLL_EVENTS: usize = 64;

/// New Unix connections accepted per port and round.
pub const ACCEPT_BATCH: u32 = 16;

/// Longest queue of Unix connections not yet accepted.
pub const LISTEN_BACKLOG: i32 = 128;

/// Least charge of a packet: handling one takes as long as copying this many bytes.
pub const MIN_CHARGE_BYTES: u64 = 512;

/// Guessed length of packets before there was one: surplus packets are given
/// back.
pub const TYPICAL_BYTES: u64 = 4096;

/// Packets taken from a guest, or receive buffers taken from it, per batch.
pub const BATCH: usize = 64;

/// Most bytes that one connection moves to its guest before the next one's turn.
pub const QUANTUM_BYTES: u32 = 128 << 10;

/// Most packets that go to one guest per round, whatever buffers it posts and from every sender: a
/// guest may post buffers with room for a single byte, and would else keep the sidecore in one
/// round for as long as it likes. Four batches: what a guest with Linux' 4 KiB buffers takes of
/// [`ROUND_BYTES`] is a quarter of that.
pub const ROUND_PACKETS: u32 = 256;

/// Most payload bytes that go to one guest per round: two connections' turns, about 50 µs of
/// copying.
pub const ROUND_BYTES: u32 = 2 * QUANTUM_BYTES;

/// Most connections served towards one guest per round.
pub const READY_BUDGET: usize = 256;

/// Resets owed to a guest for packets that belong to no connection. More are dropped and counted:
/// only a guest that gives no receive buffers gets there.
pub const MAX_STRAY_RESETS: usize = 256;

/// Most services of one port: each request for a connection to the host looks through them.
pub const MAX_SERVICES: usize = 8;

/// Highest number of a service: 2^32 - 1 means "any".
pub const HIGHEST_SERVICE_PORT: u32 = u32::MAX - 1;

/// Highest port that a guest's kernel gives to root, and to programs with `CAP_NET_BIND_SERVICE`,
/// alone (Linux: `LAST_RESERVED_PORT` of `net/vmw_vsock/af_vsock.c`).
pub const HIGHEST_PRIVILEGED_PORT: u32 = 1023;

/// Most buffers in one system call (Linux' `UIO_MAXIOV`).
pub const MAX_IOVECS: usize = 1024;

/// Longest path that `sockaddr_un` holds, less `_4294967295` and a final zero.
pub const MAX_PATH_BYTES: usize = 108 - 1 - 11;

/// First host-side port number given to connections that host programs open; below are the
/// numbers that guests connect to.
pub const FIRST_HOST_PORT: u32 = 1 << 30;
