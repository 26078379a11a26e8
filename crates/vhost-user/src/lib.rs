//! vhost-user sessions.
//!
//! # Theory of operation
//! (to be completed)

mod backend_channel;
pub mod codec;
pub mod device;
mod endpoint;
mod error;
pub mod holder;
pub mod keeper;
mod server;
mod session;
mod status;
mod wire;

pub use device::{ConfigNotifier, Device, DeviceError, DeviceKind};
pub use endpoint::Endpoint;
pub use error::{MessageName, VhostUserError};
pub use keeper::{Keeper, NullKeeper};
pub use server::{PortConfig, PortServer, serve_port};
pub use status::{PortStatus, QueueStatus, RegionStatus};
