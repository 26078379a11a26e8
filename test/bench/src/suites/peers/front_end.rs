//! Kinds of front ends, and the cases that they can do.

use super::case::{Case, Load};
use super::virtio_user;

/// Kind of front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// `test/bench/frontend`: all cases.
    Ours,
    /// DPDK's driver ([`virtio_user`]): frames that fit its buffers, one direction.
    VirtioUser,
}

impl Kind {
    /// Name of the front end, as `--front` and in results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Ours => "ours",
            Kind::VirtioUser => "virtio-user",
        }
    }

    /// The mark of its rows; ours has none.
    pub fn mark(self) -> Option<String> {
        (self != Kind::Ours).then(|| self.name().into())
    }

    /// Reason why it cannot do what a case asks of it; none when it can.
    pub fn refuses(self, case: &Case) -> Option<&'static str> {
        match (self, case.load) {
            (Kind::Ours, _) => None,
            (_, Load::Flood { frame_bytes }) if frame_bytes <= virtio_user::MAX_FRAME_BYTES => None,
            (_, Load::Flood { .. }) => Some("frames above 1,514 bytes do not fit its buffers"),
            (_, Load::RoundTrip { .. }) => Some("testpmd times no round trips"),
            (_, Load::Read { .. } | Load::Qcow2 { .. }) => Some("it drives no disks"),
        }
    }
}
