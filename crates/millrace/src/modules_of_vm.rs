//! The process that runs a VM's modules, and the commands for people.

use std::os::fd::AsFd;

use anyhow::Context;
use control::client::encode;
use serde_json::Value;

use crate::cli::{self, ModuleCommand};
use crate::commands::{Done, ask, list, pretty, refused};
use crate::process::{print, print_line};
use crate::{copies, exit, log, render};

/// Signals that a terminal sends to the daemon's whole group. The daemon tells this process when to
/// end, and it ends when the daemon has gone.
const IGNORED: [libc::c_int; 2] = [libc::SIGINT, libc::SIGHUP];

/// `millrace module-process`: its standard input is the socket to the daemon.
pub fn process(args: &cli::ModuleProcess) -> anyhow::Result<u8> {
    log::init(&args.log, args.log_json)?;
    // Its program is called `exe`, after the path that the daemon starts it by.
    rustix::thread::set_name(c"millrace-module").context("naming the process")?;
    for signal in IGNORED {
        // SAFETY: no handler of ours is involved, and there is one thread yet.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let control = std::io::stdin().as_fd().try_clone_to_owned().context("the daemon's socket")?;
    modules::process::run(control).with_context(|| format!("modules of {}", args.vm))?;
    Ok(exit::OK)
}

/// `module`.
pub fn command(command: &ModuleCommand) -> Done {
    match command {
        ModuleCommand::Ls(args) => list(args, "/v1/modules", render::modules),
        ModuleCommand::Stats(args) => stats(args),
        ModuleCommand::Load(args) => tell(args, "load"),
        ModuleCommand::Backup(args) => copies::backup(args),
        ModuleCommand::Verify(args) => copies::verify(args),
        ModuleCommand::Restore(args) => copies::restore(args),
        ModuleCommand::Drain(args) => tell(args, "drain"),
        ModuleCommand::Resume(args) => tell(args, "resume"),
    }
}

fn tell(args: &cli::OfVm, what: &str) -> Done {
    let path = format!("/v1/vms/{}/modules/{what}", encode(&args.vm));
    let answer = ask(&args.socket, "POST", &path, None)?;
    Ok(if answer.is_success() { exit::OK } else { refused(&answer) })
}

fn stats(args: &cli::ModuleStats) -> Done {
    let path = format!("/v1/vms/{}/modules", encode(&args.of.vm));
    let answer = ask(&args.of.socket, "GET", &path, None)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    let all = answer.json();
    let all = all.as_array().map_or(&[][..], Vec::as_slice);
    let wanted = |m: &&Value| args.module.as_ref().is_none_or(|name| m["module"] == **name);
    let chosen: Vec<Value> = all.iter().filter(wanted).cloned().collect();
    if let (Some(name), true) = (&args.module, chosen.is_empty()) {
        eprintln!("millrace: VM {} has no module {name}", args.of.vm);
        return Ok(exit::REFUSED);
    }
    let chosen = Value::Array(chosen);
    if args.json {
        print_line(&pretty(&chosen)?)?;
    } else {
        print(&render::module_stats(&chosen))?;
    }
    Ok(exit::OK)
}
