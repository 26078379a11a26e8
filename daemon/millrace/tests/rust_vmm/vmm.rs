//! One device of a VMM: the front end of crate `vhost`, driven in a VMM's order.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use queue::Layout;
use queue::dirty::LOG_PAGE_BYTES;
use queue::testing::{GuestRam, ModelDriver, ModelOptions};
use rustix::fs::{MemfdFlags, SealFlags};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{
    Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandlerMut,
};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::order::{Base, Halt, Order, RingStep, Step};

/// After this a test has failed; nothing waits for it in the good case.
pub const LIMIT: Duration = Duration::from_secs(30);

const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;
const IN_ORDER: u64 = 1 << 35;
const LOG_ALL: u64 = VhostUserVirtioFeatures::LOG_ALL.bits();
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

const RAM_BYTES: usize = 16 << 20;
const QUEUE_SIZE: u16 = 16;
/// Length of the config space that Cloud Hypervisor and Firecracker read of a disk.
pub const CONFIG_BYTES: u32 = 60;

/// Waits until a descriptor is readable.
pub fn wait_readable(fd: RawFd, what: &str) {
    let epoll = Epoll::new().unwrap();
    epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, 0)).unwrap();
    let ready = epoll.wait(LIMIT.as_millis() as i32, &mut [EpollEvent::default()]).unwrap();
    assert_eq!(ready, 1, "waited in vain: {what}");
}

/// Ends a connection when it is dropped, or when an answer does not come: the front end itself
/// waits for ever.
struct Watch {
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    fn new(socket: &UnixStream) -> Self {
        let socket = socket.try_clone().unwrap();
        let (alive, ended) = channel::<()>();
        let thread = std::thread::spawn(move || {
            if ended.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                println!("no answer for {LIMIT:?}: the connection is cut");
            }
            // A close alone ends nothing while another test's child has a copy, until its exec.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        });
        Self { alive: Some(alive), thread: Some(thread) }
    }
}

impl Drop for Watch {
    /// The socket is closed afterwards.
    fn drop(&mut self) {
        self.alive = None;
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// A queue's driver with the doorbells of the crate.
pub struct Ring {
    pub driver: ModelDriver,
    kick: EventFd,
    call: EventFd,
    /// Answer of the last `GET_VRING_BASE`.
    base: u16,
}

impl Ring {
    fn new(ram: &Arc<GuestRam>, features: u64) -> Self {
        let options = ModelOptions {
            event_idx: features & EVENT_IDX != 0,
            in_order: features & IN_ORDER != 0,
            ..ModelOptions::default()
        };
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        let driver = ModelDriver::in_ram(Arc::clone(ram), Layout::Split, QUEUE_SIZE, options);
        Self { driver, kick: event(), call: event(), base: 0 }
    }

    pub fn kick(&mut self) {
        if self.driver.kick_needed() {
            self.kick.write(1).unwrap();
        }
    }

    /// The id of the next used chain.
    pub fn wait_used(&mut self) -> u16 {
        loop {
            if let Some((id, _)) = self.driver.used() {
                return id;
            }
            wait_readable(self.call.as_raw_fd(), "nothing used");
            self.call.read().unwrap();
        }
    }

    /// How many chains the device has used, in total.
    fn used_idx(&self) -> u16 {
        self.driver.ram().load_u16(self.driver.setup().addrs.device + 2)
    }

    /// The page that the device writes of the ring itself.
    fn used_page(&self) -> u64 {
        self.driver.setup().addrs.device / LOG_PAGE_BYTES
    }
}

/// Messages that came on the back-end channel.
#[derive(Default)]
pub struct Heard {
    pub config_changes: u32,
}

impl VhostUserFrontendReqHandlerMut for Heard {
    fn handle_config_change(&mut self) -> HandlerResult<u64> {
        self.config_changes += 1;
        Ok(0)
    }
}

/// How much of the guest's memory the back end knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    FirstHalf,
    Both,
}

/// The VMM's end of the back-end channel, and what came on it.
type Channel = (FrontendReqHandler<Mutex<Heard>>, Arc<Mutex<Heard>>);

/// One device of a VM. Its VMM dials `path`, or listens there.
pub struct Vmm {
    pub order: &'static Order,
    path: PathBuf,
    listener: Option<UnixListener>,
    front: Option<(Frontend, Watch)>,
    pub ram: Arc<GuestRam>,
    pub rings: Vec<Ring>,
    device_features: u64,
    features: u64,
    protocols: VhostUserProtocolFeatures,
    inflight: Option<(VhostUserInflight, File)>,
    channel: Option<Channel>,
    log: Option<File>,
    memory: Memory,
    reconnected: bool,
}

impl Vmm {
    /// A device with so many queues, not connected. `device_features`: what its driver takes.
    pub fn new(order: &'static Order, path: &Path, queues: usize, device_features: u64) -> Self {
        let ram = GuestRam::new(RAM_BYTES);
        // Made anew when the features are known.
        let rings = (0..queues).map(|_| Ring::new(&ram, VERSION_1)).collect();
        Self {
            order,
            path: path.to_owned(),
            listener: order.listens.then(|| UnixListener::bind(path).unwrap()),
            front: None,
            ram,
            rings,
            device_features,
            features: 0,
            protocols: VhostUserProtocolFeatures::empty(),
            inflight: None,
            channel: None,
            log: None,
            memory: Memory::FirstHalf,
            reconnected: false,
        }
    }

    pub fn front(&mut self) -> &mut Frontend {
        &mut self.front.as_mut().expect("connected").0
    }

    /// Connects, unless that was done already.
    pub fn dial(&mut self) {
        if self.front.is_some() {
            return;
        }
        let socket = match &self.listener {
            None => UnixStream::connect(&self.path).unwrap(),
            Some(listener) => {
                wait_readable(listener.as_raw_fd(), "the daemon does not dial");
                listener.accept().unwrap().0
            }
        };
        let watch = Watch::new(&socket);
        self.front = Some((Frontend::from_stream(socket, self.rings.len() as u64), watch));
    }

    /// A VM is made.
    pub fn connect(&mut self) {
        self.dial();
        self.follow(self.order.connect);
    }

    pub fn hang_up(&mut self) {
        self.front = None;
    }

    /// The socket was lost, the driver goes on.
    pub fn reconnect(&mut self) {
        self.dial();
        self.reconnected = true;
        self.follow(self.order.reconnect.expect("a VMM that comes back"));
        self.start();
        if self.order.base == Base::UsedIfInOrder {
            for ring in &self.rings {
                if ring.used_idx() != ring.driver.avail_idx() {
                    ring.kick.write(1).unwrap();
                }
            }
        }
    }

    /// The VM arrives from another host: its rings go on, and nothing else is known.
    pub fn arrive(&mut self) {
        self.inflight = None;
        self.dial();
        self.follow(self.order.reconnect.expect("a VMM that moves"));
        self.start();
    }

    /// The driver is ready.
    pub fn start(&mut self) {
        self.follow(self.order.start);
        self.settle();
    }

    /// A driver with fresh rings, as after a reboot. To be started.
    pub fn renew_rings(&mut self) {
        for ring in &mut self.rings {
            *ring = Ring::new(&self.ram, self.features);
        }
        (self.inflight, self.reconnected) = (None, false);
    }

    fn follow(&mut self, steps: &[Step]) {
        for step in steps {
            self.step(*step).unwrap_or_else(|e| panic!("{}: {step:?}: {e}", self.order.name));
        }
    }

    fn step(&mut self, step: Step) -> vhost::Result<()> {
        match step {
            Step::SetOwner => self.front().set_owner(),
            Step::GetFeatures => {
                let offered = self.front().get_features()?;
                let is_first = self.features == 0;
                let wanted = VERSION_1 | self.order.ring_features | self.device_features;
                self.features = offered & wanted;
                if is_first {
                    self.renew_rings();
                }
                Ok(())
            }
            Step::SetFeatures => {
                let features = self.features;
                self.front().set_features(features)
            }
            Step::SetAllFeatures => {
                let offered = self.front().get_features()?;
                self.front().set_features(offered)
            }
            Step::GetProtocols => {
                let offered = self.front().get_protocol_features()?;
                self.protocols = self.order.protocols & offered;
                Ok(())
            }
            Step::SetProtocols => {
                let protocols = self.protocols;
                self.front().set_protocol_features(protocols)
            }
            Step::SetAllProtocols => {
                let offered = self.front().get_protocol_features()?;
                self.front().set_protocol_features(offered)
            }
            Step::NeedReply => {
                if self.has(VhostUserProtocolFeatures::REPLY_ACK) {
                    self.front().set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
                }
                Ok(())
            }
            Step::Channel => self.give_channel(),
            Step::QueueNum => {
                if self.has(VhostUserProtocolFeatures::MQ) {
                    assert!(self.front().get_queue_num()? as usize >= self.rings.len());
                }
                Ok(())
            }
            Step::ReadConfig => {
                if self.has(VhostUserProtocolFeatures::CONFIG) {
                    self.config(0, CONFIG_BYTES);
                }
                Ok(())
            }
            Step::MemTable => self.set_memory(),
            Step::Inflight => self.set_inflight(),
            Step::Each(steps) => {
                for index in 0..self.rings.len() {
                    steps.iter().try_for_each(|step| self.ring_step(index, *step))?;
                }
                Ok(())
            }
        }
    }

    fn ring_step(&mut self, index: usize, step: RingStep) -> vhost::Result<()> {
        let keeps_order = self.keeps_order();
        let front = &mut self.front.as_mut().expect("connected").0;
        let ring = &self.rings[index];
        match step {
            RingStep::Num => front.set_vring_num(index, QUEUE_SIZE),
            RingStep::Addr => front.set_vring_addr(index, &addrs(ring, &self.ram, false)),
            RingStep::Base => match self.order.base {
                Base::UsedIfInOrder if self.reconnected && keeps_order => {
                    front.set_vring_base(index, ring.used_idx())
                }
                Base::AvailIndex | Base::UsedIfInOrder => {
                    front.set_vring_base(index, ring.driver.avail_idx())
                }
                Base::NotAfterReconnect if self.reconnected => Ok(()),
                Base::LastGiven | Base::NotAfterReconnect => front.set_vring_base(index, ring.base),
            },
            RingStep::Call => front.set_vring_call(index, &ring.call),
            RingStep::Kick => front.set_vring_kick(index, &ring.kick),
            RingStep::Enable => front.set_vring_enable(index, true),
        }
    }

    pub fn has(&self, protocol: VhostUserProtocolFeatures) -> bool {
        self.protocols.contains(protocol)
    }

    /// Whether the daemon can tell it that config space changed.
    pub fn is_told(&self) -> bool {
        self.has(VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::BACKEND_REQ)
    }

    /// Whether rings are enabled and disabled by message.
    fn enables(&self) -> bool {
        self.features & PROTOCOL_FEATURES != 0
    }

    /// A part of config space.
    pub fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        let (flags, room) = (VhostUserConfigFlags::WRITABLE, vec![0xee; len as usize]);
        self.front().get_config(offset, len, flags, &room).unwrap().1
    }

    fn give_channel(&mut self) -> vhost::Result<()> {
        if !self.has(VhostUserProtocolFeatures::BACKEND_REQ) {
            return Ok(());
        }
        let heard = Arc::default();
        let mut handler = FrontendReqHandler::new(Arc::clone(&heard)).unwrap();
        handler.set_reply_ack_flag(self.has(VhostUserProtocolFeatures::REPLY_ACK));
        self.front().set_backend_request_fd(&handler.get_tx_raw_fd())?;
        self.channel = Some((handler, heard));
        Ok(())
    }

    /// Waits for one message on the back-end channel; the config changes heard so far.
    pub fn wait_config_change(&mut self) -> u32 {
        let (handler, heard) = self.channel.as_mut().expect("a back-end channel");
        wait_readable(handler.as_raw_fd(), "nothing on the back-end channel");
        handler.handle_request().unwrap();
        heard.lock().unwrap().config_changes
    }

    fn region(&self, half: usize) -> VhostUserMemoryRegionInfo {
        let whole = self.ram.region();
        let len = whole.len_bytes / 2;
        let offset = len * half as u64;
        VhostUserMemoryRegionInfo {
            guest_phys_addr: whole.guest_addr + offset,
            memory_size: len,
            userspace_addr: whole.user_addr + offset,
            mmap_offset: offset,
            mmap_handle: -1,
        }
    }

    fn set_memory(&mut self) -> vhost::Result<()> {
        let fd = self.ram.fd();
        let halves = if self.memory == Memory::Both { 2 } else { 1 };
        let regions: Vec<_> = (0..halves)
            .map(|half| VhostUserMemoryRegionInfo {
                mmap_handle: fd.as_raw_fd(),
                ..self.region(half)
            })
            .collect();
        self.front().set_mem_table(&regions).map(drop)
    }

    /// Memory is plugged in while the rings run. Buffers are in it from now on.
    pub fn plug_memory(&mut self) {
        self.memory = Memory::Both;
        if self.has(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS) {
            let fd = self.ram.fd();
            let region =
                VhostUserMemoryRegionInfo { mmap_handle: fd.as_raw_fd(), ..self.region(1) };
            assert!(self.front().get_max_mem_slots().unwrap() >= 2);
            self.front().add_mem_region(&region).unwrap();
        } else {
            self.set_memory().unwrap();
        }
        self.settle();
        let used = self.ram.mark() as usize;
        self.ram.alloc(RAM_BYTES / 2 - used);
    }

    /// All messages so far have been obeyed, also those that nobody acknowledges.
    pub fn settle(&mut self) {
        self.front().get_features().unwrap();
    }

    /// Waits until the daemon has taken its last message off the socket, which it does after its
    /// answer: a daemon that is killed in between has the next one answer again.
    pub fn wait_taken(&mut self) {
        let fd = self.front().as_raw_fd();
        let begin = Instant::now();
        loop {
            let mut bytes: libc::c_int = 0;
            // SAFETY: TIOCOUTQ writes one int, the socket is open.
            assert_eq!(unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) }, 0);
            if bytes == 0 {
                return;
            }
            assert!(begin.elapsed() < LIMIT, "a message stays in the socket");
            std::thread::yield_now();
        }
    }

    /// Memory is taken away again. Nothing may be in it.
    pub fn unplug_memory(&mut self, mark: u64) {
        self.memory = Memory::FirstHalf;
        if self.has(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS) {
            let region = self.region(1);
            self.front().remove_mem_region(&region).unwrap();
        } else {
            self.set_memory().unwrap();
        }
        self.settle();
        self.ram.free_to(mark);
    }

    fn set_inflight(&mut self) -> vhost::Result<()> {
        if !self.has(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            return Ok(());
        }
        if self.inflight.is_none() {
            let wanted = VhostUserInflight {
                num_queues: self.rings.len() as u16,
                queue_size: QUEUE_SIZE,
                ..VhostUserInflight::default()
            };
            self.inflight = Some(self.front().get_inflight_fd(&wanted)?);
        }
        let (info, file) = self.inflight.as_ref().expect("just made");
        let front = &mut self.front.as_mut().expect("connected").0;
        front.set_inflight_fd(info, file.as_raw_fd())
    }

    fn keeps_order(&self) -> bool {
        self.features & IN_ORDER != 0 && self.inflight.is_none()
    }

    /// The VM pauses.
    pub fn pause(&mut self) {
        self.halt(self.order.pause);
        self.settle();
    }

    /// The VM goes on.
    pub fn resume(&mut self) {
        match self.order.pause {
            None => {}
            Some(Halt::Disable) => {
                for index in 0..self.rings.len() {
                    self.front().set_vring_enable(index, true).unwrap();
                }
            }
            Some(Halt::TakeBack) => self.set_up_again(),
        }
    }

    /// The driver lets go of the device.
    pub fn reset(&mut self) {
        self.halt(self.order.reset);
        self.settle();
    }

    fn halt(&mut self, how: Option<Halt>) {
        let Some(how) = how else { return };
        for index in 0..self.rings.len() {
            if self.enables() {
                self.front().set_vring_enable(index, false).unwrap();
            }
            if how == Halt::TakeBack {
                self.rings[index].base = self.front().get_vring_base(index).unwrap() as u16;
            }
        }
    }

    /// Starts the rings on the same connection.
    pub fn set_up_again(&mut self) {
        self.follow(self.order.again);
        self.settle();
    }

    fn last_ram_addr(&self) -> u64 {
        let region = self.ram.region();
        region.guest_addr + region.len_bytes - 1
    }

    /// A new bitmap instead of the one before, which is returned.
    fn change_log(&mut self) -> Option<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("log", flags).unwrap());
        let mmap_size = self.last_ram_addr() / (LOG_PAGE_BYTES * 8) + 1;
        file.set_len(mmap_size).unwrap();
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        let mmap_handle = file.as_raw_fd();
        let region = VhostUserDirtyLogRegion { mmap_size, mmap_offset: 0, mmap_handle };
        self.front().set_log_base(0, Some(region)).unwrap();
        self.log.replace(file)
    }

    fn log_rings(&mut self, on: bool) {
        let front = &mut self.front.as_mut().expect("connected").0;
        for (index, ring) in self.rings.iter().enumerate() {
            front.set_vring_addr(index, &addrs(ring, &self.ram, on)).unwrap();
        }
    }

    /// A migration begins.
    pub fn start_dirty_log(&mut self) {
        self.change_log();
        let features = self.features | LOG_ALL;
        self.front().set_features(features).unwrap();
        self.log_rings(true);
    }

    pub fn stop_dirty_log(&mut self) {
        self.log_rings(false);
        let features = self.features;
        self.front().set_features(features).unwrap();
        self.log = None;
    }

    /// Pages that were written since the last look.
    pub fn dirty_pages(&mut self) -> Vec<u64> {
        let old = self.change_log().expect("a log");
        let mut bytes = vec![0; old.metadata().unwrap().len() as usize];
        old.read_exact_at(&mut bytes, 0).unwrap();
        let is_set = |page: &u64| bytes[*page as usize / 8] >> (page % 8) & 1 == 1;
        (0..bytes.len() as u64 * 8).filter(is_set).collect()
    }

    /// The pages of the used rings on which something is used: not of a vsock device's events.
    pub fn used_pages(&self) -> Vec<u64> {
        self.rings.iter().take(2).map(Ring::used_page).collect()
    }
}

fn addrs(ring: &Ring, ram: &GuestRam, logged: bool) -> VringConfigData {
    let (addrs, region) = (ring.driver.setup().addrs, ram.region());
    let user = |guest: u64| region.user_addr + (guest - region.guest_addr);
    VringConfigData {
        queue_max_size: QUEUE_SIZE,
        queue_size: QUEUE_SIZE,
        flags: u32::from(logged),
        desc_table_addr: user(addrs.desc),
        used_ring_addr: user(addrs.device),
        avail_ring_addr: user(addrs.driver),
        log_addr: logged.then_some(addrs.device),
    }
}
