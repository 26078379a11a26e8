//! Ways between two guests, and what a load over one of them gives.

use serde::{Deserialize, Serialize};

use crate::harness::runner::VHOST;

/// Port of the server whose sockets poll.
pub const BUSY_RR_PORT: u16 = 7100;

/// A way between the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Route {
    /// QEMU's card on a TAP in a bridge.
    TapBridge,
    /// The same, with the sockets polling the card for 50 µs.
    TapBridgeBusy,
    /// QEMU's card on a TAP in another bridge, served by the host's kernel, where it has vhost-net.
    TapVhost,
    /// Millrace's switch, with the modules told to take nothing.
    Switch,
    /// Open vSwitch on DPDK, action "normal".
    OvsNormal,
    /// The channel, which copies everything.
    ChannelCopy,
    /// The channel without polling.
    Channel,
    /// The channel as it is shipped: an idle CPU polls for a while.
    ChannelPoll,
    /// The same, with the sockets polling as well, for 50 µs.
    ChannelBusy,
    /// The client's own 127.0.0.1.
    Loopback,
}

impl Route {
    /// All, in the order of results.
    pub const ALL: [Route; 10] = [
        Route::ChannelPoll,
        Route::TapBridge,
        Route::Switch,
        Route::OvsNormal,
        Route::Loopback,
        Route::Channel,
        Route::ChannelCopy,
        Route::ChannelBusy,
        Route::TapBridgeBusy,
        Route::TapVhost,
    ];

    /// Name of the route in results.
    pub fn name(self) -> &'static str {
        match self {
            Route::TapBridge => "tap-bridge",
            Route::TapBridgeBusy => "tap-bridge-busy",
            Route::TapVhost => VHOST,
            Route::Switch => "switch",
            Route::OvsNormal => "ovs-normal",
            Route::ChannelCopy => "channel-copy",
            Route::Channel => "channel",
            Route::ChannelPoll => "channel-poll",
            Route::ChannelBusy => "channel-busy",
            Route::Loopback => "loopback",
        }
    }

    /// Whether the channel's modules take its packets.
    pub fn is_channel(self) -> bool {
        matches!(
            self,
            Route::ChannelCopy | Route::Channel | Route::ChannelPoll | Route::ChannelBusy
        )
    }

    /// Whether sockets poll.
    pub fn is_busy(self) -> bool {
        matches!(self, Route::TapBridgeBusy | Route::ChannelBusy)
    }

    /// The server's address.
    pub fn server(self) -> &'static str {
        match self {
            Route::TapBridge | Route::TapBridgeBusy => "10.0.0.2",
            Route::OvsNormal => "10.0.2.2",
            Route::TapVhost => "10.0.3.2",
            Route::Loopback => "127.0.0.1",
            _ => "10.0.1.2",
        }
    }
}

/// Sample that every load gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Round trips per second, or MB received per second.
    pub value: f64,
    /// Mean of round trips, µs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_us: Option<f64>,
    /// Median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// Part of the sent messages that did not arrive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<f64>,
    /// CPU time of the QEMU processes and of who is between them, µs for a round trip or a MB.
    pub cpu_us_per_op: f64,
    /// Part of the machine that strangers used; the kernel's threads are among them.
    pub foreign: f64,
    /// How far the guests' CPUs were from each other before and after it, ns
    /// ([`crate::harness::distance`]); left out where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart_ns: Option<[f64; 2]>,
}
