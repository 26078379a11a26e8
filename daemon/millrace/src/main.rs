//! `millrace`: the daemon and the command. It assembles the rooms below and has no logic of its
//! own.
//!
//! # Theory of operation
//! `millrace serve` reads the config, starts sidecores, puts switches, disks and vsock domains on
//! them and serves each port on its vhost-user socket; [`host`] is that assembly and answers the
//! control API. Every other command is a client of that API, except `check` and [`libvirt`] (read
//! a config) and `holder` (keeps sessions while the daemon restarts). [`top`] shows what happened
//! between two of the daemon's answers. Called as `millrace-blk`, `millrace-net` or
//! `millrace-vsock` it is a single vhost-user back end in the sense of QEMU's conventions.
//!
//! # Limits
//! - 1,024 ports per daemon ([`base::limits::MAX_PORTS`]).
//! - A switch runs on one sidecore; switches, vsock domains and disk queues begin on the active
//!   sidecores in turn and move by load.
//! - A VM with `[vm.channel]` has a thread of its own, which looks at its addresses every two
//!   seconds while it is a member, and tries to make it one every half minute at least.
//! - The config is read at the start, and its modules by `millrace module load`; other changes go
//!   through the control API.
//! - A worker that panicked is made anew five times in a minute at most; after that its ports are
//!   broken until `millrace start`. Counters of a switch and its uplink begin at zero then, and a
//!   TAP that the daemon made loses its addresses.
//! - VMs' modules begin one VM after the other, behind the ports.
//! - `millrace top` samples every 100 ms at most: each answer takes milliseconds of the control
//!   thread with 1,024 ports, and one call on the sidecore of each switch and network port, which
//!   wakes one that sleeps. Its busy shares of workers are extrapolated from one round in 32 or so.

mod backend;
mod cli;
mod commands;
mod exit;
mod hand_over;
mod holder;
mod host;
mod huge_pages_process;
mod journal;
mod libvirt;
mod log;
mod module_process;
mod process;
mod render;
mod serve;
mod top;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if let Some(code) = backend::called_as(&arguments) {
        return ExitCode::from(code);
    }
    ExitCode::from(run(Cli::parse_from(arguments)))
}

fn run(cli: Cli) -> u8 {
    let done = match cli.command {
        Command::Serve(args) => serve::serve(&args),
        Command::Check(args) => commands::check(&args),
        Command::Libvirt(args) => libvirt::run(&args),
        Command::Status(args) => commands::status(&args),
        Command::Ports(args) => commands::ports(&args),
        Command::Pipe(command) => commands::pipe(&command),
        Command::Channel(command) => commands::channel(&command),
        Command::Module(command) => commands::modules::run(&command),
        Command::Top(args) => top::run(&args),
        Command::Attach(args) => commands::attach(&args),
        Command::Start(args) => commands::start(&args),
        Command::Detach(args) => commands::detach(&args),
        Command::Resize(args) => commands::resize(&args),
        Command::Resume(args) => commands::resume(&args),
        Command::Link(args) => commands::link(&args),
        Command::Vm(command) => commands::vm(&command),
        Command::LogLevel(args) => commands::log_level(&args),
        Command::Metrics(args) => commands::metrics(&args),
        Command::Stop(args) => commands::stop(&args),
        Command::Version(args) => commands::version(&args),
        Command::Holder(args) => holder::run(&args),
        Command::ModuleProcess(args) => module_process::run(&args),
        Command::HugePagesProcess => huge_pages_process::run(),
        Command::Completions(args) => commands::completions(&args),
        Command::VhostUserBlk(args) => return backend::run_blk(&args),
        Command::VhostUserNet(args) => return backend::run_net(&args),
        Command::VhostUserVsock(args) => return backend::run_vsock(&args),
    };
    done.unwrap_or_else(|e| report(&e))
}

/// Tells an error with its causes, and the exit code for it.
fn report(error: &anyhow::Error) -> u8 {
    journal::print_error(&format!("millrace: {}", process::describe(error)));
    match error.downcast_ref() {
        Some(
            control::ControlError::Unreachable { .. } | control::ControlError::NotAllowed { .. },
        ) => exit::UNREACHABLE,
        _ => exit::FAILED,
    }
}
