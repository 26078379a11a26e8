//! A bad network between a bridge and a client's namespace: frames are lost, doubled and overtaken,
//! as a seed says.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use base::io::{IoSlice, Wire};
use base::random::{Random, Seeded};
use lab::NetLab;
use net::tap::{Tap, TapConfig};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Faults of frames, in thousandths.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    pub lost: u64,
    pub doubled: u64,
    /// Held back until so many others have passed: 1 to 8.
    pub overtaken: u64,
}

/// Counts of frames' fates.
#[derive(Debug, Default)]
pub struct Tally {
    pub frames: AtomicU64,
    pub lost: AtomicU64,
    pub doubled: AtomicU64,
    pub overtaken: AtomicU64,
}

/// Runs until it is dropped.
pub struct Relay {
    stop: Arc<AtomicBool>,
    pub tally: Arc<Tally>,
    thread: Option<JoinHandle<()>>,
}

/// One way through the relay.
struct Way {
    held: Vec<(u64, Vec<u8>)>,
    passed: u64,
}

impl Relay {
    /// Joins `bridge` of one namespace with a new interface `r1` of another.
    pub fn start(near: &NetLab, bridge: &str, far: &NetLab, faults: Faults, seed: u64) -> Self {
        let open = |name: &str, bridge: Option<&str>| {
            Tap::open(&TapConfig {
                name: name.into(),
                bridge: bridge.map(str::to_owned),
                ..TapConfig::default()
            })
            .unwrap()
        };
        let a = near.inside(|| open("r0", Some(bridge))).unwrap();
        let b = far.inside(|| open("r1", None)).unwrap();
        let (stop, tally) = (Arc::<AtomicBool>::default(), Arc::<Tally>::default());
        let thread = {
            let (stop, tally) = (Arc::clone(&stop), Arc::clone(&tally));
            std::thread::spawn(move || run([a, b], faults, Seeded::new(seed), &stop, &tally))
        };
        Self { stop, tally, thread: Some(thread) }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

fn run(mut taps: [Tap; 2], faults: Faults, mut random: Seeded, stop: &AtomicBool, tally: &Tally) {
    let mut ways = [(); 2].map(|()| Way { held: Vec::new(), passed: 0 });
    taps.iter_mut().for_each(|tap| tap.refill().unwrap());
    while !stop.load(Ordering::Relaxed) {
        wait(&taps).unwrap();
        for from in 0..2 {
            while let Some(frame) = taps[from].receive().map(<[u8]>::to_vec) {
                taps[from].release();
                ways[from].pass(frame, &mut taps[1 - from], faults, &mut random, tally);
            }
            // Nothing overtakes any more: what is held goes.
            ways[from].flush(&mut taps[1 - from]);
            taps[from].refill().unwrap();
        }
    }
}

fn wait(taps: &[Tap; 2]) -> io::Result<()> {
    let fds = [0, 1].map(|at: usize| {
        let fd = taps[at].event_fd().unwrap();
        // SAFETY: the TAP outlives this call.
        unsafe { BorrowedFd::borrow_raw(fd) }
    });
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let timeout = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    poll(&mut polled, Some(&timeout))?;
    Ok(())
}

impl Way {
    fn pass(
        &mut self,
        frame: Vec<u8>,
        to: &mut Tap,
        faults: Faults,
        random: &mut Seeded,
        tally: &Tally,
    ) {
        tally.frames.fetch_add(1, Ordering::Relaxed);
        let mut happens = |thousandths: u64, count: &AtomicU64| {
            let does = random.next_u64() % 1000 < thousandths;
            count.fetch_add(u64::from(does), Ordering::Relaxed);
            does
        };
        if happens(faults.lost, &tally.lost) {
            return;
        }
        if happens(faults.overtaken, &tally.overtaken) {
            let until = self.passed + 1 + random.next_u64() % 8;
            self.held.push((until, frame));
            return;
        }
        let times = if happens(faults.doubled, &tally.doubled) { 2 } else { 1 };
        for _ in 0..times {
            send(to, &frame);
        }
        self.passed += 1;
        let passed = self.passed;
        for (_, frame) in self.held.extract_if(.., |(until, _)| *until <= passed) {
            send(to, &frame);
        }
    }

    fn flush(&mut self, to: &mut Tap) {
        self.held.drain(..).for_each(|(_, frame)| send(to, &frame));
    }
}

fn send(to: &mut Tap, frame: &[u8]) {
    let buffer = IoSlice { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() };
    // SAFETY: flushed before the frame goes.
    unsafe { to.send(&[buffer]) }.unwrap();
    // A frame that the kernel refuses is one more that is lost.
    let _ = to.flush();
}
