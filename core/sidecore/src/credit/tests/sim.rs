//! A machine in virtual time: cores with a ledger each, queues with drivers that refill late, and a
//! device that takes its time. Everything follows from the seed.

use std::collections::VecDeque;

use crate::credit::{Accounts, Allowance, Ledger, Settings, Spent, VmId};

pub const MS: u64 = 1_000_000;
pub const SECOND: u64 = 1000 * MS;

/// Most requests and bytes that an engine takes from one queue in a round.
const BATCH: usize = 64;
const ROUND_BYTES: u64 = 256 << 10;

/// How an engine charges, and what a request costs its core.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub min_bytes: u64,
    pub request_ns: u64,
    /// Picoseconds for each byte.
    pub byte_ps: u64,
    /// Goes to the device, which has so much to do for each request and byte.
    pub device: Option<(u64, u64)>,
}

pub const NET: Kind = Kind { min_bytes: 512, request_ns: 70, byte_ps: 120, device: None };
pub const DISK: Kind = Kind { min_bytes: 4096, request_ns: 500, byte_ps: 120, device: None };
/// 500 MB/s and 100,000 requests per second.
pub const SLOW: Kind =
    Kind { min_bytes: 4096, request_ns: 500, byte_ps: 0, device: Some((2000, 2000)) };

#[derive(Debug, Clone)]
pub struct Queue {
    pub vm: usize,
    pub core: usize,
    pub kind: Kind,
    pub len_bytes: u64,
    pub ring: u32,
    /// The driver takes up to so long to refill.
    pub lag_ns: u64,
    pub from_ns: u64,
    pub to_ns: u64,
}

impl Queue {
    pub fn new(vm: usize, kind: Kind, len_bytes: u64) -> Self {
        Self {
            vm,
            core: 0,
            kind,
            len_bytes,
            ring: 256,
            lag_ns: 10_000,
            from_ns: 0,
            to_ns: u64::MAX,
        }
    }
}

struct Live {
    spec: Queue,
    bytes: u64,
    available: u32,
    /// Requests that come back to the ring, and when.
    back: VecDeque<u64>,
}

struct Core {
    ledger: Ledger,
    now_ns: u64,
    queues: Vec<Live>,
    /// In the device, and when it is through with all that was given to it.
    in_device: VecDeque<u64>,
    device_ns: u64,
    /// Rounds in which nothing was taken though work was there and no ceiling held it.
    wasted: u64,
    rounds: u64,
}

/// Requests in the device at a time.
pub const DEPTH: usize = 64;

pub struct Sim {
    cores: Vec<Core>,
    pub ids: Vec<VmId>,
    pub accounts: Accounts,
    /// Bytes charged to each VM.
    pub charged: Vec<u64>,
    pub requests: Vec<u64>,
    random: u64,
}

impl Sim {
    pub fn new(settings: &[Settings], queues: &[Queue]) -> Self {
        let accounts = Accounts::default();
        let count = queues.iter().map(|q| q.core + 1).max().unwrap_or(1);
        let mut cores: Vec<Core> = (0..count)
            .map(|_| Core {
                ledger: Ledger::default(),
                now_ns: SECOND,
                queues: Vec::new(),
                in_device: VecDeque::new(),
                device_ns: 0,
                wasted: 0,
                rounds: 0,
            })
            .collect();
        let open = |(i, s): (usize, &Settings)| accounts.open(&format!("vm{i}"), *s);
        let all: Vec<_> = settings.iter().enumerate().map(open).collect();
        for core in &mut cores {
            all.iter().for_each(|a| core.ledger.enrol(a.clone()));
        }
        for spec in queues {
            let live =
                Live { spec: spec.clone(), bytes: 0, available: spec.ring, back: VecDeque::new() };
            cores[spec.core].queues.push(live);
        }
        Self {
            cores,
            ids: all.iter().map(|a| a.id()).collect(),
            accounts,
            charged: vec![0; settings.len()],
            requests: vec![0; settings.len()],
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    pub fn weights(weights: &[u32], queues: &[Queue]) -> Self {
        let all = weights.iter().map(|&weight| Settings { weight, ..Settings::default() });
        Self::new(&all.collect::<Vec<_>>(), queues)
    }

    /// The time of the core that is furthest behind.
    pub fn now_ns(&self) -> u64 {
        self.cores.iter().map(|c| c.now_ns).min().unwrap()
    }

    /// Runs for so long; returns what was charged to each VM meanwhile.
    pub fn run(&mut self, time_ns: u64) -> Vec<u64> {
        let before = self.charged.clone();
        let start_ns = self.now_ns();
        loop {
            let core = self.cores.iter_mut().min_by_key(|c| c.now_ns).unwrap();
            if core.now_ns >= start_ns + time_ns {
                break;
            }
            let (ids, random) = (&self.ids, &mut self.random);
            core.round(ids, random, &mut self.charged, &mut self.requests);
        }
        self.charged.iter().zip(before).map(|(now, before)| now - before).collect()
    }

    pub fn set(&mut self, vm: usize, settings: Settings) {
        let account = self.accounts.find(&format!("vm{vm}")).unwrap();
        account.set(settings);
        self.cores.iter_mut().for_each(|c| c.ledger.enrol(account.clone()));
    }

    /// Moves a queue between two rounds, as a worker moves; its requests in the device stay there.
    pub fn shift(&mut self, from: usize, at: usize, to: usize) {
        let live = self.cores[from].queues.remove(at);
        let now_ns = self.cores[from].now_ns;
        self.cores[from].ledger.worker_left(now_ns);
        self.cores[to].queues.push(live);
    }

    /// Bytes charged for a queue.
    pub fn on_queue(&self, core: usize, at: usize) -> u64 {
        self.cores[core].queues[at].bytes
    }

    /// Queues on a core.
    pub fn len(&self, core: usize) -> usize {
        self.cores[core].queues.len()
    }

    pub fn wasted_on(&self, core: usize) -> u64 {
        self.cores[core].wasted
    }

    pub fn wasted(&self) -> u64 {
        self.cores.iter().map(|c| c.wasted).sum()
    }

    pub fn rounds(&self) -> u64 {
        self.cores.iter().map(|c| c.rounds).sum()
    }
}

fn next(random: &mut u64, below: u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    random.checked_rem(below).unwrap_or(0)
}

impl Core {
    fn round(&mut self, ids: &[VmId], random: &mut u64, charged: &mut [u64], requests: &mut [u64]) {
        let round_ns = self.now_ns;
        self.now_ns += 30;
        let (mut done, mut waiting) = (0, false);
        let first = self.ledger.draw_below(self.queues.len());
        for k in 0..self.queues.len() {
            let at = (first + k) % self.queues.len();
            while self.in_device.front().is_some_and(|&at_ns| at_ns <= self.now_ns) {
                self.in_device.pop_front();
            }
            let vm = self.queues[at].spec.vm;
            let (spent, waits) = self.poll(at, ids[vm], random);
            charged[vm] += spent.bytes;
            requests[vm] += u64::from(spent.requests);
            done += spent.requests;
            waiting |= waits;
        }
        self.rounds += 1;
        self.wasted += u64::from(done == 0 && waiting);
        let goes_on = self.ledger.end_round(round_ns);
        if done == 0 && !goes_on {
            // Nothing changes for a while: fewer rounds to simulate.
            self.now_ns += 1000;
        }
    }

    /// Polls a queue as an engine does; also says whether work waits that nothing but credit holds
    /// back.
    fn poll(&mut self, at: usize, vm: VmId, random: &mut u64) -> (Spent, bool) {
        let Self { ledger, now_ns, queues, in_device, device_ns, .. } = self;
        let q = &mut queues[at];
        *now_ns += 5;
        while q.back.front().is_some_and(|&at_ns| at_ns <= *now_ns) {
            q.back.pop_front();
            q.available += 1;
        }
        let Kind { min_bytes, request_ns, byte_ps, device } = q.spec.kind;
        let now = *now_ns - SECOND;
        let allowance = ledger.allowance(vm, *now_ns);
        if q.available == 0 || now < q.spec.from_ns || now >= q.spec.to_ns {
            return (Spent::default(), false);
        }
        let room = if device.is_some() { DEPTH - in_device.len().min(DEPTH) } else { BATCH };
        if allowance.is_none() {
            ledger.held_back(vm, *now_ns);
            let waits = room > 0 && ledger.until_ns(vm, *now_ns).is_none();
            return (Spent::default(), waits);
        }
        if room == 0 {
            ledger.device(1, vm).blocked(vm);
            return (Spent::default(), false);
        }
        let each = q.spec.len_bytes.max(min_bytes);
        let by_thread = allowance.batch(each, BATCH);
        let below = match device {
            Some(_) => ledger.device(1, vm).allowance(vm, *now_ns),
            None => Allowance::UNLIMITED,
        };
        let most = below.batch(each, by_thread).min(room);
        if below.is_none() {
            ledger.device(1, vm).held_back(vm, *now_ns);
            return (Spent::default(), room > 0);
        }
        let mut spent = Spent::default();
        let begin_ns = *now_ns;
        while q.available > 0
            && (spent.requests as usize) < most
            && spent.bytes < allowance.bytes.min(below.bytes).min(ROUND_BYTES)
        {
            spent.add(q.spec.len_bytes, min_bytes);
            q.available -= 1;
            *now_ns += request_ns + q.spec.len_bytes * byte_ps / 1000;
            let mut done_ns = *now_ns;
            if let Some((op_ns, byte_ps)) = device {
                let cost_ns = op_ns + q.spec.len_bytes * byte_ps / 1000;
                *device_ns = (*device_ns).max(*now_ns) + cost_ns;
                done_ns = *device_ns;
                in_device.push_back(done_ns);
            }
            let lag_ns = next(random, q.spec.lag_ns + 1);
            let back_ns = q.back.back().map_or(0, |&ns| ns).max(done_ns + lag_ns);
            q.back.push_back(back_ns);
        }
        q.bytes += spent.bytes;
        let more = q.available > 0;
        let by_thread = spent.requests as usize == by_thread;
        ledger.charge(vm, spent, more && (device.is_none() || by_thread), begin_ns);
        if device.is_some() {
            ledger.device(1, vm).charge(vm, spent, more, begin_ns);
        }
        (spent, false)
    }
}
