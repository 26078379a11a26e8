//! Readers of the tables `[daemon]`, `[[switch]]` and `[[vm]]`.

use std::path::PathBuf;

use base::limits::MAX_MEMORY_BYTES;

use crate::channel::{channel, channels};
use crate::model::{
    Config, CreditConfig, DEFAULT_WEIGHT, DaemonConfig, HolderConfig, PipesConfig,
    ReadSocketConfig, SwitchConfig, UplinkConfig, VmConfig,
};
use crate::modules::{self, module};
use crate::node::{Node, Value};
use crate::ports;
use crate::reader::{Context, Reader};
use crate::sidecore::sidecore;

/// Longest name of an interface (`IFNAMSIZ` is 16 with the closing zero).
const MAX_IF_NAME_LEN_BYTES: usize = 15;

/// Largest weight of a VM.
const MAX_WEIGHT: u64 = 10_000;

/// Largest floor or ceiling, in bytes per second: no host moves more.
const MAX_BYTES_PER_S: u64 = 1 << 40;

/// Largest ceiling of requests per second.
const MAX_OPS_PER_S: u64 = 1 << 32;

/// Longest burst in milliseconds: beyond, a ceiling would hold back nobody.
const MAX_BURST_MS: u64 = 10_000;

/// Most pipes of a VM at a time: each holds a socket of the daemon and the guest's open files.
const MAX_PIPES: u64 = 4096;

/// Most threads of a VM that move bytes: they wait for the disk, and hosts with more CPUs to spare
/// for one VM are rare.
const MAX_PIPE_THREADS: u64 = 64;

/// Default folder of sockets.
pub const DEFAULT_RUN_DIR: &str = "/run/millrace";

/// Default folder of files that outlive a reboot.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/millrace";

/// Longest filter of a request: more directives than the daemon has parts.
const MAX_LOG_FILTER_LEN_BYTES: usize = 4096;

const LOG_FIX: &str = "write off, error, warn, info, debug or trace, or `info,net=debug`";

static EMPTY: Node = Node { place: None, value: Value::Table(Vec::new()) };

/// Reads the whole config.
pub(crate) fn config(ctx: &mut Context, root: &Node) -> Config {
    let mut reader = Reader::new(ctx, String::new(), root);
    let daemon_node = reader.get("daemon").unwrap_or(&EMPTY);
    let sidecore_node = reader.get("sidecore").unwrap_or(&EMPTY);
    let channel_node = reader.get("channel").unwrap_or(&EMPTY);
    let module_nodes = reader.list("module");
    let switch_nodes = reader.list("switch");
    let vm_nodes = reader.list("vm");
    reader.finish();
    let daemon = daemon(Reader::new(ctx, "daemon".into(), daemon_node));
    let sidecore = sidecore(Reader::new(ctx, "sidecore".into(), sidecore_node));
    let channel = channels(Reader::new(ctx, "channel".into(), channel_node));
    let modules = module_nodes.into_iter().map(|(p, n)| module(Reader::new(ctx, p, n))).collect();
    let switches = switch_nodes.into_iter().map(|(p, n)| switch(Reader::new(ctx, p, n))).collect();
    let vms = vm_nodes.into_iter().map(|(p, n)| vm(ctx, p, n, &daemon)).collect();
    Config { daemon, sidecore, channel, modules, switches, vms }
}

fn daemon(mut r: Reader<'_, '_>) -> DaemonConfig {
    let run_dir = r.path("run_dir").unwrap_or_else(|| DEFAULT_RUN_DIR.into());
    let state_dir = r.path("state_dir").unwrap_or_else(|| DEFAULT_STATE_DIR.into());
    let control_socket = r.path("control_socket").unwrap_or_else(|| run_dir.join("control.sock"));
    r.socket_fits("control_socket", &control_socket, 0);
    let read_socket = read_socket(&mut r);
    let socket_mode = socket_mode(&mut r);
    let holder = holder(&mut r);
    if holder == HolderConfig::Own {
        r.socket_fits("run_dir", &run_dir.join("holder.sock"), 0);
    }
    let huge_pages = r.bool_or_auto("huge_pages");
    let log = log(&mut r);
    r.finish();
    DaemonConfig {
        run_dir,
        state_dir,
        control_socket,
        read_socket,
        socket_mode,
        holder,
        huge_pages,
        log,
    }
}

/// Reads the socket for listings and the group that may connect to it; neither is of use alone.
fn read_socket(r: &mut Reader<'_, '_>) -> Option<ReadSocketConfig> {
    let (here, path) = (r.get("read_socket").is_some(), r.path("read_socket"));
    let (group_here, group) = (r.get("read_group").is_some(), r.string("read_group"));
    match (here, group_here) {
        (true, false) => r.bad(
            "read_socket",
            "is for a group that is not named",
            "add `read_group = \"...\"`, a group of /etc/group or its number",
        ),
        (false, true) => r.bad("read_group", "has no socket", "add `read_socket = \"/...\"`"),
        _ => {}
    }
    let (path, group) = (path?, group?.to_owned());
    r.socket_fits("read_socket", &path, 0);
    Some(ReadSocketConfig { path, group })
}

/// Reads a mode: octal digits in a string, as for `chmod`. TOML's own octal numbers are too easily
/// written in decimal.
fn socket_mode(r: &mut Reader<'_, '_>) -> u32 {
    let text = r.string("socket_mode").unwrap_or("0600");
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode & !0o777 == 0 && mode & 0o600 == 0o600 => mode,
        _ => {
            let fix = "write octal digits with 6 for the owner: \"0600\", \"0660\"";
            r.bad("socket_mode", format!("{text:?} is no mode for a socket"), fix);
            0o600
        }
    }
}

fn holder(r: &mut Reader<'_, '_>) -> HolderConfig {
    match r.get("holder").map(|n| &n.value) {
        None => HolderConfig::Default,
        Some(Value::Bool(false)) => HolderConfig::None,
        Some(Value::Bool(true)) => HolderConfig::Own,
        Some(Value::Str(path)) => {
            let path = PathBuf::from(path);
            r.absolute("holder", &path);
            r.socket_fits("holder", &path, 0);
            HolderConfig::External(path)
        }
        Some(other) => {
            let fix = "write true, false or the path of a holder's socket";
            r.bad("holder", format!("is {}", other.kind()), fix);
            HolderConfig::None
        }
    }
}

/// Whether this is a level, or `target=level` directives with commas between.
fn is_log_filter(text: &str) -> bool {
    let level = |w: &str| matches!(w, "off" | "error" | "warn" | "info" | "debug" | "trace");
    let target = |t: &str| {
        !t.is_empty() && t.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':'))
    };
    text.split(',').all(|word| match word.trim().split_once('=') {
        Some((t, l)) => target(t) && level(l),
        None => level(word.trim()),
    })
}

/// Reads the log filter of the daemon.
fn log(r: &mut Reader<'_, '_>) -> String {
    let log = r.string("log").unwrap_or("info");
    if !is_log_filter(log) {
        r.bad("log", format!("{log:?} is unknown"), LOG_FIX);
    }
    log.into()
}

/// Checks a log filter; the error says what is wrong with it and what to write.
pub fn check_log_filter(text: &str) -> Result<(), String> {
    let good = text.len() <= MAX_LOG_FILTER_LEN_BYTES && is_log_filter(text);
    let shown = || text.chars().take(64).collect::<String>();
    good.then_some(()).ok_or_else(|| format!("{:?} is unknown; {LOG_FIX}", shown()))
}

fn switch(mut r: Reader<'_, '_>) -> SwitchConfig {
    let name = r.name();
    let hold_us = r.int("hold_us", 20_000, 0..=1_000_000) as u32;
    let mac_age_s = r.int("mac_age_s", 300, 1..=86_400) as u32;
    let uplink = r.get("uplink");
    let path = format!("{}.uplink", r.path);
    let uplink = uplink.map(|node| self::uplink(Reader::new(&mut *r.ctx, path, node)));
    r.finish();
    SwitchConfig { name, hold_us, mac_age_s, uplink }
}

fn uplink(mut r: Reader<'_, '_>) -> UplinkConfig {
    let tap = r.required("tap", "\"mr0\"").unwrap_or("");
    interface(&mut r, "tap", tap);
    let bridge = r.string("bridge");
    if let Some(bridge) = bridge {
        interface(&mut r, "bridge", bridge);
    }
    let offloads = r.bool("offloads", true);
    r.finish();
    UplinkConfig { tap: tap.into(), bridge: bridge.map(Into::into), offloads }
}

/// Checks the name of an interface by the kernel's rules (`dev_valid_name`), and refuses `%`, which
/// the kernel would replace by a number.
fn interface(r: &mut Reader<'_, '_>, key: &'static str, name: &str) {
    let bad = |c: char| c.is_ascii_whitespace() || matches!(c, '/' | ':' | '%');
    let missing = name.is_empty() && key == "tap" && r.get("tap").is_none();
    let valid = !name.is_empty()
        && name.len() <= MAX_IF_NAME_LEN_BYTES
        && !name.contains(bad)
        && name != "."
        && name != "..";
    if !valid && !missing {
        let fix = "use 1 to 15 bytes without space, `/`, `:` and `%`";
        r.bad(key, format!("{name:?} is no interface name"), fix);
    }
}

fn vm(ctx: &mut Context, path: String, node: &Node, daemon: &DaemonConfig) -> VmConfig {
    let mut r = Reader::new(ctx, path, node);
    let name = r.name();
    let credit = credit(&mut r, CreditConfig::default());
    let trust_domain = trust_domain(&mut r);
    let memory_limit_bytes = memory_limit(&mut r);
    let net_nodes = r.list("net");
    let disk_nodes = r.list("disk");
    let vsock_node = r.get("vsock");
    let vsock_path = format!("{}.vsock", r.path);
    let pipes = pipes(&mut r, vsock_node.is_some(), !net_nodes.is_empty());
    let channel = channel(&mut r, trust_domain.is_some());
    let modules = modules::of_vm(&mut r, &name, &daemon.state_dir, vsock_node.is_some());
    r.finish();
    let home = ports::Home { run_dir: &daemon.run_dir, vm: &name };
    let nets =
        net_nodes.into_iter().map(|(p, n)| ports::net(Reader::new(ctx, p, n), &home)).collect();
    let disks =
        disk_nodes.into_iter().map(|(p, n)| ports::disk(Reader::new(ctx, p, n), &home)).collect();
    let vsock = vsock_node.map(|n| ports::vsock(Reader::new(ctx, vsock_path, n), &home));
    let from_file = true;
    VmConfig {
        name,
        from_file,
        credit,
        trust_domain,
        memory_limit_bytes,
        nets,
        disks,
        vsock,
        pipes,
        channel,
        modules,
    }
}

/// Least `memory_limit`: below it no VM starts.
const MIN_MEMORY_LIMIT_BYTES: u64 = 1 << 20;

/// Reads the optional `memory_limit` of a VM.
fn memory_limit(r: &mut Reader<'_, '_>) -> Option<u64> {
    let len_bytes = r.size("memory_limit")?;
    if !(MIN_MEMORY_LIMIT_BYTES..=MAX_MEMORY_BYTES).contains(&len_bytes) {
        let what = format!("is {len_bytes} bytes; 1 MiB to 16 TiB");
        r.bad("memory_limit", what, "give what the VM has, hot-plugged memory included: \"8GiB\"");
        return None;
    }
    Some(len_bytes)
}

/// Reads the optional `[vm.pipes]`. Checked here and not in `check.rs`: ports that are detached
/// later must not make a config wrong.
fn pipes(r: &mut Reader<'_, '_>, has_vsock: bool, has_net: bool) -> Option<PipesConfig> {
    let node = r.get("pipes")?;
    if !has_vsock {
        let what = "is for a VM without vsock, over which its agent asks for pipes";
        r.bad("pipes", what, "add a [vm.vsock], or take it out");
    }
    if !has_net {
        let what = "is for a VM without network, whose connections pipes take over";
        r.bad("pipes", what, "add a [[vm.net]], or take it out");
    }
    let path = format!("{}.pipes", r.path);
    let mut r = Reader::new(&mut *r.ctx, path, node);
    let max = r.int("max", 256, 1..=MAX_PIPES) as u32;
    let threads = r.int("threads", 4, 1..=MAX_PIPE_THREADS) as u32;
    let secret = r.path("secret");
    r.finish();
    Some(PipesConfig { max, threads, secret })
}

/// Reads the optional `trust_domain` of a VM.
pub(crate) fn trust_domain(r: &mut Reader<'_, '_>) -> Option<String> {
    let name = r.string("trust_domain")?;
    Some(r.checked_name("trust_domain", name))
}

/// Reads the optional `weight` in a request that attaches a port to a new VM.
pub(crate) fn weight(r: &mut Reader<'_, '_>) -> Option<u32> {
    r.get("weight")?;
    Some(r.int("weight", DEFAULT_WEIGHT.into(), 1..=MAX_WEIGHT) as u32)
}

/// Reads the credit settings of a VM; those that are not named stay as in `now`.
pub(crate) fn credit(r: &mut Reader<'_, '_>, now: CreditConfig) -> CreditConfig {
    let mut rate = |key, now| {
        let Some(rate) = r.size(key) else { return now };
        if rate > MAX_BYTES_PER_S {
            r.limit(key, format!("is {rate}"), format!("{MAX_BYTES_PER_S} (1 TiB)"));
        }
        rate.min(MAX_BYTES_PER_S)
    };
    let floor_bytes_per_s = rate("floor_bytes_per_s", now.floor_bytes_per_s);
    let ceiling_bytes_per_s = rate("ceiling_bytes_per_s", now.ceiling_bytes_per_s);
    if ceiling_bytes_per_s > 0 && floor_bytes_per_s > ceiling_bytes_per_s {
        let what = format!("is {floor_bytes_per_s}, above the ceiling of {ceiling_bytes_per_s}");
        r.bad("floor_bytes_per_s", what, "give a floor below `ceiling_bytes_per_s`");
    }
    CreditConfig {
        weight: r.int("weight", now.weight.into(), 1..=MAX_WEIGHT) as u32,
        floor_bytes_per_s,
        ceiling_bytes_per_s,
        ceiling_ops_per_s: r.int("ceiling_ops_per_s", now.ceiling_ops_per_s, 0..=MAX_OPS_PER_S),
        ceiling_burst_ms: r.int("ceiling_burst_ms", now.ceiling_burst_ms.into(), 1..=MAX_BURST_MS)
            as u32,
    }
}
