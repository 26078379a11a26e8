//! One thread for each member: everything that is asked of its monitor, so that a slow QEMU or guest
//! keeps nobody else.
//!
//! It connects, unplugs what an earlier daemon left, plugs the doorbell, and then does its jobs one
//! after the other. Unplugging takes as long as the guest likes: it is asked for again and again,
//! between the other jobs. When the monitor is closed, the VM is gone and the thread ends.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::event::Event;
use base::peer_fd::PeerFd;
use registry::PluggedDevice;
use rustix::event::{PollFd, PollFlags};

use crate::error::{ChannelError, PlugError, QmpError};
use crate::plug::{self, Part, Place};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpEvent};
use crate::wait::wait;

/// After this time a guest is asked again: Linux's `pciehp` waits 5 s for a change of mind.
const UNPLUG_RETRY: Duration = Duration::from_secs(6);
/// After this time QEMU is asked again to remove what was behind a device.
const REST_RETRY: Duration = Duration::from_millis(100);
/// Pause after a look at a monitor that says more than is read at once.
const FLOOD_PAUSE: Duration = Duration::from_millis(10);
/// Stack of the thread: the deepest path parses a line of JSON.
const STACK_LEN_BYTES: usize = 512 << 10;

/// What a worker is to do.
#[derive(Debug)]
pub(crate) enum Job {
    /// Plug the memory of another member.
    PlugMemory {
        /// Its index.
        index: usize,
        /// The device's id.
        id: String,
        /// Its memory, for reading.
        file: Arc<PeerFd>,
        /// Bytes of it.
        window_len: u64,
    },
    /// Unplug the device with this id, however long that takes.
    Unplug(Part, String),
}

/// What a worker says.
#[derive(Debug)]
pub(crate) enum Report {
    /// The doorbell is plugged, or could not be: then this was the last report.
    Bell(Result<Place, PlugError>),
    /// The memory of the member with this index is plugged, or could not be.
    Memory(usize, Result<Place, PlugError>),
    /// A device and what was behind it is gone.
    Unplugged(Part),
    /// A device was asked for so many times and is still there.
    UnplugLate(Part, u32),
    /// The guest was reset or shut down.
    GuestEnded(&'static str),
    /// The monitor is closed: the VM is gone. The last report.
    Gone(QmpError),
}

/// Where reports go.
pub(crate) trait Reports: Clone + Send + 'static {
    /// Takes one.
    fn report(&self, report: Report);
}

/// What a worker needs to begin.
#[derive(Debug)]
pub(crate) struct Start {
    pub qmp: PathBuf,
    pub root_ports: String,
    /// QEMU's end of the doorbell's connection.
    pub connection: OwnedFd,
    pub vectors: u32,
    /// What an earlier daemon has plugged.
    pub leftovers: Vec<PluggedDevice>,
    /// Time for those to be unplugged.
    pub leftover_timeout: Duration,
}

/// A member's worker, as its owner has it. Dropping it stops the thread.
#[derive(Debug)]
pub(crate) struct Worker {
    jobs: Sender<Job>,
    wake: Arc<Event>,
    stop: Arc<Event>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts the thread.
    pub fn start(start: Start, reports: impl Reports) -> Result<Self, ChannelError> {
        let (mut worker, queue) = Self::new()?;
        let (wake, stop) = (worker.wake.clone(), worker.stop.clone());
        let run = move || {
            let last_reports = reports.clone();
            if let Some(last) = run(start, &queue, &wake, &stop, reports) {
                last_reports.report(last);
            }
        };
        let thread = std::thread::Builder::new()
            .name("channel-qmp".to_owned())
            .stack_size(STACK_LEN_BYTES)
            .spawn(run)
            .map_err(ChannelError::io("starting a member's thread"))?;
        worker.thread = Some(thread);
        Ok(worker)
    }

    /// One without a thread, and its queue.
    pub fn new() -> Result<(Self, Receiver<Job>), ChannelError> {
        let event = || Event::new().map(Arc::new).map_err(ChannelError::io("making an eventfd"));
        let (jobs, queue) = channel();
        Ok((Self { jobs, wake: event()?, stop: event()?, thread: None }, queue))
    }

    /// Gives it a job.
    pub fn send(&self, job: Job) {
        // A worker that has ended has said so, or will be heard soon.
        let _ = self.jobs.send(job);
        if let Err(error) = self.wake.signal() {
            tracing::error!("cannot wake a member's thread: {error}");
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Err(error) = self.stop.signal() {
            tracing::error!("cannot stop a member's thread: {error}");
            return;
        }
        // It waits for nothing but its descriptors, the stop among them.
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a member's thread panicked");
        }
    }
}

/// A device that is being unplugged.
#[derive(Debug)]
struct Unplugging {
    record: PluggedDevice,
    /// Who is told; nobody for what an earlier daemon plugged.
    part: Option<Part>,
    /// The device is gone, what was behind it not yet.
    device_gone: bool,
    asked: u32,
    next: Instant,
}

/// All of the thread's life; the last report, unless it was stopped.
fn run<R: Reports>(
    start: Start,
    queue: &Receiver<Job>,
    wake: &Event,
    stop: &Arc<Event>,
    reports: R,
) -> Option<Report> {
    let qmp = match Qmp::connect(&start.qmp, COMMAND_TIMEOUT, stop.clone()) {
        Ok(qmp) => qmp,
        Err(error) => return Some(Report::Bell(Err(error.into()))),
    };
    let Start { root_ports, connection, vectors, leftovers, leftover_timeout, .. } = start;
    let unplugging = BTreeMap::new();
    let mut running = Running { qmp, root_ports, vectors, unplugging, reports };
    let plugged = running.clean(leftovers, leftover_timeout, stop).and_then(|()| {
        plug::plug_bell(&mut running.qmp, &running.root_ports, connection.as_fd(), vectors)
    });
    // QEMU has its own copy.
    drop(connection);
    if plugged.is_err() {
        return Some(Report::Bell(plugged));
    }
    running.reports.report(Report::Bell(plugged));
    match running.serve(queue, wake, stop) {
        Ok(()) | Err(QmpError::Stopped { .. }) => None,
        Err(error) => Some(Report::Gone(error)),
    }
}

struct Running<R> {
    qmp: Qmp,
    root_ports: String,
    vectors: u32,
    /// By the device's id.
    unplugging: BTreeMap<String, Unplugging>,
    reports: R,
}

impl<R: Reports> Running<R> {
    /// Unplugs what an earlier daemon left.
    fn clean(
        &mut self,
        recorded: Vec<PluggedDevice>,
        timeout: Duration,
        stop: &Event,
    ) -> Result<(), PlugError> {
        for record in plug::leftovers(&mut self.qmp)?.into_iter().chain(recorded) {
            self.unplug(record, None, false);
        }
        let until = Instant::now() + timeout;
        while !self.unplugging.is_empty() {
            if Instant::now() >= until {
                let devices: Vec<&str> = self.unplugging.keys().map(String::as_str).collect();
                let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
                return Err(PlugError::Leftover { devices: devices.join(", "), timeout_ms });
            }
            self.turn(&[stop], Some(until))?;
        }
        Ok(())
    }

    /// Does jobs until it is stopped or the monitor fails.
    fn serve(&mut self, queue: &Receiver<Job>, wake: &Event, stop: &Event) -> Result<(), QmpError> {
        loop {
            wake.drain();
            loop {
                match queue.try_recv() {
                    Ok(job) => self.work(job)?,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
            self.turn(&[wake, stop], None)?;
        }
    }

    fn work(&mut self, job: Job) -> Result<(), QmpError> {
        match job {
            Job::PlugMemory { index, id, file, window_len } => {
                let (qmp, ports) = (&mut self.qmp, &self.root_ports);
                let plugged = plug::plug_memory(qmp, ports, &id, file.as_fd(), window_len);
                match plugged {
                    Err(PlugError::Qmp(error)) if error.is_final() => return Err(error),
                    other => self.reports.report(Report::Memory(index, other)),
                }
            }
            Job::Unplug(part, id) => self.unplug(part.record(&id, None), Some(part), false),
        }
        Ok(())
    }

    fn unplug(&mut self, record: PluggedDevice, part: Option<Part>, device_gone: bool) {
        let id = record.device.clone();
        let next = Instant::now();
        self.unplugging.entry(id).or_insert(Unplugging {
            record,
            part,
            device_gone,
            asked: 0,
            next,
        });
    }

    /// Does one thing that is due, or waits for the monitor, one of `others` or the moment.
    fn turn(&mut self, others: &[&Event], until: Option<Instant>) -> Result<(), QmpError> {
        if self.take_events()? || self.ask_again()? {
            return Ok(());
        }
        let due = self.unplugging.values().map(|unplugging| unplugging.next).min();
        let until = due.into_iter().chain(until).min();
        let mut fds = vec![PollFd::new(&self.qmp, PollFlags::IN)];
        fds.extend(others.iter().map(|event| PollFd::new(*event, PollFlags::IN)));
        let command = "waiting for events";
        wait(&mut fds, until).map_err(|source| QmpError::Io { command, source })?;
        // The stop is always the last; it stays rung.
        if fds.last().is_some_and(|stop| !stop.revents().is_empty()) && fds.len() > 1 {
            return Err(QmpError::Stopped { command });
        }
        if self.qmp.look()? {
            // It has a thread of ours, not a CPU.
            let mut stop: Vec<_> = others.iter().map(|e| PollFd::new(*e, PollFlags::IN)).collect();
            let until = Instant::now() + FLOOD_PAUSE;
            wait(&mut stop, Some(until)).map_err(|source| QmpError::Io { command, source })?;
        }
        Ok(())
    }

    /// Hears what the monitor has said by itself; false when that was nothing.
    fn take_events(&mut self) -> Result<bool, QmpError> {
        let mut any = false;
        while let Some(event) = self.qmp.take_event() {
            any = true;
            match event {
                QmpEvent::GuestEnded(how) => self.reports.report(Report::GuestEnded(how)),
                QmpEvent::DeviceDeleted(id) => {
                    self.occupy_numbers(&id)?;
                    if let Some(unplugging) = self.unplugging.get_mut(&id) {
                        unplugging.device_gone = true;
                        unplugging.next = Instant::now();
                    } else if let Some(part) = Part::of(&id) {
                        // The guest let it go without being asked.
                        self.unplug(part.record(&id, None), Some(part), true);
                    }
                }
            }
        }
        Ok(any)
    }

    /// The device with this id has closed its descriptors: if it was the doorbell, their numbers must
    /// not be used again.
    fn occupy_numbers(&mut self, id: &str) -> Result<(), QmpError> {
        if Part::of(id) == Some(Part::Bell) && plug::is_emulated(&mut self.qmp)? {
            plug::occupy_numbers(&mut self.qmp, self.vectors)?;
        }
        Ok(())
    }

    /// Asks again for each device that it is time for; false when there was none.
    fn ask_again(&mut self) -> Result<bool, QmpError> {
        let now = Instant::now();
        let due = self.unplugging.iter().find(|(_, unplugging)| unplugging.next <= now);
        let Some(id) = due.map(|(id, _)| id.clone()) else { return Ok(false) };
        let Some(unplugging) = self.unplugging.get_mut(&id) else { return Ok(false) };
        if !unplugging.device_gone {
            unplugging.device_gone = plug::ask_to_unplug(&mut self.qmp, &id)?;
            unplugging.asked += 1;
            unplugging.next = now + UNPLUG_RETRY;
            if let Some(part) = unplugging.part.filter(|_| unplugging.asked > 1) {
                self.reports.report(Report::UnplugLate(part, unplugging.asked));
            }
        }
        if unplugging.device_gone {
            unplugging.next = now + REST_RETRY;
            if plug::remove_rest(&mut self.qmp, &unplugging.record)? {
                let part = unplugging.part;
                self.unplugging.remove(&id);
                if let Some(part) = part {
                    self.reports.report(Report::Unplugged(part));
                }
            }
        }
        Ok(true)
    }
}
