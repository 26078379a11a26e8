//! Moves of workers to another sidecore, and from one.

use std::os::fd::RawFd;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};

use base::sync::lock;

use super::{Run, Slot};
use crate::core::{Sidecore, Unit};
use crate::worker::{SidecoreError, WorkerId};

/// Workers on their way; taken back by the sender when nobody receives them.
type Parcel = Arc<Mutex<Vec<Slot>>>;

fn unpack(parcel: &Parcel) -> Vec<Slot> {
    std::mem::take(&mut *lock(parcel))
}

impl Run {
    /// Hands all workers of `unit` to `target`, which tells `settled` when it has them. Jobs run
    /// between two rounds, when every worker is disarmed: nothing but the watched descriptors is
    /// to be changed.
    ///
    /// They are watched there first and then no longer here, so no kick falls between: one that
    /// comes while both watch wakes both. A new watch fires at once when the descriptor is
    /// readable, and the new sidecore polls the worker before it may sleep.
    pub(crate) fn move_out(
        &mut self,
        unit: &Arc<Unit>,
        target: &Sidecore,
        settled: SyncSender<()>,
    ) -> Result<usize, SidecoreError> {
        let io = |source| SidecoreError::Io { what: "watching a moved worker's events", source };
        self.watch_at(unit, target).map_err(io)?;
        let slots: Vec<Slot> =
            self.slots.extract_if(.., |slot| Arc::ptr_eq(&slot.seat.unit, unit)).collect();
        let count = slots.len();
        slots.iter().for_each(|slot| self.unwatch(slot));
        // Before it is charged elsewhere: what it was charged here is told by then.
        self.ledger.worker_left(self.clock.now_ns());
        let parcel: Parcel = Arc::new(Mutex::new(slots));
        let job = {
            let parcel = Arc::clone(&parcel);
            Box::new(move |run: &mut Self| {
                run.move_in(unpack(&parcel));
                // The mover may have ended.
                let _ = settled.send(());
            })
        };
        match target.post(job) {
            Err(gone @ SidecoreError::Gone(_)) => {
                self.take_back(unpack(&parcel));
                return Err(gone);
            }
            Err(e) => tracing::error!(sidecore = target.index(), "{e}"),
            Ok(()) => {}
        }
        // After the post: a call that reads the new home finds its job behind the workers.
        unit.set_core(target.clone());
        self.show_seats();
        Ok(count)
    }

    /// Has `target` watch what `unit` watches here: everything, or nothing on error.
    fn watch_at(&self, unit: &Arc<Unit>, target: &Sidecore) -> std::io::Result<()> {
        let mut done: Vec<RawFd> = Vec::new();
        for slot in self.slots.iter().filter(|slot| Arc::ptr_eq(&slot.seat.unit, unit)) {
            for &fd in slot.watched.borrow().iter() {
                if let Err(e) = target.mailbox().poller.watch(fd, slot.seat.id) {
                    done.iter().for_each(|&fd| target.mailbox().poller.unwatch(fd));
                    return Err(e);
                }
                done.push(fd);
            }
        }
        Ok(())
    }

    fn move_in(&mut self, slots: Vec<Slot>) {
        for slot in &slots {
            slot.seat.stats.moves.add(1);
        }
        self.slots.extend(slots);
        self.show_seats();
    }

    /// Takes workers back whose target has ended.
    fn take_back(&mut self, slots: Vec<Slot>) {
        for slot in slots {
            let id: WorkerId = slot.seat.id;
            for &fd in slot.watched.borrow().iter() {
                if let Err(e) = self.mailbox.poller.watch(fd, id) {
                    tracing::error!(sidecore = self.config.index, worker = slot.seat.name, "{e}");
                }
            }
            self.slots.push(slot);
        }
    }
}
