//! Ports that are attached as a guest's drivers do it, and then left alone.

use std::path::PathBuf;

use crate::driver::{Asked, Driver};
use crate::error::FrontendError;
use crate::frame::Station;
use crate::memory::Memory;
use crate::port::{Port, Reach, features_of};
use crate::ring::RingShape;

/// Length of the frames that nobody sends; receive buffers are for the usual MTU.
const FRAME_BYTES: usize = 64;
/// Ring size that a Linux guest has.
const QUEUE_SIZE: u16 = 256;
/// Guest memory of a disk: its ring.
const DISK_MEMORY_BYTES: usize = 1 << 20;

/// Attached ports. Nothing runs for them here.
pub struct Idle {
    ports: Vec<Port>,
}

impl Idle {
    /// Attaches a network port at each of `nets`, with its receive buffers posted, and a disk at
    /// each of `disks`.
    pub fn attach(nets: &[PathBuf], disks: &[PathBuf]) -> Result<Self, FrontendError> {
        let shape = RingShape {
            size: QUEUE_SIZE,
            packed: false,
            in_order: false,
            event_idx: false,
            indirect: false,
        };
        let mut ports = Vec::new();
        for (i, socket) in nets.iter().enumerate() {
            let (me, nobody) = (Station::number(i as u16 + 1), Station::number(0));
            let asked = Asked { shape, mergeable: false, frame_bytes: FRAME_BYTES, huge: false };
            let mut driver = Driver::new(Reach::Dial(socket), asked, me, nobody)?;
            driver.post_all()?;
            ports.push(driver.port);
        }
        for socket in disks {
            let mut session = Reach::Dial(socket).session()?;
            session.negotiate(features_of(shape))?;
            let memory = Memory::new(DISK_MEMORY_BYTES, false)?;
            ports.push(Port::start(session, memory, shape, 1)?);
        }
        // A guest's drivers wait for interrupts.
        for queue in ports.iter_mut().flat_map(|p| &mut p.queues) {
            queue.ring.set_interrupts(true);
        }
        Ok(Self { ports })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.ports.len()
    }

    /// Stops all queues and disconnects.
    pub fn detach(mut self) -> Result<(), FrontendError> {
        self.ports.iter_mut().try_for_each(Port::stop)
    }
}
