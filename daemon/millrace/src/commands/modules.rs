//! `module`: the commands for a VM's modules.

use control::client::encode;
use serde_json::Value;

use super::{CommandResult, ask, copies, list, pretty, refused};
use crate::cli::{self, ModuleCommand};
use crate::process::{print, print_line};
use crate::{exit, render};

/// `module`.
pub fn run(command: &ModuleCommand) -> CommandResult {
    match command {
        ModuleCommand::Ls(args) => list(args, "/v1/modules", render::modules),
        ModuleCommand::Stats(args) => stats(args),
        ModuleCommand::Load(args) => post(args, "load"),
        ModuleCommand::Backup(args) => copies::backup(args),
        ModuleCommand::Verify(args) => copies::verify(args),
        ModuleCommand::Restore(args) => copies::restore(args),
        ModuleCommand::Drain(args) => post(args, "drain"),
        ModuleCommand::Resume(args) => post(args, "resume"),
    }
}

/// Sends a command without a body.
fn post(args: &cli::VmArgs, command: &str) -> CommandResult {
    let path = format!("/v1/vms/{}/modules/{command}", encode(&args.vm));
    let answer = ask(&args.socket, "POST", &path, None)?;
    Ok(if answer.is_success() { exit::OK } else { refused(&answer) })
}

fn stats(args: &cli::ModuleStats) -> CommandResult {
    let path = format!("/v1/vms/{}/modules", encode(&args.target.vm));
    let answer = ask(&args.target.socket, "GET", &path, None)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    let all = answer.json();
    let all = all.as_array().map_or(&[][..], Vec::as_slice);
    let wanted = |m: &&Value| args.module.as_ref().is_none_or(|name| m["module"] == **name);
    let chosen: Vec<Value> = all.iter().filter(wanted).cloned().collect();
    if let (Some(name), true) = (&args.module, chosen.is_empty()) {
        eprintln!("millrace: VM {} has no module {name}", args.target.vm);
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
