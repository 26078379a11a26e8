//! Workers that change their sidecore, with real eventfds.

use std::sync::atomic::AtomicU64;

use super::*;
use crate::{Group, SidecoreError};

/// Moves of the test that hammers.
const MOVES: usize = 10_000;

/// Seen by all who look after a [`Hammered`].
#[derive(Default)]
struct Seen {
    inside: AtomicBool,
    /// Kicks that were waited for.
    answered: AtomicU64,
    /// Kicks that nobody waits for.
    counted: AtomicU64,
}

/// Has one eventfd whose every kick is waited for, and one that is rung all the time. Finds work by
/// its descriptors only: its `arm` does not look.
struct Hammered {
    asked: Event,
    flood: Event,
    armed: bool,
    seen: Arc<Seen>,
    answer: SyncSender<()>,
}

impl Worker for Hammered {
    fn poll(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> usize {
        assert!(!self.seen.inside.swap(true, Ordering::SeqCst), "two threads have it");
        assert!(!self.armed, "polled while armed");
        let mut done = 0;
        if self.asked.drain() {
            done += 1;
            self.seen.answered.fetch_add(1, Ordering::SeqCst);
            let _ = self.answer.try_send(());
        }
        let mut value = [0; 8];
        if rustix::io::read(&self.flood, &mut value) == Ok(8) {
            done += 1;
            self.seen.counted.fetch_add(u64::from_ne_bytes(value), Ordering::SeqCst);
        }
        self.seen.inside.store(false, Ordering::SeqCst);
        done
    }

    fn arm(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> Arm {
        self.armed = true;
        Arm::Idle
    }

    fn disarm(&mut self) {
        self.armed = false;
    }
}

/// Rings and waits for the answer, or rings all the time, until told to stop; how often it rang.
fn kicker(
    bell: Event,
    stop: Arc<AtomicBool>,
    answers: Option<Receiver<()>>,
) -> std::thread::JoinHandle<u64> {
    std::thread::spawn(move || {
        let mut rung = 0;
        while !stop.load(Ordering::SeqCst) {
            bell.signal().unwrap();
            rung += 1;
            match &answers {
                Some(answers) => {
                    assert!(answers.recv_timeout(PATIENCE).is_ok(), "kick {rung} is lost");
                }
                None => std::thread::yield_now(),
            }
        }
        rung
    })
}

#[test]
fn no_kick_is_lost_while_a_worker_moves_10_000_times() {
    let cores = [sidecore(0), sidecore(0)];
    let (asked, flood) = (Event::new().unwrap(), Event::new().unwrap());
    let bells = (asked.try_clone().unwrap(), flood.try_clone().unwrap());
    let fds = [asked.as_raw_fd(), flood.as_raw_fd()];
    let (seen, (answer, answers)) = (Arc::new(Seen::default()), sync_channel(1));
    let worker = Hammered { asked, flood, armed: false, seen: Arc::clone(&seen), answer };
    let worker = cores[0].add(worker).unwrap();
    worker.call(move |_, w| fds.into_iter().try_for_each(|fd| w.watch(fd))).unwrap().unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let asking = kicker(bells.0, Arc::clone(&stop), Some(answers));
    let flooding = kicker(bells.1, Arc::clone(&stop), None);
    let caller = {
        let (worker, stop) = (worker.clone(), Arc::clone(&stop));
        std::thread::spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                worker.call(|w, _| assert!(!w.armed)).unwrap();
            }
        })
    };
    for i in 1..=MOVES {
        worker.move_to(&cores[i % 2]).unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    caller.join().unwrap();
    let (asked, flooded) = (asking.join().unwrap(), flooding.join().unwrap());
    assert!(asked > 0 && flooded > 0);
    assert_eq!(seen.answered.load(Ordering::SeqCst), asked);
    // The last ones may still be on their way; a lost wake-up never ends this.
    while seen.counted.load(Ordering::SeqCst) < flooded {
        std::thread::yield_now();
    }
    assert_eq!(seen.counted.load(Ordering::SeqCst), flooded);
    assert_eq!(worker.stats().moves.get(), MOVES as u64);
    let workers: Vec<u64> = cores.iter().map(|c| c.stats().workers.get()).collect();
    assert_eq!((workers, worker.core().is(&cores[0])), (vec![1, 0], true));
    cores.iter().for_each(Sidecore::shutdown);
}

#[test]
fn a_moved_worker_is_woken_called_and_removed_where_it_is() {
    let (a, b) = (sidecore(0), sidecore(0));
    let (worker, bell, tells) = counting(false);
    let fd = worker.event.as_raw_fd();
    let worker = a.add(worker).unwrap();
    worker.call(move |_, watcher| watcher.watch(fd)).unwrap().unwrap();
    worker.move_to(&b).unwrap();
    worker.move_to(&b).unwrap();
    assert_eq!(worker.stats().moves.get(), 1, "to where it is: no move");
    a.shutdown();
    sleeps_again(&worker, &tells);
    bell.signal().unwrap();
    wait_for(&tells, &Told::Fired(fd));
    wait_for(&tells, &Told::Polled);
    let twin = worker.clone();
    assert_eq!(twin.call(|w, _| w.rung).unwrap(), 1);
    assert_eq!(twin.remove().unwrap().rung, 1);
    assert!(worker.remove().is_err());
    b.shutdown();
}

#[test]
fn what_a_worker_no_longer_watches_does_not_move_along() {
    let (a, b) = (sidecore(0), sidecore(0));
    let (worker, bell, tells) = counting(false);
    let fd = worker.event.as_raw_fd();
    let worker = a.add(worker).unwrap();
    worker.call(move |_, w| w.watch(fd).and_then(|()| w.watch(fd))).unwrap().unwrap();
    worker.call(move |_, watcher| watcher.unwatch(fd)).unwrap();
    worker.move_to(&b).unwrap();
    bell.signal().unwrap();
    while let Ok(told) = tells.try_recv() {
        assert_ne!(told, Told::Fired(fd));
    }
    b.shutdown();
    a.shutdown();
}

#[test]
fn a_group_stays_together() {
    let cores = [sidecore(0), sidecore(0), sidecore(0)];
    let group = Group::new(&cores[0]);
    let first = group.add(counting(false).0).unwrap();
    let (alone, _bell, _tells) = counting(false);
    let alone = cores[0].add(alone).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let mover = {
        let (stop, first, cores) = (Arc::clone(&stop), first.clone(), cores.clone());
        std::thread::spawn(move || {
            let mut at = 0;
            while !stop.load(Ordering::SeqCst) {
                at += 1;
                first.move_to(&cores[at % 3]).unwrap();
            }
        })
    };
    // Added while the others move.
    let rest: Vec<_> = (0..100).map(|_| group.add(counting(false).0).unwrap()).collect();
    stop.store(true, Ordering::SeqCst);
    mover.join().unwrap();
    first.move_to(&cores[2]).unwrap();
    assert_eq!(cores[2].stats().workers.get(), 101);
    assert_eq!(cores[0].stats().workers.get(), 1);
    assert!(rest.iter().all(|w| w.core().is(&cores[2])));
    assert!(alone.core().is(&cores[0]));
    cores.iter().for_each(Sidecore::shutdown);
}

/// Must stay.
struct Staying;

impl Worker for Staying {
    fn is_pinned(&self) -> bool {
        true
    }
    fn poll(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> usize {
        0
    }
    fn arm(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> Arm {
        Arm::Idle
    }
    fn disarm(&mut self) {}
}

#[test]
fn a_pinned_worker_and_one_without_a_target_stay() {
    let (a, b) = (sidecore(0), sidecore(0));
    let pinned = a.add(Staying).unwrap();
    assert!(matches!(pinned.move_to(&b), Err(SidecoreError::Pinned(0))));
    b.shutdown();
    let (worker, bell, tells) = counting(false);
    let fd = worker.event.as_raw_fd();
    let worker = a.add(worker).unwrap();
    worker.call(move |_, watcher| watcher.watch(fd)).unwrap().unwrap();
    assert!(matches!(worker.move_to(&b), Err(SidecoreError::Gone(0))));
    sleeps_again(&worker, &tells);
    bell.signal().unwrap();
    wait_for(&tells, &Told::Fired(fd));
    wait_for(&tells, &Told::Polled);
    assert_eq!(worker.call(|w, _| w.rung).unwrap(), 1);
    a.shutdown();
}

/// Takes a while, in virtual time, whenever it is polled.
struct Taking(base::clock::ManualClock, u64);

impl Worker for Taking {
    fn poll(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> usize {
        self.0.advance_ns(self.1);
        1
    }
    fn arm(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> Arm {
        Arm::Idle
    }
    fn disarm(&mut self) {}
}

#[test]
fn each_worker_is_told_its_own_time() {
    let clock = base::clock::ManualClock::default();
    let config = SidecoreConfig { yield_when_idle: true, ..SidecoreConfig::default() };
    let core = Sidecore::spawn(config, Arc::new(clock.clone())).unwrap();
    let short = core.add(Taking(clock.clone(), 100)).unwrap();
    let long = core.add(Taking(clock.clone(), 300)).unwrap();
    let read = || {
        let long = long.stats().busy_ns.get();
        (short.stats().busy_ns.get(), long, core.stats().busy_ns.get())
    };
    let begin = core.stats().rounds.get();
    let before = read();
    while core.stats().rounds.get() < begin + 200_000 {
        std::thread::yield_now();
    }
    let after = read();
    core.shutdown();
    let (short, long) = (after.0 - before.0, after.1 - before.1);
    // The numbers are read while they change, and each sample stands for up to 47 rounds.
    let share = long as f64 / (short + long) as f64;
    assert!((0.73..0.77).contains(&share), "{short} and {long}");
    let sampled = (short + long) as f64 / (after.2 - before.2) as f64;
    assert!((0.9..1.1).contains(&sampled), "{sampled}");
}

/// Charges its VM for a request whenever it may.
struct Charged(crate::VmId, SyncSender<Told>);

impl Worker for Charged {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        let allowance = ledger.allowance(self.0, now_ns);
        if allowance.is_none() {
            ledger.held_back(self.0, now_ns);
            let _ = self.1.try_send(Told::Polled);
            return 0;
        }
        ledger.charge(self.0, crate::Spent { bytes: 3000, requests: 1 }, true, now_ns);
        1
    }
    fn arm(&mut self, _now_ns: u64, _ledger: &mut Ledger) -> Arm {
        Arm::Idle
    }
    fn disarm(&mut self) {}
}

#[test]
fn who_is_at_its_ceiling_still_is_after_a_move() {
    let clock = base::clock::ManualClock::default();
    clock.advance_ns(5_000_000_000);
    let core = || Sidecore::spawn(SidecoreConfig::default(), Arc::new(clock.clone())).unwrap();
    let cores = [core(), core()];
    let settings = crate::Settings {
        ceiling_bytes_per_s: 100_000,
        ceiling_burst_ms: 100,
        ..crate::Settings::default()
    };
    let account = crate::Accounts::default().open("vm", settings);
    cores.iter().for_each(|core| core.enrol(Arc::clone(&account)).unwrap());
    let (told, tells) = sync_channel(1024);
    let worker = cores[0].add(Charged(account.id(), told)).unwrap();
    wait_for(&tells, &Told::Polled);
    // A debt of 2,000 bytes goes with it, and a wait of 10 ms does not stay behind.
    clock.advance_ns(10_000_000);
    worker.move_to(&cores[1]).unwrap();
    let stats = &account.stats;
    assert_eq!(stats.charged_requests.load(Ordering::Relaxed), 4);
    assert_eq!(stats.held_by_ceiling_ns.load(Ordering::Relaxed), 10_000_000);
    while tells.try_recv().is_ok() {}
    worker.call(|_, _| ()).unwrap();
    wait_for(&tells, &Told::Polled);
    worker.remove().unwrap();
    assert_eq!(stats.charged_requests.load(Ordering::Relaxed), 4);
    cores.iter().for_each(Sidecore::shutdown);
}
