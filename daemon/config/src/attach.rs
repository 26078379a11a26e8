//! Ports that come and go while the daemon runs: checked by the same rules as those of the files.

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;
use serde_json::Value as Json;
use thiserror::Error;

use crate::check::check;
use crate::decode;
use crate::model::{Config, CreditConfig, PortConfig, VSOCK_PORT_NAME, VmConfig};
use crate::node::{Node, Value, from_json};
use crate::ports::{self, Home};
use crate::problem::Problems;
use crate::reader::{Context, Reader};
use crate::value::check_name;

/// Why a port was not attached.
#[derive(Debug, Error)]
pub enum AttachError {
    /// The VM has a port of this name.
    ///
    /// Remedy: take another name, or `millrace detach` that port first.
    #[error("VM {vm} already has a port {port}")]
    Exists {
        /// VM.
        vm: String,
        /// Port.
        port: String,
    },
    /// The request has problems.
    ///
    /// Remedy: mend each setting as its line says.
    #[error(transparent)]
    Invalid(#[from] Problems),
}

/// A port as it was attached, in the shape that [`Config::attach`] takes: for the list of run-time
/// ports that survives the daemon.
#[derive(Debug, Clone, Serialize)]
pub struct AttachBody<'a> {
    /// The port, under its kind.
    #[serde(flatten)]
    pub port: &'a PortConfig,
    /// The VM's trust domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_domain: Option<&'a str>,
    /// The weight that the VM was made with.
    pub weight: u32,
}

impl Config {
    /// Takes in a port described by `body`: `{"net": {...}}`, `{"disk": {...}}` or
    /// `{"vsock": {...}}`, the inner table as in a config file. A VM that is not there is made;
    /// `trust_domain` and `weight` beside the port are for it. On error nothing is changed.
    pub fn attach(&mut self, vm: &str, body: &Json) -> Result<PortConfig, AttachError> {
        self.take(vm, body, false)
    }

    /// Takes in a port again that an earlier daemon attached, as [`Config::attach`] does. The
    /// weight in `body` is ignored for a VM that exists: its config is newer.
    pub fn attach_again(&mut self, vm: &str, body: &Json) -> Result<PortConfig, AttachError> {
        self.take(vm, body, true)
    }

    fn take(&mut self, vm: &str, body: &Json, again: bool) -> Result<PortConfig, AttachError> {
        let mut ctx = Context::default();
        if let Err(what) = check_name(vm) {
            ctx.note("vm", what, "use letters, digits, `.`, `_` and `-`, at most 64".into(), None);
        }
        let node = from_json(body);
        let Some(mut request) = request(&mut ctx, &node, &self.daemon.run_dir, vm) else {
            return Err(ctx.problems.into());
        };
        let name = request.port.name().to_string();
        let old = self.vms.iter().position(|v| v.name == vm);
        if old.is_some_and(|at| self.vms[at].ports().any(|p| p.name() == name)) {
            return Err(AttachError::Exists { vm: vm.into(), port: name });
        }
        if again && old.is_some() {
            request.weight = None;
        }
        let mut next = self.clone();
        let at = old.unwrap_or_else(|| {
            next.vms.push(VmConfig::new(vm));
            next.vms.len() - 1
        });
        request.apply_to(&mut ctx, &mut next.vms[at], old.is_none());
        next.push_checked(ctx, at, request.port.clone())?;
        *self = next;
        Ok(request.port)
    }

    /// Gives an existing VM a port, in place of one of the same name if there is one. On error
    /// nothing is changed.
    pub fn put_port(&mut self, vm: &str, port: &PortConfig) -> Result<(), AttachError> {
        let mut next = self.clone();
        let mut ctx = Context::default();
        let Some(at) = next.vms.iter().position(|v| v.name == vm) else {
            let fix = "restart the daemon, which reads the config of VMs at its start".into();
            ctx.note("vm", format!("there is no VM {vm}"), fix, None);
            return Err(ctx.problems.into());
        };
        next.vms[at].remove_port(port.name());
        next.push_checked(ctx, at, port.clone())?;
        *self = next;
        Ok(())
    }

    fn push_checked(
        &mut self,
        mut ctx: Context,
        at: usize,
        port: PortConfig,
    ) -> Result<(), Problems> {
        ctx.own = Some(place(at, &self.vms[at], &port));
        self.vms[at].push_port(port);
        ctx.names = names(self);
        check(&mut ctx, self);
        if ctx.problems.is_empty() { Ok(()) } else { Err(ctx.problems) }
    }

    /// Changes the credit settings of a VM that `body` names. None when there is no such VM. On
    /// error nothing is changed.
    pub fn set_credit(&mut self, vm: &str, body: &Json) -> Result<Option<CreditConfig>, Problems> {
        let Some(vm) = self.vms.iter_mut().find(|v| v.name == vm) else { return Ok(None) };
        let mut ctx = Context::default();
        let node = from_json(body);
        let mut r = Reader::new(&mut ctx, String::new(), &node);
        let credit = decode::credit(&mut r, vm.credit);
        r.finish();
        if !ctx.problems.is_empty() {
            return Err(ctx.problems);
        }
        vm.credit = credit;
        Ok(Some(credit))
    }

    /// Forgets a port, and with its last one a VM that is not in a config file. None when there is
    /// no such port.
    pub fn detach(&mut self, vm: &str, port: &str) -> Option<PortConfig> {
        let at = self.vms.iter().position(|v| v.name == vm)?;
        let found = self.vms[at].ports().find(|p| p.name() == port)?;
        self.vms[at].remove_port(port);
        if !self.vms[at].from_file && self.vms[at].ports().next().is_none() {
            self.vms.remove(at);
        }
        Some(found)
    }
}

/// Request to attach a port, as it was read.
struct Request {
    port: PortConfig,
    trust_domain: Option<String>,
    weight: Option<u32>,
}

impl Request {
    /// Sets what a new VM is made with; an existing one keeps its own.
    fn apply_to(&self, ctx: &mut Context, vm: &mut VmConfig, new: bool) {
        if new {
            vm.trust_domain.clone_from(&self.trust_domain);
            vm.credit.weight = self.weight.unwrap_or(vm.credit.weight);
            return;
        }
        let fix = "leave it out: it is set when the VM is made";
        if self.trust_domain.is_some() && self.trust_domain != vm.trust_domain {
            let what = format!("VM {} is in another trust domain", vm.name);
            ctx.note("trust_domain", what, fix.into(), None);
        }
        if self.weight.is_some_and(|w| w != vm.credit.weight) {
            let what = format!("VM {} has weight {}", vm.name, vm.credit.weight);
            ctx.note("weight", what, fix.into(), None);
        }
    }
}

fn request(ctx: &mut Context, node: &Node, run_dir: &Path, vm: &str) -> Option<Request> {
    let mut r = Reader::new(ctx, String::new(), node);
    if !matches!(node.value, Value::Table(_)) {
        return None;
    }
    let trust_domain = decode::trust_domain(&mut r);
    let weight = decode::weight(&mut r);
    let home = Home { run_dir, vm };
    let kinds = [r.get("net"), r.get("disk"), r.get("vsock")];
    r.finish();
    let port = match kinds {
        [Some(node), None, None] => {
            PortConfig::Net(ports::net(Reader::new(ctx, "net".into(), node), &home))
        }
        [None, Some(node), None] => {
            PortConfig::Disk(ports::disk(Reader::new(ctx, "disk".into(), node), &home))
        }
        [None, None, Some(node)] => {
            PortConfig::Vsock(ports::vsock(Reader::new(ctx, "vsock".into(), node), &home))
        }
        _ => {
            let fix = "give exactly one of `net`, `disk` and `vsock`".to_string();
            ctx.note("", "the request does not name one port".into(), fix, None);
            return None;
        }
    };
    ctx.problems.is_empty().then_some(Request { port, trust_domain, weight })
}

/// Path of the new port in the config, and its table in the request.
fn place(at: usize, vm: &VmConfig, port: &PortConfig) -> (String, &'static str) {
    match port {
        PortConfig::Net(_) => (format!("vm[{at}].net[{}]", vm.nets.len()), "net"),
        PortConfig::Disk(_) => (format!("vm[{at}].disk[{}]", vm.disks.len()), "disk"),
        PortConfig::Vsock(_) => (format!("vm[{at}].vsock"), "vsock"),
    }
}

/// The names of VMs, ports and switches by where they stand in the config.
fn names(config: &Config) -> HashMap<String, String> {
    let mut names = HashMap::new();
    for (i, switch) in config.switches.iter().enumerate() {
        names.insert(format!("switch[{i}]"), format!("switch {}", switch.name));
    }
    for (i, vm) in config.vms.iter().enumerate() {
        let of_vm = format!("vm[{i}]");
        let mut port = |place: String, name: &str| {
            names.insert(format!("{of_vm}.{place}"), format!("port {}/{name}", vm.name))
        };
        for (j, net) in vm.nets.iter().enumerate() {
            port(format!("net[{j}]"), &net.name);
        }
        for (j, disk) in vm.disks.iter().enumerate() {
            port(format!("disk[{j}]"), &disk.name);
        }
        port("vsock".into(), VSOCK_PORT_NAME);
        names.insert(of_vm, format!("VM {}", vm.name));
    }
    names
}
