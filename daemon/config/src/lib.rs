//! Settings of the daemon: config files are read and checked here, and so are ports attached at run
//! time.
//!
//! # Theory of operation
//! TOML files and, for ports attached at run time, JSON bodies are brought into one tree of nodes
//! (`node.rs`), from which a reader (`reader.rs`) takes settings one by one. So a port is written
//! and checked the same way in a file and in a request. A bad setting is noted and its default
//! taken, so that one run finds every problem ([`Problems`]). What only the whole config shows
//! (duplicates, references) is checked after that (`check.rs`). The result is a [`Config`]: every
//! default filled in, every value within its limits.
//!
//! # Limits
//! - Config file 1 MiB ([`MAX_FILE_LEN_BYTES`]), 1,024 drop-ins ([`MAX_DROP_INS`]): 1,024 ports
//!   ([`base::limits::MAX_PORTS`]) with every setting written out take half of it.
//! - 100 problems are listed ([`MAX_PROBLEMS`]); the rest is counted.
//! - Leaving a channel may take 20 s at most ([`ChannelsConfig`]): the control API answers within
//!   60 s, and the packaged unit has 30 s to stop.

mod attach;
mod channel;
mod check;
mod decode;
mod first_use;
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
pub use decode::{DEFAULT_RUN_DIR, DEFAULT_STATE_DIR, check_log_filter};
pub use load::{DEFAULT_CONFIG, MAX_DROP_INS, MAX_FILE_LEN_BYTES, load, parse};
pub use model::{
    Allowed, BindAlso, BindMode, BlockSize, ChannelConfig, ChannelsConfig, Config, CreditConfig,
    DEFAULT_ROOT_PORTS, DEFAULT_WEIGHT, DaemonConfig, DiskConfig, DiskFormat, EndpointConfig,
    HolderConfig, ModuleConfig, NetConfig, OnError, PauseKind, PipesConfig, Placement, PortConfig,
    ReadSocketConfig, RingConfig, SidecoreConfig, SocketMode, SpinKind, SwitchConfig, UplinkConfig,
    VSOCK_PORT_NAME, VmConfig, VmModulesConfig, VsockConfig,
};
pub use problem::{Location, MAX_PROBLEMS, Problem, Problems};
pub use value::{MAX_SOCKET_PATH_LEN_BYTES, format_mac, format_sha256, parse_size};
