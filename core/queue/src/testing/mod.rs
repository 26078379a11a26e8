//! The driver's side of a ring, for tests: acts of a guest, and of a hostile guest.
//!
//! Everything here panics on misuse; nothing of it is in a product build (feature `testing`).
#![allow(clippy::unwrap_used)]

mod driver;
mod fields;
mod packed;
mod ram;
mod raw;
mod split;

pub use driver::{ModelDriver, ModelOptions};
pub use ram::{GUEST_BASE, GuestRam, USER_BASE};
pub use raw::RawDesc;
