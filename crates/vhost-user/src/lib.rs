//! vhost-user sessions.
//!
//! # Theory of operation
//! (the owner of this crate completes this text)

pub mod device;

pub use device::{ConfigNotifier, Device, DeviceError, DeviceKind};
