//! Reasons why a pipe ended, or never began.

/// Makes the enumeration with everything that is said about a reason in one place.
macro_rules! reasons {
    ($(
        $(#[$doc:meta])*
        $name:ident = $number:literal, $errno:literal, $key:literal, $text:literal;
    )*) => {
        /// Reason why a pipe ended, by the numbers of version 1. New ones are added at the end of
        /// their group.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum Reason {
            $($(#[$doc])* $name = $number,)*
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Reason with this number; numbers of a newer version are [`Reason::Unknown`].
            pub fn from_number(number: u16) -> Self {
                match number {
                    $($number => Self::$name,)*
                    _ => Self::Unknown,
                }
            }

            /// Short name for counters: lower case, underscores.
            pub fn key(self) -> &'static str {
                match self { $(Self::$name => $key,)* }
            }

            /// Text for people.
            pub fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// The nearest errno of Linux; 0 where it is none.
            pub fn errno(self) -> u32 {
                match self { $(Self::$name => $errno,)* }
            }
        }
    };
}

reasons! {
    /// Everything was moved.
    Complete = 0, 0, "complete", "everything was moved";
    /// The side that asked does not want it any more.
    Cancelled = 1, 125, "cancelled", "cancelled";
    /// The time of the request is over.
    TimedOut = 2, 110, "timed_out", "the time given was over";
    /// A number that this version does not know.
    Unknown = 3, 5, "unknown", "an unknown reason";

    /// The daemon has not seen this connection, or not its beginning, on a port of this VM.
    NoFlow = 16, 95, "no_flow", "the host has not seen this connection from its beginning";
    /// The connection has ended, or one direction of it.
    FlowClosed = 17, 32, "flow_closed", "the connection is closing";
    /// Another pipe uses this direction of the connection.
    FlowBusy = 18, 16, "flow_busy", "another pipe uses this connection";
    /// Bytes sent before did not pass the switch in time.
    NotSettled = 19, 11, "not_settled", "earlier bytes of the connection are still on their way";
    /// An option of the connection cannot be carried over.
    FlowOptions = 20, 95, "flow_options", "an option of the connection is not supported";
    /// The connection was reset meanwhile.
    FlowReset = 21, 104, "flow_reset", "the connection was reset";
    /// The connection's twin could not be made or failed.
    TwinFailed = 22, 5, "twin_failed", "the host could not take the connection over";
    /// The peer acknowledged nothing for too long.
    PeerSilent = 23, 110, "peer_silent", "the peer acknowledges nothing";
    /// The peer is, or was, a member of the VM's channels: the switch may not have seen everything.
    OnChannel = 24, 95, "on_channel", "the connection may go by a channel";

    /// No disk of the VM has the file's blocks.
    NoDisk = 32, 95, "no_disk", "no disk of this VM has the file's blocks";
    /// The disk's format or a stage on it keeps its blocks from being read in place.
    DiskFormat = 33, 95, "disk_format", "the disk's blocks cannot be read in place";
    /// Extents outside of the disk, or not of the pipe's length.
    BadExtents = 34, 22, "bad_extents", "extents outside of the disk, or not of the pipe's length";
    /// The disk could not be read or written.
    DiskFailed = 35, 5, "disk_failed", "the disk failed";

    /// Limit of the VM's pipes.
    TooMany = 48, 11, "too_many", "as many pipes as this VM may have are under way";
    /// The daemon does not offer this pair of ends.
    PairUnsupported = 49, 95, "pair_unsupported", "this pair of ends is not supported";
    /// The request makes no sense.
    Malformed = 50, 22, "malformed", "the request makes no sense";
    /// The host has no pipes for this VM.
    NotOffered = 51, 95, "not_offered", "the host has no pipes for this VM";
    /// The daemon stops, or has gone.
    HostGone = 52, 5, "host_gone", "the host's daemon has gone";
    /// The daemon went in the middle: not to be followed by an ordinary system call.
    Lost = 53, 5, "lost", "the host's daemon went in the middle; how much arrived is not known";

    /// Socket that is not TCP.
    NotTcp = 64, 95, "not_tcp", "not a TCP socket";
    /// MPTCP.
    Mptcp = 65, 95, "mptcp", "an MPTCP socket";
    /// A protocol on top of TCP in the kernel, such as kTLS.
    Ulp = 66, 95, "ulp", "a socket with kTLS or another protocol in the kernel";
    /// Connection that is not established.
    NotEstablished = 67, 107, "not_established", "the connection is not established";
    /// Bytes wait to be sent for the first time.
    Unsent = 68, 11, "unsent", "earlier bytes wait to be sent";
    /// Addresses that may be another connection's in the agent's network namespace. (A kernel
    /// before 5.14 does not tell: then it is every socket.)
    OtherNetwork = 69, 95, "other_network", "a socket of another network namespace";

    /// File that is not a regular one on a disk.
    NotAFile = 80, 95, "not_a_file", "not a regular file on a disk";
    /// A file system whose blocks may move, or that is not known.
    FileSystem = 81, 95, "file_system", "a file system that is not supported";
    /// The self-test of the file system failed.
    SelfTest = 82, 95, "self_test", "the self-test of the file system failed";
    /// A device in between (LVM, encryption, RAID) is not supported.
    Stacked = 83, 95, "stacked", "a device between file system and disk is not supported";
    /// Extents without a place on the disk: compressed, encrypted, inline.
    Extents = 84, 95, "extents", "the file has parts without a place on the disk";
    /// A process has the file open for writing.
    NoLease = 85, 11, "no_lease", "somebody has the file open for writing";
    /// A process wants to write or truncate the file.
    LeaseBroken = 86, 125, "lease_broken", "somebody wants to write to the file";
    /// The file's pages are in the guest's memory: sending them is cheaper.
    Cached = 87, 95, "cached", "the file is in the guest's memory already";
    /// Nothing left behind the offset.
    EndOfFile = 88, 0, "end_of_file", "the end of the file";
    /// The file could not be written.
    SinkFailed = 89, 5, "sink_failed", "the file could not be written";

    /// The descriptor does not allow it.
    NotPermitted = 96, 9, "not_permitted", "the descriptor does not allow it";
    /// Too few bytes for a pipe to pay.
    TooSmall = 97, 95, "too_small", "too few bytes for a pipe to pay";
    /// The guest has no agent.
    NoAgent = 98, 95, "no_agent", "no agent runs in this guest";
    /// Limit of the agent's requests.
    AgentBusy = 99, 11, "agent_busy", "the agent has as many requests as it takes";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_go_both_ways_and_names_are_unique() {
        let mut keys: Vec<_> = Reason::ALL.iter().map(|r| r.key()).collect();
        for &reason in Reason::ALL {
            assert_eq!(Reason::from_number(reason as u16), reason);
            assert!(reason.key().bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
        }
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), Reason::ALL.len());
        assert_eq!(Reason::from_number(60_000), Reason::Unknown);
    }
}
