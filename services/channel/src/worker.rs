//! Thread of one member for all commands to its monitor, so that a slow QEMU or guest
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

use crate::registry::PluggedDevice;
use base::event::Event;
use base::peer_fd::PeerFd;
use rustix::event::{PollFd, PollFlags};

use crate::error::{ChannelError, PlugError, QmpError};
use crate::plug::{self, DeviceLocation, DevicePart};
use crate::poll_until::poll_until;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpEvent};

/// Time after which a guest is asked again: Linux's `pciehp` waits 5 s for a change of mind.
const UNPLUG_RETRY: Duration = Duration::from_secs(6);
/// Time after which QEMU is asked again to remove the object behind a device.
const REST_RETRY: Duration = Duration::from_millis(100);
/// Pause after reading from a monitor that sends more than is read at once.
const FLOOD_PAUSE: Duration = Duration::from_millis(10);
/// Stack of the thread: the deepest path parses a line of JSON.
const STACK_LEN_BYTES: usize = 512 << 10;

/// Job of a worker.
#[derive(Debug)]
pub(crate) enum MonitorJob {
    /// Plug the memory of another member.
    PlugMemory {
        /// Index of the member.
        index: usize,
        /// Id of the device.
        id: String,
        /// Memory file of the member, for reading.
        file: Arc<PeerFd>,
        /// Length of the window.
        window_len: u64,
    },
    /// Unplug the device with this id, however long that takes.
    Unplug(DevicePart, String),
}

/// Report of a worker.
#[derive(Debug)]
pub(crate) enum WorkerReport {
    /// The doorbell is plugged, or could not be: then this was the last report.
    Bell(Result<DeviceLocation, PlugError>),
    /// The memory of the member with this index is plugged, or could not be.
    Memory(usize, Result<DeviceLocation, PlugError>),
    /// A device and what was behind it is gone.
    Unplugged(DevicePart),
    /// A device is still there after this number of requests.
    UnplugLate(DevicePart, u32),
    /// The guest was reset or shut down.
    GuestEnded(&'static str),
    /// The monitor is closed: the VM is gone. The last report.
    Gone(QmpError),
}

/// Receiver of reports.
pub(crate) trait ReportSink: Clone + Send + 'static {
    /// Takes a report.
    fn report(&self, report: WorkerReport);
}

/// Parameters with which a worker starts.
#[derive(Debug)]
pub(crate) struct WorkerStart {
    pub qmp: PathBuf,
    pub root_ports: String,
    /// QEMU's end of the doorbell's connection.
    pub connection: OwnedFd,
    pub vectors: u32,
    /// Devices that an earlier daemon has plugged.
    pub leftovers: Vec<PluggedDevice>,
    /// Time limit for unplugging those.
    pub leftover_timeout: Duration,
}

/// Handle of a member's worker. Dropping it stops the thread.
#[derive(Debug)]
pub(crate) struct MonitorWorker {
    jobs: Sender<MonitorJob>,
    wake: Arc<Event>,
    stop: Arc<Event>,
    thread: Option<JoinHandle<()>>,
}

impl MonitorWorker {
    /// Starts the thread.
    pub fn start(start: WorkerStart, reports: impl ReportSink) -> Result<Self, ChannelError> {
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

    /// Makes a worker without a thread, and its queue.
    pub fn new() -> Result<(Self, Receiver<MonitorJob>), ChannelError> {
        let event = || Event::new().map(Arc::new).map_err(ChannelError::io("making an eventfd"));
        let (jobs, queue) = channel();
        Ok((Self { jobs, wake: event()?, stop: event()?, thread: None }, queue))
    }

    /// Sends a job to the thread.
    pub fn send(&self, job: MonitorJob) {
        // A worker that has ended has said so, or will be heard soon.
        let _ = self.jobs.send(job);
        if let Err(error) = self.wake.signal() {
            tracing::error!("cannot wake a member's thread: {error}");
        }
    }
}

impl Drop for MonitorWorker {
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

/// Device that is being unplugged.
#[derive(Debug)]
struct PendingUnplug {
    record: PluggedDevice,
    /// Part to report; none for a device of an earlier daemon.
    part: Option<DevicePart>,
    /// Whether the device is gone, though the object behind it is not.
    is_device_gone: bool,
    asked: u32,
    next: Instant,
}

/// Runs the thread. Returns the last report, unless it was stopped.
fn run<R: ReportSink>(
    start: WorkerStart,
    queue: &Receiver<MonitorJob>,
    wake: &Event,
    stop: &Arc<Event>,
    reports: R,
) -> Option<WorkerReport> {
    let qmp = match Qmp::connect(&start.qmp, COMMAND_TIMEOUT, stop.clone()) {
        Ok(qmp) => qmp,
        Err(error) => return Some(WorkerReport::Bell(Err(error.into()))),
    };
    let WorkerStart { root_ports, connection, vectors, leftovers, leftover_timeout, .. } = start;
    let unplugging = BTreeMap::new();
    let mut running = MonitorSession { qmp, root_ports, vectors, unplugging, reports };
    let plugged = running.unplug_leftovers(leftovers, leftover_timeout, stop).and_then(|()| {
        plug::plug_bell(&mut running.qmp, &running.root_ports, connection.as_fd(), vectors)
    });
    // QEMU has its own copy.
    drop(connection);
    if plugged.is_err() {
        return Some(WorkerReport::Bell(plugged));
    }
    running.reports.report(WorkerReport::Bell(plugged));
    match running.serve(queue, wake, stop) {
        Ok(()) | Err(QmpError::Stopped { .. }) => None,
        Err(error) => Some(WorkerReport::Gone(error)),
    }
}

struct MonitorSession<R> {
    qmp: Qmp,
    root_ports: String,
    vectors: u32,
    /// Devices that are being unplugged, by their ids.
    unplugging: BTreeMap<String, PendingUnplug>,
    reports: R,
}

impl<R: ReportSink> MonitorSession<R> {
    /// Unplugs the devices of an earlier daemon.
    fn unplug_leftovers(
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
            self.step(&[stop], Some(until))?;
        }
        Ok(())
    }

    /// Does jobs until it is stopped or the monitor fails.
    fn serve(
        &mut self,
        queue: &Receiver<MonitorJob>,
        wake: &Event,
        stop: &Event,
    ) -> Result<(), QmpError> {
        loop {
            wake.drain();
            loop {
                match queue.try_recv() {
                    Ok(job) => self.work(job)?,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
            self.step(&[wake, stop], None)?;
        }
    }

    fn work(&mut self, job: MonitorJob) -> Result<(), QmpError> {
        match job {
            MonitorJob::PlugMemory { index, id, file, window_len } => {
                let (qmp, ports) = (&mut self.qmp, &self.root_ports);
                let plugged = plug::plug_memory(qmp, ports, &id, file.as_fd(), window_len);
                match plugged {
                    Err(PlugError::Qmp(error)) if error.is_final() => return Err(error),
                    other => self.reports.report(WorkerReport::Memory(index, other)),
                }
            }
            MonitorJob::Unplug(part, id) => self.unplug(part.record(&id, None), Some(part), false),
        }
        Ok(())
    }

    fn unplug(&mut self, record: PluggedDevice, part: Option<DevicePart>, is_device_gone: bool) {
        let id = record.device.clone();
        let next = Instant::now();
        self.unplugging.entry(id).or_insert(PendingUnplug {
            record,
            part,
            is_device_gone,
            asked: 0,
            next,
        });
    }

    /// Does one thing that is due, or waits for the monitor, one of `others` or the deadline.
    fn step(&mut self, others: &[&Event], until: Option<Instant>) -> Result<(), QmpError> {
        if self.take_events()? || self.retry_unplug()? {
            return Ok(());
        }
        let due = self.unplugging.values().map(|unplugging| unplugging.next).min();
        let until = due.into_iter().chain(until).min();
        let mut fds = vec![PollFd::new(&self.qmp, PollFlags::IN)];
        fds.extend(others.iter().map(|event| PollFd::new(*event, PollFlags::IN)));
        let command = "waiting for events";
        poll_until(&mut fds, until).map_err(|source| QmpError::Io { command, source })?;
        // The stop is always the last; it stays rung.
        if fds.last().is_some_and(|stop| !stop.revents().is_empty()) && fds.len() > 1 {
            return Err(QmpError::Stopped { command });
        }
        if self.qmp.read_available()? {
            // It has a thread of ours, not a CPU.
            let mut stop: Vec<_> = others.iter().map(|e| PollFd::new(*e, PollFlags::IN)).collect();
            let until = Instant::now() + FLOOD_PAUSE;
            poll_until(&mut stop, Some(until))
                .map_err(|source| QmpError::Io { command, source })?;
        }
        Ok(())
    }

    /// Handles the monitor's events; false when there was none.
    fn take_events(&mut self) -> Result<bool, QmpError> {
        let mut any = false;
        while let Some(event) = self.qmp.take_event() {
            any = true;
            match event {
                QmpEvent::GuestEnded(how) => self.reports.report(WorkerReport::GuestEnded(how)),
                QmpEvent::DeviceDeleted(id) => {
                    self.occupy_numbers(&id)?;
                    if let Some(unplugging) = self.unplugging.get_mut(&id) {
                        unplugging.is_device_gone = true;
                        unplugging.next = Instant::now();
                    } else if let Some(part) = DevicePart::of(&id) {
                        // The guest let it go without being asked.
                        self.unplug(part.record(&id, None), Some(part), true);
                    }
                }
            }
        }
        Ok(any)
    }

    /// Occupies the descriptor numbers of a device that is gone. If it was the doorbell, the
    /// numbers must not be used again.
    fn occupy_numbers(&mut self, id: &str) -> Result<(), QmpError> {
        if DevicePart::of(id) == Some(DevicePart::Bell) && plug::is_emulated(&mut self.qmp)? {
            plug::occupy_numbers(&mut self.qmp, self.vectors)?;
        }
        Ok(())
    }

    /// Asks again for each device that is due; false when there was none.
    fn retry_unplug(&mut self) -> Result<bool, QmpError> {
        let now = Instant::now();
        let due = self.unplugging.iter().find(|(_, unplugging)| unplugging.next <= now);
        let Some(id) = due.map(|(id, _)| id.clone()) else { return Ok(false) };
        let Some(unplugging) = self.unplugging.get_mut(&id) else { return Ok(false) };
        if !unplugging.is_device_gone {
            unplugging.is_device_gone = plug::ask_to_unplug(&mut self.qmp, &id)?;
            unplugging.asked += 1;
            unplugging.next = now + UNPLUG_RETRY;
            if let Some(part) = unplugging.part.filter(|_| unplugging.asked > 1) {
                self.reports.report(WorkerReport::UnplugLate(part, unplugging.asked));
            }
        }
        if unplugging.is_device_gone {
            unplugging.next = now + REST_RETRY;
            if plug::remove_rest(&mut self.qmp, &unplugging.record)? {
                let part = unplugging.part;
                self.unplugging.remove(&id);
                if let Some(part) = part {
                    self.reports.report(WorkerReport::Unplugged(part));
                }
            }
        }
        Ok(true)
    }
}
