//! Addresses that a VM's packets may reach past the switch: those of the members of its trust
//! domain's channels, now and in the past. Pipes ask, channels tell.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Mutex;

use base::sync::lock;

/// Addresses of former members that are kept apart, of each domain. Of what is older the latest end
/// counts for all addresses.
const MAX_ENDED: usize = 1024;

/// The addresses of one domain.
#[derive(Debug, Default)]
struct Domain {
    /// Addresses of each member, and of each VM that is about to be one.
    members: BTreeMap<String, Vec<IpAddr>>,
    /// Time at which an address stopped being a member's.
    ended_ns: HashMap<IpAddr, u64>,
    /// Latest such time of an address that is not kept any more.
    forgotten_ns: u64,
}

impl Domain {
    fn is_of_member(&self, ip: IpAddr) -> bool {
        self.members.values().any(|ips| ips.contains(&ip))
    }

    fn end(&mut self, ip: IpAddr, now_ns: u64) {
        if self.is_of_member(ip) {
            return;
        }
        self.ended_ns.insert(ip, now_ns);
        if self.ended_ns.len() > MAX_ENDED
            && let Some((&oldest, &ended_ns)) = self.ended_ns.iter().min_by_key(|(_, at)| **at)
        {
            self.ended_ns.remove(&oldest);
            self.forgotten_ns = self.forgotten_ns.max(ended_ns);
        }
    }
}

/// Addresses of all trust domains' members. Times are those of [`base::clock::MonotonicClock`].
#[derive(Debug, Default)]
pub struct Shortcuts(Mutex<HashMap<String, Domain>>);

impl Shortcuts {
    /// Adds addresses by which the VM may be reached from now on.
    pub fn open(&self, domain: &str, vm: &str, ips: &[IpAddr]) {
        let mut all = lock(&self.0);
        let own = all.entry(domain.into()).or_default().members.entry(vm.into()).or_default();
        for ip in ips {
            if !own.contains(ip) {
                own.push(*ip);
            }
        }
    }

    /// Ends all other addresses of the VM; with none it is no member.
    pub fn narrow(&self, domain: &str, vm: &str, ips: &[IpAddr], now_ns: u64) {
        let mut all = lock(&self.0);
        let Some(domain) = all.get_mut(domain) else { return };
        let Some(own) = domain.members.remove(vm) else { return };
        if !ips.is_empty() {
            domain.members.insert(vm.into(), ips.to_vec());
        }
        own.into_iter().for_each(|ip| domain.end(ip, now_ns));
    }

    /// Whether that address is a member's, or was one's since then.
    pub fn leads_to(&self, domain: &str, ip: IpAddr, since_ns: u64) -> bool {
        let all = lock(&self.0);
        let Some(domain) = all.get(domain) else { return false };
        let ended_ns = domain.ended_ns.get(&ip).copied().unwrap_or(0).max(domain.forgotten_ns);
        domain.is_of_member(ip) || (ended_ns > 0 && since_ns <= ended_ns)
    }

    /// Members and their addresses.
    pub fn members(&self, domain: &str) -> BTreeMap<String, Vec<IpAddr>> {
        lock(&self.0).get(domain).map(|domain| domain.members.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u16) -> IpAddr {
        let [high, low] = last.to_be_bytes();
        [10, 0, high, low].into()
    }

    #[test]
    fn an_address_counts_while_it_is_a_members_and_for_what_began_before_it_ended() {
        let shortcuts = Shortcuts::default();
        let leads = |ip, since_ns| shortcuts.leads_to("t", ip, since_ns);
        shortcuts.open("t", "a", &[ip(1), ip(2)]);
        assert!(leads(ip(1), u64::MAX) && !leads(ip(3), 0));
        assert!(!shortcuts.leads_to("u", ip(1), 0));
        // The new address from before, the old one until after.
        shortcuts.open("t", "a", &[ip(2), ip(3)]);
        assert!(leads(ip(1), u64::MAX) && leads(ip(3), u64::MAX));
        shortcuts.narrow("t", "a", &[ip(2), ip(3)], 100);
        assert!(leads(ip(1), 100) && !leads(ip(1), 101) && leads(ip(3), u64::MAX));
        // One that another has taken meanwhile.
        shortcuts.open("t", "b", &[ip(3)]);
        shortcuts.narrow("t", "a", &[], 200);
        assert!(leads(ip(2), 200) && !leads(ip(2), 201) && leads(ip(3), u64::MAX));
        assert_eq!(shortcuts.members("t").keys().collect::<Vec<_>>(), ["b"]);
        // Who was none ends nothing.
        shortcuts.narrow("t", "a", &[], 300);
        assert!(!leads(ip(2), 201));
    }

    #[test]
    fn what_is_forgotten_is_not_taken_for_never_been() {
        let shortcuts = Shortcuts::default();
        for last in 0..2000 {
            shortcuts.open("t", "a", &[ip(last)]);
            shortcuts.narrow("t", "a", &[], 1000 + u64::from(last));
        }
        assert_eq!(lock(&shortcuts.0)["t"].ended_ns.len(), MAX_ENDED);
        for last in 0..2000 {
            let ended_ns = 1000 + u64::from(last);
            assert!(shortcuts.leads_to("t", ip(last), ended_ns), "{last}");
        }
        assert!(!shortcuts.leads_to("t", ip(0), 3000));
    }
}
