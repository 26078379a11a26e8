//! The process that runs a VM's modules.

use std::os::fd::AsFd;

use anyhow::Context;

use crate::{cli, exit, log};

/// Signals that a terminal sends to the daemon's whole group. The daemon tells this process when to
/// end, and it ends when the daemon has gone.
const IGNORED: [libc::c_int; 2] = [libc::SIGINT, libc::SIGHUP];

/// `millrace module-process`: its standard input is the socket to the daemon.
pub fn run(args: &cli::ModuleProcess) -> anyhow::Result<u8> {
    log::init(&args.log, args.log_json)?;
    // Its program is called `exe`, after the path that the daemon starts it by.
    rustix::thread::set_name(c"millrace-module").context("naming the process")?;
    ignore_terminal();
    let control = std::io::stdin().as_fd().try_clone_to_owned().context("the daemon's socket")?;
    modules::process::run(control).with_context(|| format!("modules of {}", args.vm))?;
    Ok(exit::OK)
}

/// Leaves it to the daemon to end this process. To be called before there is a second thread.
pub fn ignore_terminal() {
    for signal in IGNORED {
        // SAFETY: no handler of ours is involved, and there is one thread yet.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
