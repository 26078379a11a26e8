//! `fuzz-short TARGET [FILE…]`: one fuzz target on its seeds and on changes of them, or on files. A
//! process has one target: what an input takes of memory is counted. The target of the module `sql`
//! is built beside that.

use std::path::PathBuf;
use std::process::ExitCode;

/// Targets, each a file of `fuzz_targets`.
macro_rules! targets {
    ($($name:ident)*) => {
        fn target(name: &str) -> Option<fn(&[PathBuf]) -> ExitCode> {
            match name {
                $(stringify!($name) => Some($name::run),)*
                _ => None,
            }
        }
    };
}

#[path = "../../fuzz_targets/agent_program.rs"]
mod agent_program;
#[path = "../../fuzz_targets/agent_stream.rs"]
mod agent_stream;
#[path = "../../fuzz_targets/control_body.rs"]
mod control_body;
#[path = "../../fuzz_targets/control_config.rs"]
mod control_config;
#[path = "../../fuzz_targets/disk_request.rs"]
mod disk_request;
#[path = "../../fuzz_targets/holder_packet.rs"]
mod holder_packet;
#[path = "../../fuzz_targets/mailbox.rs"]
mod mailbox;
#[path = "../../fuzz_targets/module_copy.rs"]
mod module_copy;
#[path = "../../fuzz_targets/module_frames.rs"]
mod module_frames;
#[path = "../../fuzz_targets/module_ring.rs"]
mod module_ring;
#[path = "../../fuzz_targets/net_flow.rs"]
mod net_flow;
#[path = "../../fuzz_targets/net_frame.rs"]
mod net_frame;
#[path = "../../fuzz_targets/net_header.rs"]
mod net_header;
#[path = "../../fuzz_targets/pipe_message.rs"]
mod pipe_message;
#[path = "../../fuzz_targets/qcow2_image.rs"]
mod qcow2_image;
#[path = "../../fuzz_targets/qmp_line.rs"]
mod qmp_line;
#[path = "../../fuzz_targets/relay_session.rs"]
mod relay_session;
#[path = "../../fuzz_targets/ring.rs"]
mod ring;
#[path = "../../fuzz_targets/saved_session.rs"]
mod saved_session;
#[path = "../../fuzz_targets/table_log.rs"]
mod table_log;
#[path = "../../fuzz_targets/table_request.rs"]
mod table_request;
#[path = "../../fuzz_targets/vhost_user.rs"]
mod vhost_user;
#[path = "../../fuzz_targets/vsock_packet.rs"]
mod vsock_packet;

include!("../names.rs");

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    let name = args.next().unwrap_or_default();
    match target(&name.to_string_lossy()) {
        Some(run) => run(&args.map(PathBuf::from).collect::<Vec<_>>()),
        None => {
            eprintln!("fuzz-short: there is no target {}", name.display());
            ExitCode::FAILURE
        }
    }
}
