//! The commands that are clients of the control API, and `check`, `version`, `completions`.

mod copies;
pub mod modules;

use std::io::Read;

use anyhow::{Context, bail};
use clap::CommandFactory;
use control::client::{Answer, Client, encode};
use serde_json::{Value, json};

use crate::cli::{
    Attach, ChannelCommand, Check, Cli, Completions, Link, Listing, LogLevel, PipeCommand,
    PortArgs, Resize, Socket, Stop, Version, VmArgs, VmCommand,
};
use crate::process::{print, print_line};
use crate::{exit, journal, render};

/// Largest description of a port read from a file: the API takes no more.
const MAX_BODY_LEN_BYTES: u64 = control::api::MAX_BODY_LEN_BYTES as u64;

/// Exit code of a command that could ask.
type CommandResult = anyhow::Result<u8>;

fn ask(socket: &Socket, method: &str, path: &str, body: Option<&Value>) -> anyhow::Result<Answer> {
    Ok(Client::new(&socket.socket).request(method, path, body)?)
}

/// Shows a refusal and gives its exit code.
fn refused(answer: &Answer) -> u8 {
    eprintln!("millrace: {}", answer.error());
    exit::REFUSED
}

fn pretty(value: &Value) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)?)
}

fn port_path(named: &PortArgs, kind: &str) -> String {
    format!("/v1/vms/{}/{kind}/{}", encode(&named.vm), encode(&named.port))
}

/// `check`.
pub fn check(args: &Check) -> CommandResult {
    let path = args.file.path();
    match config::load(&path) {
        Ok(config) if args.json => {
            print_line(&serde_json::to_string_pretty(&config)?)?;
            Ok(exit::OK)
        }
        Ok(config) => {
            let ports: usize = config.vms.iter().map(|vm| vm.ports().count()).sum();
            let (vms, switches) = (config.vms.len(), config.switches.len());
            let file = path.display();
            print_line(&format!("{file}: good: {switches} switches, {vms} VMs, {ports} ports"))?;
            Ok(exit::OK)
        }
        Err(problems) if args.json => {
            print_line(&serde_json::to_string_pretty(&problems)?)?;
            Ok(exit::FAILED)
        }
        Err(problems) => {
            journal::print_error(&problems.to_string());
            Ok(exit::FAILED)
        }
    }
}

/// `status`.
pub fn status(args: &Listing) -> CommandResult {
    list(args, "/v1/status", render::status)
}

/// `ports`.
pub fn ports(args: &Listing) -> CommandResult {
    list(args, "/v1/ports", render::ports)
}

/// `pipe ls`.
pub fn pipe(command: &PipeCommand) -> CommandResult {
    let PipeCommand::Ls(args) = command;
    list(args, "/v1/pipes", render::pipes)
}

/// `channel`.
pub fn channel(command: &ChannelCommand) -> CommandResult {
    let post = |args: &VmArgs, command: &str| {
        let path = format!("/v1/vms/{}/channel/{command}", encode(&args.vm));
        let answer = ask(&args.socket, "POST", &path, None)?;
        Ok(if answer.is_success() { exit::OK } else { refused(&answer) })
    };
    match command {
        ChannelCommand::Ls(args) => list(args, "/v1/channels", render::channels),
        ChannelCommand::Join(args) => post(args, "join"),
        ChannelCommand::Leave(args) => post(args, "leave"),
    }
}

fn list(args: &Listing, path: &str, show: fn(&Value) -> String) -> CommandResult {
    let answer = ask(&args.socket, "GET", path, None)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    let value = answer.json();
    if args.json {
        print_line(&pretty(&value)?)?;
    } else {
        print(&show(&value))?;
    }
    Ok(exit::OK)
}

/// `attach`.
pub fn attach(args: &Attach) -> CommandResult {
    let text = body_text(&args.body)?;
    let body: Value = serde_json::from_str(&text).context("the port's description is not JSON")?;
    let path = format!("/v1/vms/{}/ports", encode(&args.vm));
    let answer = ask(&args.socket, "POST", &path, Some(&body))?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    let value = answer.json();
    if args.json {
        print_line(&pretty(&value)?)?;
    } else {
        print_line(value["socket"].as_str().unwrap_or_default())?;
    }
    Ok(exit::OK)
}

/// The argument itself, `@FILE`, or `-` for the standard input.
fn body_text(argument: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = if argument == "-" {
        std::io::stdin().take(MAX_BODY_LEN_BYTES + 1).read_to_string(&mut text)
    } else if let Some(path) = argument.strip_prefix('@') {
        std::fs::File::open(path)
            .and_then(|f| f.take(MAX_BODY_LEN_BYTES + 1).read_to_string(&mut text))
    } else {
        return Ok(argument.into());
    };
    read.with_context(|| format!("reading the port's description from {argument}"))?;
    if text.len() as u64 > MAX_BODY_LEN_BYTES {
        bail!("{argument} is larger than {MAX_BODY_LEN_BYTES} bytes");
    }
    Ok(text)
}

/// `start`.
pub fn start(args: &PortArgs) -> CommandResult {
    let path = format!("{}/start", port_path(args, "ports"));
    let answer = ask(&args.socket, "POST", &path, None)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    print_line(answer.json()["socket"].as_str().unwrap_or_default())?;
    Ok(exit::OK)
}

/// `detach`.
pub fn detach(args: &PortArgs) -> CommandResult {
    let answer = ask(&args.socket, "DELETE", &port_path(args, "ports"), None)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    if let Some(requests) = answer.json()["requests_in_disk"].as_u64() {
        eprintln!(
            "millrace: detached; {requests} requests are still in the disk, and the image stays locked \
             until they are over"
        );
    }
    Ok(exit::OK)
}

/// `resume`.
pub fn resume(args: &PortArgs) -> CommandResult {
    let path = format!("{}/resume", port_path(args, "disks"));
    let answer = ask(&args.socket, "POST", &path, None)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    print_line(&format!("{} requests", answer.json()["resumed"]))?;
    Ok(exit::OK)
}

/// `resize`.
pub fn resize(args: &Resize) -> CommandResult {
    let body = match &args.size {
        Some(size) => json!({ "size": size }),
        None => json!({}),
    };
    let path = format!("{}/resize", port_path(&args.named, "disks"));
    let answer = ask(&args.named.socket, "POST", &path, Some(&body))?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    let value = answer.json();
    if args.json {
        print_line(&pretty(&value)?)?;
    } else {
        print_line(&format!("{} bytes", value["len_bytes"]))?;
    }
    Ok(exit::OK)
}

/// `link`.
pub fn link(args: &Link) -> CommandResult {
    let body = json!({ "up": args.state == "up" });
    let path = format!("{}/link", port_path(&args.named, "nets"));
    let answer = ask(&args.named.socket, "PUT", &path, Some(&body))?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    if answer.json()["seen_by_guest"] != true {
        eprintln!(
            "millrace: frames are {}; no guest sees it at its carrier, since its VMM keeps config \
             space to itself (QEMU: use set_link in its monitor) or is not connected",
            if args.state == "up" { "passed" } else { "dropped" }
        );
    }
    Ok(exit::OK)
}

/// `vm set`.
pub fn vm(command: &VmCommand) -> CommandResult {
    let VmCommand::Set(args) = command;
    let mut body = serde_json::Map::new();
    let mut add = |key: &str, value: Option<Value>| body.extend(value.map(|v| (key.into(), v)));
    add("weight", args.weight.map(Value::from));
    add("floor_bytes_per_s", args.floor.clone().map(Value::from));
    add("ceiling_bytes_per_s", args.ceiling.clone().map(Value::from));
    add("ceiling_ops_per_s", args.ceiling_ops.map(Value::from));
    add("ceiling_burst_ms", args.ceiling_burst_ms.map(Value::from));
    let path = format!("/v1/vms/{}", encode(&args.vm));
    let answer = ask(&args.socket, "PATCH", &path, Some(&Value::Object(body)))?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    print_line(&pretty(&answer.json())?)?;
    Ok(exit::OK)
}

/// `metrics`.
pub fn metrics(socket: &Socket) -> CommandResult {
    let answer = ask(socket, "GET", "/v1/metrics", None)?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    print(&answer.body)?;
    Ok(exit::OK)
}

/// `log-level`.
pub fn log_level(args: &LogLevel) -> CommandResult {
    let body = args.filter.as_ref().map(|filter| json!({ "filter": filter }));
    let method = if body.is_some() { "PUT" } else { "GET" };
    let answer = ask(&args.socket, method, "/v1/log", body.as_ref())?;
    if !answer.is_success() {
        return Ok(refused(&answer));
    }
    let value = answer.json();
    let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
    if args.json {
        print_line(&pretty(&value)?)?;
    } else if value["filter"] == value["configured"] {
        print_line(&text("filter"))?;
    } else {
        print_line(&format!("{} (daemon.log: {})", text("filter"), text("configured")))?;
    }
    Ok(exit::OK)
}

/// `stop`.
pub fn stop(args: &Stop) -> CommandResult {
    let body = json!({ "forget": args.forget });
    let answer = ask(&args.socket, "POST", "/v1/shutdown", Some(&body))?;
    Ok(if answer.is_success() { exit::OK } else { refused(&answer) })
}

/// `version`.
pub fn version(args: &Version) -> CommandResult {
    let version = env!("CARGO_PKG_VERSION");
    if args.json {
        print_line(&json!({ "version": version, "api": "v1" }).to_string())?;
    } else {
        print_line(&format!("millrace {version}"))?;
    }
    Ok(exit::OK)
}

/// `completions`.
pub fn completions(args: &Completions) -> CommandResult {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "millrace", &mut script);
    print(&String::from_utf8(script)?)?;
    Ok(exit::OK)
}
