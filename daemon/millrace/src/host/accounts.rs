//! The VMs' accounts on the sidecores: opened with the first port, closed with the last.

use std::sync::Arc;

use base::clock::Clock;
use config::{Config, CreditConfig};
use control::plane::CreditUsage;
use control::sample::Metrics;
use modules::Charge;
use sidecore::{Account, Accounts, Settings, Sidecore, Spent, VmId};

fn settings(credit: &CreditConfig) -> Settings {
    Settings {
        weight: credit.weight,
        floor_bytes_per_s: credit.floor_bytes_per_s,
        ceiling_bytes_per_s: credit.ceiling_bytes_per_s,
        ceiling_ops_per_s: credit.ceiling_ops_per_s,
        ceiling_burst_ms: credit.ceiling_burst_ms,
    }
}

/// Counters of an account.
pub fn usage(account: &Account) -> CreditUsage {
    use std::sync::atomic::Ordering::Relaxed;
    let s = &account.stats;
    CreditUsage {
        charged_bytes: s.charged_bytes.load(Relaxed),
        charged_requests: s.charged_requests.load(Relaxed),
        refills: s.refills.load(Relaxed),
        held_by_weight: s.held_by_weight.load(Relaxed),
        held_by_weight_ns: s.held_by_weight_ns.load(Relaxed),
        held_by_ceiling: s.held_by_ceiling.load(Relaxed),
        held_by_ceiling_ns: s.held_by_ceiling_ns.load(Relaxed),
        thread_ns: s.thread_ns.load(Relaxed),
    }
}

/// An account's counters and its settings.
pub fn metrics(account: &Account, all: &mut Metrics) {
    let (u, granted) = (usage(account), account.settings());
    let values = [
        ("charged_bytes_total", u.charged_bytes, "Bytes charged, requests with their minimum."),
        ("charged_requests_total", u.charged_requests, "Requests charged."),
        ("refills_total", u.refills, "Times it came to new credit after it had run out."),
        ("held_by_weight_total", u.held_by_weight, "Times it was held back by its weight."),
        ("held_by_weight_ns_total", u.held_by_weight_ns, "Nanoseconds held back by its weight."),
        ("held_by_ceiling_total", u.held_by_ceiling, "Times it was held back at its ceiling."),
        ("held_by_ceiling_ns_total", u.held_by_ceiling_ns, "Nanoseconds held back at its ceiling."),
        ("thread_ns_total", u.thread_ns, "Nanoseconds of CPU time of its pipes' threads."),
        ("weight", granted.weight.into(), "Its weight."),
        ("floor_bytes_per_s", granted.floor_bytes_per_s, "Its floor in bytes; 0: none."),
        ("ceiling_bytes_per_s", granted.ceiling_bytes_per_s, "Its ceiling in bytes; 0: none."),
        ("ceiling_ops_per_s", granted.ceiling_ops_per_s, "Its ceiling in requests; 0: none."),
    ];
    for (name, value, help) in values {
        let labels = vec![("vm", account.name().to_owned())];
        all.sample(&format!("millrace_vm_{name}"), help, labels, value);
    }
}

/// Charges a VM for what its modules did with their files; nobody while it has no port.
pub fn charge(accounts: &Arc<Accounts>, clock: &Arc<dyn Clock>, vm: &str) -> Charge {
    let (accounts, clock, vm) = (Arc::clone(accounts), Arc::clone(clock), vm.to_owned());
    Charge(Arc::new(move |used: modules::DiskUse| {
        if let Some(account) = accounts.find(&vm) {
            let spent = Spent { bytes: used.bytes, requests: used.requests };
            account.charge(spent, clock.now_ns());
        }
    }))
}

/// Accounts of the VMs that have ports, known to all sidecores.
pub struct VmAccounts {
    accounts: Arc<Accounts>,
    cores: Vec<Sidecore>,
}

impl VmAccounts {
    /// Makes accounts of no VMs yet.
    pub fn new(accounts: Arc<Accounts>, cores: Vec<Sidecore>) -> Self {
        Self { accounts, cores }
    }

    /// Finds the account of a VM.
    pub fn find(&self, vm: &str) -> Option<Arc<Account>> {
        self.accounts.find(vm)
    }

    /// Lists all accounts.
    pub fn list(&self) -> Vec<Arc<Account>> {
        self.accounts.list()
    }

    /// The account of a VM, opened when there is none.
    pub fn open(&self, config: &Config, vm: &str) -> anyhow::Result<VmId> {
        if let Some(account) = self.accounts.find(vm) {
            return Ok(account.id());
        }
        let entry = config.vms.iter().find(|v| v.name == vm);
        let credit = entry.map(|v| v.credit).unwrap_or_default();
        let account = self.accounts.open(vm, settings(&credit));
        for core in &self.cores {
            core.enrol(account.clone())?;
        }
        Ok(account.id())
    }

    /// Changes what a VM is granted.
    pub fn grant(&self, vm: &str, credit: &CreditConfig) -> anyhow::Result<()> {
        // One without ports gets its settings with its first port.
        let Some(account) = self.accounts.find(vm) else { return Ok(()) };
        account.set(settings(credit));
        for core in &self.cores {
            core.enrol(account.clone())?;
        }
        Ok(())
    }

    /// Closes the account of a VM that has no port left.
    pub fn close(&self, vm: &str) {
        let Some(account) = self.accounts.find(vm) else { return };
        for core in &self.cores {
            // A sidecore that is gone knows nobody.
            let _ = core.expel(account.id());
        }
        self.accounts.close(account.id());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_show_what_is_granted_now() {
        let account = Accounts::default().open("vm", Settings::default());
        let shown = |name: &str| {
            let mut all = Metrics::default();
            metrics(&account, &mut all);
            let name = format!("millrace_vm_{name}");
            let family = all.families.into_iter().find(|f| f.name == name).unwrap();
            family.samples[0].1
        };
        let names = ["weight", "floor_bytes_per_s", "ceiling_bytes_per_s", "ceiling_ops_per_s"];
        assert_eq!(names.map(shown), [100, 0, 0, 0]);
        account.set(Settings {
            weight: 7,
            floor_bytes_per_s: 1 << 20,
            ceiling_bytes_per_s: 1 << 30,
            ceiling_ops_per_s: 5000,
            ..Settings::default()
        });
        assert_eq!(names.map(shown), [7, 1 << 20, 1 << 30, 5000]);
    }
}
