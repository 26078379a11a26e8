//! Changes made at run time that outlive the daemon: attached ports, and credit granted to VMs.

use std::path::Path;

use config::{AttachBody, AttachError, Config, CreditConfig, DEFAULT_WEIGHT, PortConfig};
use control::ControlError;
use control::attached::{AttachedList, AttachedPort};
use control::granted::GrantList;
use control::run_list::{Kept as Entry, RunList};

use super::port::full_name;

/// Attached ports and granted credit, as the run folder's lists have them.
#[derive(Debug)]
pub struct RuntimeChanges {
    attached: AttachedList,
    granted: GrantList,
}

impl RuntimeChanges {
    /// Reads the lists of an earlier daemon. A list that cannot be read is put aside.
    pub fn load(run_dir: &Path) -> Self {
        Self { attached: load(run_dir), granted: load(run_dir) }
    }

    /// Applies the changes to the config. A change that no longer fits is left out.
    pub(super) fn restore(&mut self, config: &mut Config) {
        for entry in self.attached.entries() {
            let port = full_name(&entry.vm, &entry.port);
            match config.attach_again(&entry.vm, &entry.body) {
                Ok(_) => {}
                Err(AttachError::Exists { .. }) => {
                    tracing::info!(%port, "was attached at run time; the config has it now");
                }
                Err(e) => tracing::error!(%port, "was attached at run time, is left out now: {e}"),
            }
        }
        match self.granted.restore(config) {
            Ok(stale) => stale.iter().for_each(|grant| {
                tracing::info!(vm = %grant.vm, was = ?grant.was, is = ?grant.is,
                    "was granted at run time; the config says something new, which holds");
            }),
            Err(e) => tracing::error!("{e}"),
        }
    }

    /// Records a port for the next daemon. When that fails the port runs all the same.
    pub(super) fn record_attach(&mut self, config: &Config, vm: &str, port: &PortConfig) {
        let entry = config.vms.iter().find(|v| v.name == vm);
        let made_with = self.granted.was(vm).or(entry.map(|v| v.credit));
        let body = serde_json::to_value(AttachBody {
            port,
            trust_domain: entry.and_then(|v| v.trust_domain.as_deref()),
            weight: made_with.map_or(DEFAULT_WEIGHT, |credit| credit.weight),
        });
        let noted = body.map_err(|e| e.to_string()).and_then(|body| {
            let entry = AttachedPort { vm: vm.into(), port: port.name().into(), body };
            self.attached.add(entry).map_err(|e| e.to_string())
        });
        if let Err(e) = noted {
            let name = full_name(vm, port.name());
            tracing::error!(port = %name, "{e}; a restart will not bring it back");
        }
    }

    /// Drops a port from the lists, and its VM's credit if the config no longer has the VM.
    pub(super) fn record_detach(&mut self, config: &Config, vm: &str, port: &str) {
        if let Err(e) = self.attached.remove(vm, port) {
            tracing::error!("{e}; a restart will bring {vm}/{port} back");
        }
        if !config.vms.iter().any(|v| v.name == vm)
            && let Err(e) = self.granted.forget(vm)
        {
            tracing::error!("{e}; a new VM {vm} may be granted what this one was");
        }
    }

    /// Records that a VM's credit changed from `was` to `is`.
    pub(super) fn record_grant(&mut self, vm: &str, was: CreditConfig, is: CreditConfig) {
        if let Err(e) = self.granted.grant(vm, was, is) {
            tracing::error!(%vm, "{e}; it holds until the daemon ends");
        }
    }
}

fn load<T: Entry>(run_dir: &Path) -> RunList<T> {
    RunList::load(run_dir).unwrap_or_else(|e: ControlError| {
        let list = run_dir.join(T::FILE);
        let aside = run_dir.join(format!("{}.bad", T::FILE));
        let moved = std::fs::rename(&list, &aside);
        tracing::error!(?moved, "{e}; the file is put aside as {}", aside.display());
        RunList::empty(run_dir)
    })
}
