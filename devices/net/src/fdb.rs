//! Owners of addresses: a table of fixed size for MAC addresses (the forwarding database) and
//! one for IP addresses (bindings).
//!
//! Sets of eight entries, chosen by a keyed hash: a lookup reads one set, an insertion takes a free
//! or aged entry of its set or fails, nothing ever moves, nothing is allocated after the start. A
//! fixed entry takes a learned one's place when it must. The key comes from the kernel, so that a
//! guest cannot aim at one set.

use std::net::IpAddr;

use base::limits::MAX_PORTS;

use frame::Mac;

/// Entries per set: two cache lines of MAC entries.
const WAYS: usize = 8;

/// A port's number in the switch.
pub type PortId = u16;

/// The owner number of the uplink.
pub const UPLINK: PortId = MAX_PORTS as PortId;

/// Destination of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dest {
    Port(PortId),
    Uplink,
    All,
    Nowhere,
}

/// How often, at most, aged entries are looked for when an owner is at its limit.
const SWEEP_EVERY_NS: u64 = 1_000_000_000;

/// Address that the table can be asked for.
pub trait Key: Copy + Eq + Default {
    /// 64 bits, well mixed with `seed`.
    fn mix(self, seed: u64) -> u64;
}

fn mix64(x: u64) -> u64 {
    let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

impl Key for Mac {
    #[inline]
    fn mix(self, seed: u64) -> u64 {
        mix64(self.bits() ^ seed)
    }
}

/// An IP address; IPv4 as IPv4-mapped IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ip(pub u128);

impl From<IpAddr> for Ip {
    fn from(addr: IpAddr) -> Self {
        match addr {
            IpAddr::V4(a) => Self(u128::from(a.to_ipv6_mapped())),
            IpAddr::V6(a) => Self(u128::from(a)),
        }
    }
}

impl From<Ip> for IpAddr {
    fn from(ip: Ip) -> Self {
        let v6 = std::net::Ipv6Addr::from(ip.0);
        v6.to_ipv4_mapped().map_or(Self::V6(v6), Self::V4)
    }
}

impl Key for Ip {
    #[inline]
    fn mix(self, seed: u64) -> u64 {
        mix64(mix64(self.0 as u64 ^ seed) ^ (self.0 >> 64) as u64)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Kind {
    #[default]
    Free,
    Learned,
    Fixed,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry<K> {
    key: K,
    seen_ns: u64,
    owner: PortId,
    kind: Kind,
}

/// One line of a listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed<K> {
    /// The address.
    pub key: K,
    /// Port that has it, or [`UPLINK`].
    pub owner: PortId,
    /// Configured or bound, so that it does not age.
    pub fixed: bool,
    /// Nanoseconds since it was last seen (0 when fixed).
    pub age_ns: u64,
}

/// Outcome of a learning attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learn {
    /// The address was there already, with this owner.
    Known,
    /// The address is new, or another owner has not shown it for so long that it has aged.
    New,
    /// The address came from another owner, who had it until now.
    Moved {
        /// Owner until now.
        from: PortId,
    },
    /// The address belongs to another owner, who keeps it.
    Taken,
    /// The owner has as many as it may have.
    OwnerFull,
    /// The table (or its set) is full.
    TableFull,
}

/// The rules of one learning attempt.
#[derive(Debug, Clone, Copy)]
pub struct LearnRules {
    /// Most learned entries of the owner.
    pub owner_limit: u32,
    /// Whether a live learned entry may move here from another owner.
    pub may_move: bool,
}

/// The learned entry of a set that was not seen for longest, and when it was.
fn oldest<K: Key>(set: &[Entry<K>; WAYS]) -> Option<(usize, u64)> {
    let learned = set.iter().enumerate().filter(|(_, e)| e.kind == Kind::Learned);
    learned.map(|(way, e)| (way, e.seen_ns)).min_by_key(|(_, seen_ns)| *seen_ns)
}

/// The table; see the module's text.
#[derive(Debug)]
pub struct Table<K> {
    sets: Box<[[Entry<K>; WAYS]]>,
    seed: u64,
    age_ns: u64,
    max: usize,
    len: usize,
    /// Fixed entries among them.
    fixed: usize,
    /// Learned entries by owner.
    counts: Box<[u32]>,
    last_sweep_ns: u64,
    /// Counts the changes of owners.
    generation: u64,
}

impl<K: Key> Table<K> {
    /// Room for `max` entries (in twice as many places), each aged after `age_ns` unseen.
    pub fn new(max: usize, age_ns: u64, seed: u64) -> Self {
        let sets = (max * 2).div_ceil(WAYS).next_power_of_two();
        Self {
            sets: vec![[Entry::default(); WAYS]; sets].into_boxed_slice(),
            seed,
            age_ns,
            max,
            len: 0,
            fixed: 0,
            counts: vec![0; MAX_PORTS + 1].into_boxed_slice(),
            last_sweep_ns: 0,
            generation: 0,
        }
    }

    /// A number that changes whenever a key gets, loses or changes its owner. Ageing alone, which
    /// shows when a key is looked for, does not change it.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    #[inline]
    fn set_of(&self, key: K) -> usize {
        key.mix(self.seed) as usize & (self.sets.len() - 1)
    }

    #[inline]
    fn is_live(&self, entry: &Entry<K>, now_ns: u64) -> bool {
        match entry.kind {
            Kind::Free => false,
            Kind::Fixed => true,
            Kind::Learned => now_ns.saturating_sub(entry.seen_ns) <= self.age_ns,
        }
    }

    /// The owner of `key`, when there is one that has not aged.
    #[inline]
    pub fn owner(&self, key: K, now_ns: u64) -> Option<PortId> {
        let set = &self.sets[self.set_of(key)];
        let entry = set.iter().find(|e| e.key == key && e.kind != Kind::Free)?;
        self.is_live(entry, now_ns).then_some(entry.owner)
    }

    /// `key` was seen at `owner`.
    #[inline]
    pub fn learn(&mut self, key: K, owner: PortId, now_ns: u64, rules: LearnRules) -> Learn {
        let at = self.set_of(key);
        let Some(way) = self.sets[at].iter().position(|e| e.key == key && e.kind != Kind::Free)
        else {
            return self.insert(at, key, owner, now_ns, rules);
        };
        let entry = self.sets[at][way];
        if entry.owner == owner {
            self.sets[at][way].seen_ns = now_ns;
            return Learn::Known;
        }
        if entry.kind == Kind::Fixed || (self.is_live(&entry, now_ns) && !rules.may_move) {
            return Learn::Taken;
        }
        if !self.owner_has_room(owner, now_ns, rules.owner_limit) {
            return Learn::OwnerFull;
        }
        let moves = self.is_live(&entry, now_ns);
        // A sweep may just have freed this very place; either way it is ours now.
        self.free(at, way);
        let learned = self.fill(at, way, key, owner, now_ns);
        if moves { Learn::Moved { from: entry.owner } } else { learned }
    }

    fn insert(
        &mut self,
        at: usize,
        key: K,
        owner: PortId,
        now_ns: u64,
        rules: LearnRules,
    ) -> Learn {
        if !self.owner_has_room(owner, now_ns, rules.owner_limit) {
            return Learn::OwnerFull;
        }
        let free = self.sets[at].iter().position(|e| e.kind == Kind::Free);
        let aged = || self.sets[at].iter().position(|e| !self.is_live(e, now_ns));
        let Some(way) = free.or_else(aged) else { return Learn::TableFull };
        if self.sets[at][way].kind == Kind::Free && self.len >= self.max {
            self.sweep(now_ns);
            if self.len >= self.max {
                return Learn::TableFull;
            }
        }
        self.free(at, way);
        self.fill(at, way, key, owner, now_ns)
    }

    fn owner_has_room(&mut self, owner: PortId, now_ns: u64, limit: u32) -> bool {
        if self.counts[usize::from(owner)] < limit {
            return true;
        }
        self.sweep(now_ns);
        self.counts[usize::from(owner)] < limit
    }

    fn fill(&mut self, at: usize, way: usize, key: K, owner: PortId, now_ns: u64) -> Learn {
        self.sets[at][way] = Entry { key, seen_ns: now_ns, owner, kind: Kind::Learned };
        self.generation += 1;
        self.counts[usize::from(owner)] += 1;
        self.len += 1;
        Learn::New
    }

    fn free(&mut self, at: usize, way: usize) {
        let entry = std::mem::take(&mut self.sets[at][way]);
        self.generation += 1;
        if entry.kind == Kind::Learned {
            self.counts[usize::from(entry.owner)] -= 1;
        }
        if entry.kind == Kind::Fixed {
            self.fixed -= 1;
        }
        if entry.kind != Kind::Free {
            self.len -= 1;
        }
    }

    /// Frees aged entries, at most once a second: it reads the whole table, and a guest at its
    /// limit could otherwise ask for that with every frame.
    fn sweep(&mut self, now_ns: u64) {
        if self.last_sweep_ns != 0 && now_ns.saturating_sub(self.last_sweep_ns) < SWEEP_EVERY_NS {
            return;
        }
        self.last_sweep_ns = now_ns.max(1);
        for at in 0..self.sets.len() {
            for way in 0..WAYS {
                let entry = self.sets[at][way];
                if entry.kind == Kind::Learned && !self.is_live(&entry, now_ns) {
                    self.free(at, way);
                }
            }
        }
    }

    /// Gives `key` to `owner` until it is forgotten; replaces what was learned about it, and makes
    /// room by forgetting what was learned and not seen for longest. Refused when it is another's
    /// fixed entry ([`Learn::Taken`]) or there are only fixed ones ([`Learn::TableFull`]).
    pub fn fix(&mut self, key: K, owner: PortId, now_ns: u64) -> Learn {
        let at = self.set_of(key);
        let set = &self.sets[at];
        if let Some(way) = set.iter().position(|e| e.key == key && e.kind != Kind::Free) {
            let entry = set[way];
            if entry.kind == Kind::Fixed {
                return if entry.owner == owner { Learn::Known } else { Learn::Taken };
            }
            self.free(at, way);
        }
        // Before any search: a guest can ask with every frame while there is nothing to evict.
        if self.fixed >= self.max {
            return Learn::TableFull;
        }
        let free = self.sets[at].iter().position(|e| e.kind == Kind::Free);
        let Some(way) = free.or_else(|| oldest(&self.sets[at]).map(|(way, _)| way)) else {
            return Learn::TableFull;
        };
        self.free(at, way);
        if self.len >= self.max {
            self.evict_oldest();
        }
        self.sets[at][way] = Entry { key, seen_ns: now_ns, owner, kind: Kind::Fixed };
        self.generation += 1;
        self.len += 1;
        self.fixed += 1;
        Learn::New
    }

    /// Forgets the learned entry that was not seen for longest. Reads the whole table: only for a
    /// new fixed entry, of which a port brings few.
    fn evict_oldest(&mut self) {
        let candidates = self.sets.iter().enumerate();
        let found =
            candidates.filter_map(|(at, set)| oldest(set).map(|(way, seen)| (seen, at, way)));
        if let Some((_, at, way)) = found.min() {
            self.free(at, way);
        }
    }

    /// Forgets entries of `owner` for which `which(key, fixed)` says so.
    pub fn forget(&mut self, owner: PortId, which: impl Fn(K, bool) -> bool) {
        for at in 0..self.sets.len() {
            for way in 0..WAYS {
                let e = self.sets[at][way];
                if e.kind != Kind::Free && e.owner == owner && which(e.key, e.kind == Kind::Fixed) {
                    self.free(at, way);
                }
            }
        }
    }

    /// Whether `key` is the fixed entry of another than `owner`.
    pub fn is_fixed_elsewhere(&self, key: K, owner: PortId) -> bool {
        let set = &self.sets[self.set_of(key)];
        set.iter().any(|e| e.key == key && e.kind == Kind::Fixed && e.owner != owner)
    }

    /// All live entries (allocates: for listings).
    pub fn list(&self, now_ns: u64) -> Vec<Listed<K>> {
        let live = self.sets.iter().flatten().filter(|e| self.is_live(e, now_ns));
        live.map(|e| {
            let fixed = e.kind == Kind::Fixed;
            let age_ns = if fixed { 0 } else { now_ns.saturating_sub(e.seen_ns) };
            Listed { key: e.key, owner: e.owner, fixed, age_ns }
        })
        .collect()
    }
}

#[cfg(test)]
mod tests;
