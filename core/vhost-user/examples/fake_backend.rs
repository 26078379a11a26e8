//! A disk without a disk: reads give zeroes, writes go nowhere. For trying sessions against a real
//! VMM: `fake_backend PATH [HOLDER-SOCKET]`, after `fake_backend --holder HOLDER-SOCKET`. One slow
//! thread serves all queues.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::counter::QueueStats;
use queue::seg::{copy_in, copy_out, fill_zero};
use queue::{Batch, Completion, GuestMemory, Vring};
use vhost_user::{
    ConfigNotifier, Device, DeviceError, DeviceKind, Endpoint, NullStore, PortConfig, SessionStore,
    VmShare, holder::HolderStore, serve_port,
};

const QUEUES: u16 = 1;
const CAPACITY_SECTORS: u64 = 64 << 11;
const VERSION_1: u64 = 1 << 32;
const INDIRECT: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PACKED: u64 = 1 << 34;
const GET_ID: u32 = 8;
const STATUS_OK: u8 = 0;

#[derive(Default)]
struct Fake {
    vrings: Mutex<Vec<Vring>>,
}

impl Fake {
    fn poll(&self, batch: &mut Batch) {
        for vring in lock(&self.vrings).iter_mut() {
            let popped = vring.pop(batch, 64);
            if popped == 0 {
                continue;
            }
            let done: Vec<Completion> = (0..batch.len()).map(|i| serve(batch, i)).collect();
            vring.push(&done);
            vring.notify();
        }
    }
}

fn serve(batch: &Batch, index: usize) -> Completion {
    let chain = batch.get(index);
    let mut header = [0u8; 16];
    copy_out(chain.readable, 0, &mut header);
    let data = chain.writable_len.saturating_sub(1) as usize;
    if u32::from_le_bytes([header[0], header[1], header[2], header[3]]) == GET_ID {
        copy_in(chain.writable, 0, b"fake");
    } else {
        fill_zero(chain.writable, 0, data);
    }
    copy_in(chain.writable, data, &[STATUS_OK]);
    Completion { id: chain.id, ndesc: chain.ndesc, written: chain.writable_len }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Device for Fake {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }
    fn features(&self) -> u64 {
        VERSION_1 | INDIRECT | EVENT_IDX | PACKED
    }
    fn queue_count(&self) -> u16 {
        QUEUES
    }
    fn has_config(&self) -> bool {
        true
    }
    fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DeviceError> {
        let mut space = [0u8; 256];
        space[..8].copy_from_slice(&CAPACITY_SECTORS.to_le_bytes());
        let from = offset as usize;
        let part = space.get(from..from + out.len()).ok_or(DeviceError::OutOfRange {
            what: "config offset",
            value: u64::from(offset),
            limit: 256,
        })?;
        out.copy_from_slice(part);
        Ok(())
    }
    fn write_config(&self, _offset: u32, _data: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("writing config space"))
    }
    fn activate(&self, features: u64) -> Result<(), DeviceError> {
        tracing::info!("features {features:#x}");
        Ok(())
    }
    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError> {
        tracing::info!("queue {} starts at {:?}", vring.parts.index, vring.queue.position());
        lock(&self.vrings).push(vring);
        Ok(())
    }
    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError> {
        let mut vrings = lock(&self.vrings);
        let at = vrings.iter().position(|v| v.parts.index == index);
        let vring = at.map(|at| vrings.remove(at));
        tracing::info!("queue {index} stops at {:?}", vring.as_ref().map(|v| v.queue.position()));
        Ok(vring)
    }
    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError> {
        for vring in lock(&self.vrings).iter_mut() {
            let moved = vring.queue.set_memory(memory.clone());
            moved.map_err(DeviceError::failed)?;
        }
        Ok(())
    }
    fn set_notifier(&self, _notifier: Option<Arc<dyn ConfigNotifier>>) {}
    fn reset(&self) {
        lock(&self.vrings).clear();
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).init();
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: fake_backend PATH [HOLDER-SOCKET]")?;
    if path == "--holder" {
        let socket = args.next().ok_or("usage: fake_backend --holder HOLDER-SOCKET")?;
        return Ok(vhost_user::holder::run(&PathBuf::from(socket))?);
    }
    let session_store: Arc<dyn SessionStore> = match args.next() {
        Some(holder) => Arc::new(HolderStore::new(PathBuf::from(holder))),
        None => Arc::new(NullStore),
    };
    let fake = Arc::new(Fake::default());
    let config = PortConfig {
        name: "fake/disk".to_owned(),
        endpoint: Endpoint::Listen(PathBuf::from(path)),
        socket_mode: 0o600,
        share: VmShare::new(),
    };
    let stats = (0..QUEUES).map(|_| Arc::new(QueueStats::default())).collect();
    let server = serve_port(config, fake.clone(), stats, session_store)?;
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut batch = Batch::new(64, 1024);
            while running.load(Ordering::Relaxed) {
                fake.poll(&mut batch);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        // Ends with standard input.
        let mut line = String::new();
        while std::io::stdin().read_line(&mut line).is_ok_and(|n| n > 0) {
            println!("{:#?}", server.status());
        }
        running.store(false, Ordering::Relaxed);
    });
    server.stop();
    Ok(())
}
