//! Drives the sidecores' placement, credits and sleep in virtual time.
//!
//! # Theory of operation
//! Loads ([`load`]) are generated from a seed, or read from a recording. The engine ([`engine`])
//! runs what [`setup`] describes: it keeps an event queue of arrivals, ends of batches, and the
//! placer's looks. A sidecore serves its VMs round robin, a batch of each, as long as its
//! [`sidecore::Ledger`] allows; when none has work it polls for as long as [`sidecore::Spin`] says,
//! then sleeps, and a wake-up costs time. Ten times a virtual second [`sidecore::placement`]
//! decides, with the code of the product. The same seed gives the same bytes of output ([`report`],
//! [`plot`]).
//!
//! # Limits
//! - Service is a cost per request and per KiB, whatever the cache: two sidecores do not slow each
//!   other down, and a moved worker starts warm.
//! - Interrupts, exits and the guests' own CPU time are not modelled.
//! - A queue holds 1,024 requests, the largest virtqueue; more are dropped and counted.
//! - Latencies are kept in [`base::histogram`]: percentiles are up to 1/32 (3 %) too low, and all
//!   above 68 s (2^36 ns) count as that.
//! - A disk is a cost of the sidecore's: there is no device whose time is shared out.

pub mod engine;
pub mod load;
pub mod plot;
pub mod report;
pub mod scenario;
pub mod setup;
