//! Checks across tables: duplicates, references, limits of the whole daemon.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use base::limits::MAX_PORTS;

use crate::channel;
use crate::first_use::FirstUses;
use crate::model::{Config, DiskConfig, HolderConfig, VmConfig};
use crate::modules;
use crate::reader::Context;
use crate::value::{format_mac, plain_path};

/// Notes every contradiction between entries of the config.
pub(crate) fn check(ctx: &mut Context, config: &Config) {
    count(ctx, config);
    names(ctx, config);
    taps(ctx, config);
    nets(ctx, config);
    disks(ctx, config);
    vsocks(ctx, config);
    sockets(ctx, config);
    channel::check(ctx, config);
    modules::check(ctx, config);
}

fn count(ctx: &mut Context, config: &Config) {
    let ports: usize = config.vms.iter().map(|vm| vm.ports().count()).sum();
    if ports > MAX_PORTS {
        let what = format!("all VMs together have {ports} ports");
        let fix = format!("the limit of one daemon is {MAX_PORTS}");
        ctx.note("vm", what, fix, Some(MAX_PORTS.to_string()));
    }
}

fn names(ctx: &mut Context, config: &Config) {
    let fix = "names must differ";
    let mut switches = FirstUses::new("the name", fix);
    for (i, switch) in config.switches.iter().enumerate() {
        let name = switch.name.as_str();
        switches.take(ctx, name, &format!("{name:?}"), &format!("switch[{i}].name"));
    }
    let mut vms = FirstUses::new("the name", fix);
    for (i, vm) in config.vms.iter().enumerate() {
        vms.take(ctx, vm.name.as_str(), &format!("{:?}", vm.name), &format!("vm[{i}].name"));
        let mut ports = FirstUses::new("the name", fix);
        for (field, name) in port_names(i, vm) {
            ports.take(ctx, name, &format!("{name:?}"), &field);
        }
    }
}

fn port_names(i: usize, vm: &VmConfig) -> impl Iterator<Item = (String, &str)> {
    let nets = vm.nets.iter().enumerate();
    let disks = vm.disks.iter().enumerate();
    nets.map(move |(j, net)| (format!("vm[{i}].net[{j}].name"), net.name.as_str()))
        .chain(disks.map(move |(j, d)| (format!("vm[{i}].disk[{j}].name"), d.name.as_str())))
        // A missing name was noted when it was read.
        .filter(|(_, name)| !name.is_empty())
}

fn taps(ctx: &mut Context, config: &Config) {
    let mut taps = FirstUses::new("the TAP", "give each switch its own");
    for (i, switch) in config.switches.iter().enumerate() {
        let Some(uplink) = &switch.uplink else {
            continue;
        };
        let field = format!("switch[{i}].uplink.tap");
        taps.take(ctx, uplink.tap.as_str(), &uplink.tap, &field);
        if uplink.bridge.as_deref() == Some(uplink.tap.as_str()) {
            let field = format!("switch[{i}].uplink.bridge");
            let what = "is the TAP itself".to_string();
            ctx.note(&field, what, "name the bridge it goes into".into(), None);
        }
    }
}

fn nets(ctx: &mut Context, config: &Config) {
    let fix = "each address belongs to one port of a switch";
    let mut macs = FirstUses::new("the MAC address", fix);
    let mut ips = FirstUses::new("the IP address", fix);
    for (i, vm) in config.vms.iter().enumerate() {
        for (j, net) in vm.nets.iter().enumerate() {
            let field = format!("vm[{i}].net[{j}]");
            let switch = net.switch.as_str();
            if !switch.is_empty() && !config.switches.iter().any(|s| s.name == switch) {
                let what = format!("there is no switch {switch:?}");
                let known: Vec<&str> = config.switches.iter().map(|s| s.name.as_str()).collect();
                let fix = match known.as_slice() {
                    [] => "add a [[switch]] with this name".into(),
                    names => format!("add it, or name one of: {}", names.join(", ")),
                };
                ctx.note(&format!("{field}.switch"), what, fix, None);
            }
            if let Some(mac) = net.mac {
                let shown = format_mac(mac);
                macs.take(ctx, (switch, mac), &shown, &format!("{field}.mac"));
            }
            for ip in &net.addresses {
                ips.take(ctx, (switch, *ip), &ip.to_string(), &format!("{field}.addresses"));
            }
        }
    }
    let fix = "what several ports use is in `bind_also` of each, and no port's own";
    for (i, vm) in config.vms.iter().enumerate() {
        for (j, net) in vm.nets.iter().enumerate() {
            let (switch, field) = (net.switch.as_str(), format!("vm[{i}].net[{j}].bind_also"));
            for mac in &net.bind_also.macs {
                macs.note_if_taken(ctx, &(switch, *mac), &format_mac(*mac), &field, fix);
            }
            for ip in &net.bind_also.addresses {
                ips.note_if_taken(ctx, &(switch, *ip), &ip.to_string(), &field, fix);
            }
        }
    }
}

/// Checks images: two disks on one image destroy it, unless both only read.
fn disks(ctx: &mut Context, config: &Config) {
    let mut images: HashMap<PathBuf, (&DiskConfig, String)> = HashMap::new();
    for (i, vm) in config.vms.iter().enumerate() {
        for (j, disk) in vm.disks.iter().enumerate() {
            let Some(path) = disk.format.path().filter(|p| !p.as_os_str().is_empty()) else {
                continue;
            };
            let field = format!("vm[{i}].disk[{j}].path");
            match images.get(&plain_path(path)) {
                Some((first, by)) if !(first.read_only && disk.read_only) => {
                    let what = format!("the image {} is used by", path.display());
                    let fix = "give each disk its own image, or make both read_only";
                    ctx.conflict(&what, by, &field, fix);
                }
                Some(_) => {}
                None => {
                    images.insert(plain_path(path), (disk, field));
                }
            }
        }
    }
}

fn vsocks(ctx: &mut Context, config: &Config) {
    let mut cids = FirstUses::new("the context id", "each VM of a host needs its own");
    for (i, vm) in config.vms.iter().enumerate() {
        // 0: missing, noted when it was read.
        if let Some(vsock) = vm.vsock.as_ref().filter(|v| v.cid != 0) {
            cids.take(ctx, vsock.cid, &vsock.cid.to_string(), &format!("vm[{i}].vsock.cid"));
        }
    }
}

fn sockets(ctx: &mut Context, config: &Config) {
    let all = all_sockets(config);
    let mut paths = FirstUses::new("the socket", "each needs its own path");
    for (path, field) in &all {
        paths.take(ctx, plain_path(path), &path.display().to_string(), field);
    }
    // A guest that connects to port 5 of the host is connected to `<path>_5`, whoever listens
    // there.
    let bases = config.vms.iter().enumerate().filter_map(|(i, vm)| {
        Some((plain_path(&vm.vsock.as_ref()?.path), format!("vm[{i}].vsock.path")))
    });
    let bases: HashMap<PathBuf, String> = bases.collect();
    for (path, field) in &all {
        let base = without_port(&plain_path(path)).and_then(|base| bases.get(&base));
        if let Some(base) = base {
            let shown = path.display();
            let what = format!("{shown} is what a guest reaches as a port of the host under");
            let fix = "choose a path that is not another vsock path, `_` and digits";
            ctx.conflict(&what, base, field, fix);
        }
    }
}

/// Sockets that the daemon makes or connects to, with the fields that name them.
fn all_sockets(config: &Config) -> Vec<(PathBuf, String)> {
    let daemon = &config.daemon;
    let mut all = vec![(daemon.control_socket.clone(), "daemon.control_socket".into())];
    if let Some(read) = &daemon.read_socket {
        all.push((read.path.clone(), "daemon.read_socket".into()));
    }
    match &daemon.holder {
        HolderConfig::Default | HolderConfig::None => {}
        HolderConfig::Own => all.push((daemon.run_dir.join("holder.sock"), "daemon.holder".into())),
        HolderConfig::External(path) => all.push((path.clone(), "daemon.holder".into())),
    }
    for (i, vm) in config.vms.iter().enumerate() {
        for (j, net) in vm.nets.iter().enumerate() {
            all.push((net.endpoint.socket.clone(), format!("vm[{i}].net[{j}].socket")));
        }
        for (j, disk) in vm.disks.iter().enumerate() {
            all.push((disk.endpoint.socket.clone(), format!("vm[{i}].disk[{j}].socket")));
        }
        if let Some(vsock) = &vm.vsock {
            all.push((vsock.endpoint.socket.clone(), format!("vm[{i}].vsock.socket")));
            all.push((vsock.path.clone(), format!("vm[{i}].vsock.path")));
        }
        if let Some(socket) = vm.modules.as_ref().and_then(|modules| modules.socket.as_ref()) {
            all.push((socket.clone(), format!("vm[{i}].modules.socket")));
        }
        if let Some(channel) = &vm.channel {
            all.push((channel.qmp.clone(), format!("vm[{i}].channel.qmp")));
        }
    }
    // A missing path was noted when it was read.
    all.retain(|(path, _)| !path.as_os_str().is_empty());
    all
}

/// The path before `_` and digits at its end; none when it does not end so.
fn without_port(path: &Path) -> Option<PathBuf> {
    let (base, port) = path.file_name()?.to_str()?.rsplit_once('_')?;
    let is_port = !base.is_empty() && !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    is_port.then(|| path.with_file_name(base))
}
