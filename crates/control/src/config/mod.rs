//! The config file: reading, checking, and the result.
//!
//! TOML and JSON are brought into one tree, from which settings are read one by one; a bad setting
//! is noted and its default taken, so that one run finds every problem. What only the whole config
//! shows (duplicates, references) is checked after.

mod attach;
mod channel;
mod check;
mod decode;
mod load;
mod model;
mod modules;
mod node;
mod ports;
mod problem;
mod reader;
mod sidecore;
mod value;

pub use attach::{AttachBody, AttachError};
pub use channel::{ChannelConfig, ChannelsConfig, DEFAULT_ROOT_PORTS};
pub use decode::{DEFAULT_RUN_DIR, DEFAULT_STATE_DIR, check_log_filter};
pub use load::{DEFAULT_CONFIG, MAX_DROP_INS, MAX_FILE_LEN_BYTES, load, parse};
pub use model::{
    Allowed, BindAlso, BindMode, BlockSize, Config, CreditConfig, DEFAULT_WEIGHT, DaemonConfig,
    DiskConfig, DiskFormat, EndpointConfig, HolderConfig, NetConfig, OnError, PauseKind,
    PipesConfig, Placement, PortConfig, ReadSocketConfig, SidecoreConfig, SocketMode, SpinKind,
    SwitchConfig, UplinkConfig, VSOCK_PORT_NAME, VmConfig, VsockConfig,
};
pub use modules::{ModuleConfig, RingConfig, VmModulesConfig};
pub use problem::{Location, MAX_PROBLEMS, Problem, Problems};
pub use value::{MAX_SOCKET_PATH_LEN_BYTES, format_mac, format_sha256, parse_size};
