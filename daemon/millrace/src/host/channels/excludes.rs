//! Connections that pipes have shifted, kept off the channels.
//!
//! A shifted connection has to pass the switch for as long as it lives, and a connection to a
//! member is not piped ([`Shortcuts`]). So what is to be kept off began before its peer was a
//! member: who enters first shows its addresses, from when on no pipe begins with them, and then
//! looks which connections with them there are. Both ends hear of these before they hear of each
//! other.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use base::clock::{Clock, MonotonicClock};
use base::sync::lock;
use channel::{ChannelError, Flow};
use flow::FlowKey;

use super::members::Members;
use super::vm::Vm;
use crate::host::shortcuts::Shortcuts;

/// Connections of a VM that have to pass its network ports ([`pipe::PortFlows::bound`]).
pub type Bound = dyn Fn(&str) -> Vec<FlowKey> + Send + Sync;

/// Excluded flows of each member; equal sets are in the same order.
type Lists = BTreeMap<String, Vec<Flow>>;

/// Flows that each member keeps off the channels.
pub struct Excludes {
    shortcuts: Arc<Shortcuts>,
    bound: Box<Bound>,
    /// Lists that members have, or are about to begin with. The lock is held while a member is
    /// told, so that its latest list is the latest that was made.
    sent: Mutex<Lists>,
}

impl Excludes {
    /// Makes lists of no members.
    pub fn new(shortcuts: Arc<Shortcuts>, bound: Box<Bound>) -> Self {
        Self { shortcuts, bound, sent: Mutex::default() }
    }

    /// Prepares a VM to join with these addresses. Returns the flows that it has to keep off from
    /// the beginning; its peers do already.
    pub fn join(
        &self,
        members: &dyn Members,
        vm: &Vm,
        ips: &[IpAddr],
    ) -> anyhow::Result<Vec<Flow>> {
        let mut sent = lock(&self.sent);
        self.shortcuts.open(&vm.domain, &vm.name, ips);
        let mut lists = self.lists(&vm.domain);
        let own = lists.remove(&vm.name).unwrap_or_default();
        send_missing(members, &mut sent, lists)?;
        sent.insert(vm.name.clone(), own.clone());
        Ok(own)
    }

    /// Prepares a member to have these addresses, too.
    pub fn add(&self, members: &dyn Members, vm: &Vm, ips: &[IpAddr]) -> anyhow::Result<()> {
        let mut sent = lock(&self.sent);
        self.shortcuts.open(&vm.domain, &vm.name, ips);
        send_missing(members, &mut sent, self.lists(&vm.domain))
    }

    /// Records that a member has these addresses, and no others any more.
    pub fn settle(&self, vm: &Vm, ips: &[IpAddr]) {
        self.shortcuts.narrow(&vm.domain, &vm.name, ips, MonotonicClock.now_ns());
    }

    /// Records that the VM is no member.
    pub fn leave(&self, vm: &Vm) {
        lock(&self.sent).remove(&vm.name);
        self.settle(vm, &[]);
    }

    /// Has a member no longer keep off flows that have ended.
    pub fn refresh(&self, members: &dyn Members, vm: &Vm) -> Result<(), ChannelError> {
        let mut sent = lock(&self.sent);
        let Some(old) = sent.get(&vm.name).filter(|old| !old.is_empty()) else { return Ok(()) };
        let now = self.lists(&vm.domain).remove(&vm.name).unwrap_or_default();
        if *old != now {
            send_list(members, &mut sent, &vm.name, now)?;
        }
        Ok(())
    }

    /// Flows that each member of a domain has to keep off.
    fn lists(&self, domain: &str) -> Lists {
        let members = self.shortcuts.members(domain);
        let owner = |ip| members.iter().find(|(_, ips)| ips.contains(&ip)).map(|(vm, _)| vm);
        let mut lists: Lists = BTreeMap::new();
        for vm in members.keys() {
            for key in (self.bound)(vm) {
                let Some(peer) = owner(key.remote).filter(|peer| *peer != vm) else { continue };
                let local = (key.local, key.local_port).into();
                let remote = (key.remote, key.remote_port).into();
                lists.entry(vm.clone()).or_default().push(Flow { local, remote });
                let mirror = Flow { local: remote, remote: local };
                lists.entry(peer.clone()).or_default().push(mirror);
            }
        }
        for flows in lists.values_mut() {
            flows.sort_by_key(|flow| (flow.local, flow.remote));
            // A connection that pipes have shifted at both ends.
            flows.dedup();
        }
        lists
    }
}

/// Sends new lists to members whose list lacks a flow.
fn send_missing(members: &dyn Members, sent: &mut Lists, lists: Lists) -> anyhow::Result<()> {
    for (vm, flows) in lists {
        let known = sent.get(&vm).map(Vec::as_slice).unwrap_or_default();
        if !flows.iter().all(|flow| known.contains(flow)) {
            let many = flows.len();
            send_list(members, sent, &vm, flows).with_context(|| {
                format!("keeping {many} connections that pipes have shifted off the channels")
            })?;
        }
    }
    Ok(())
}

/// Waits until the member has its list. One that is just joining cannot be told: the caller tries
/// again.
fn send_list(
    members: &dyn Members,
    sent: &mut Lists,
    vm: &str,
    flows: Vec<Flow>,
) -> Result<(), ChannelError> {
    match members.exclude(vm, &flows) {
        // One that is broken has no link, and finds the list when its guest starts anew.
        Ok(()) | Err(ChannelError::Broken { .. }) => {
            sent.insert(vm.to_owned(), flows);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{played, vm_named};
    use super::*;

    fn key(local: u8, remote: u8, port: u16) -> FlowKey {
        FlowKey {
            local: [10, 0, 0, local].into(),
            remote: [10, 0, 0, remote].into(),
            local_port: 80,
            remote_port: port,
        }
    }

    fn ip(last: u8) -> [IpAddr; 1] {
        [[10, 0, 0, last].into()]
    }

    type Flows = Arc<Mutex<BTreeMap<String, Vec<FlowKey>>>>;

    fn excludes() -> (Excludes, Flows) {
        let flows = Flows::default();
        let theirs = flows.clone();
        let bound = move |vm: &str| theirs.lock().unwrap().get(vm).cloned().unwrap_or_default();
        (Excludes::new(Arc::default(), Box::new(bound)), flows)
    }

    #[test]
    fn both_ends_hear_of_a_shifted_connection_before_the_second_joins() {
        let (members, asked) = played();
        let (excludes, flows) = excludes();
        let [a, b] = ["a", "b"].map(vm_named);
        // One with a VM that is no member, and one with one that will be.
        flows.lock().unwrap().insert("a".into(), vec![key(1, 9, 1000), key(1, 2, 1000)]);
        assert!(excludes.join(&*members, &a, &ip(1)).unwrap().is_empty());
        let own = excludes.join(&*members, &b, &ip(2)).unwrap();
        assert_eq!(own.len(), 1);
        assert_eq!(own[0].local.to_string(), "10.0.0.2:1000");
        assert_eq!(own[0].remote.to_string(), "10.0.0.1:80");
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["a excludes 1"]);
        // Nothing new, nobody is told.
        excludes.add(&*members, &b, &ip(2)).unwrap();
        excludes.refresh(&*members, &a).unwrap();
        assert_eq!(asked.try_iter().count(), 0);
        // Another address of a peer.
        excludes.add(&*members, &b, &ip(9)).unwrap();
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["a excludes 2", "b excludes 2"]);
        // It is over.
        flows.lock().unwrap().clear();
        excludes.refresh(&*members, &a).unwrap();
        excludes.refresh(&*members, &b).unwrap();
        excludes.refresh(&*members, &b).unwrap();
        assert_eq!(asked.try_iter().collect::<Vec<_>>(), ["a excludes 0", "b excludes 0"]);
    }

    #[test]
    fn who_cannot_be_told_keeps_the_other_out() {
        let (members, asked) = played();
        let (excludes, flows) = excludes();
        let [a, b] = ["a", "b"].map(vm_named);
        flows.lock().unwrap().insert("a".into(), vec![key(1, 2, 1000)]);
        excludes.join(&*members, &a, &ip(1)).unwrap();
        let error = ChannelError::NotMember { vm: "a".into() };
        members.refuse.lock().unwrap().push_back(error);
        let error = excludes.join(&*members, &b, &ip(2)).unwrap_err();
        assert!(format!("{error:#}").contains("keeping 1 connections"), "{error:#}");
        // Its address counts from the beginning of the attempt.
        assert!(excludes.shortcuts.leads_to("t", ip(2)[0], u64::MAX));
        excludes.leave(&b);
        assert!(!excludes.shortcuts.leads_to("t", ip(2)[0], u64::MAX));
        assert_eq!(excludes.join(&*members, &b, &ip(2)).unwrap().len(), 1);
        assert_eq!(asked.try_iter().count(), 2);
        // Without a link nothing is in the way.
        let why = String::new();
        let broken = ChannelError::Broken { vm: "a".into(), why };
        excludes.leave(&b);
        excludes.refresh(&*members, &a).unwrap();
        members.refuse.lock().unwrap().push_back(broken);
        assert_eq!(excludes.join(&*members, &b, &ip(2)).unwrap().len(), 1);
    }
}
