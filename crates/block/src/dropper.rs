//! Drops, on a thread of its own, what the kernel takes long to take apart.
//!
//! A ring and a memory table end in munmap(2). It takes as long as they have pages, and waits for
//! whoever maps or fills memory of this process meanwhile: another VM's session, say, that registers
//! a gigabyte. A sidecore must not.

use std::sync::mpsc::{self, Sender, SyncSender};
use std::sync::{Arc, OnceLock};

use base::io::Disk;
use queue::GuestMemory;

enum DropJob {
    // Only dropped.
    Disk {
        _disk: Box<dyn Disk>,
    },
    Table {
        _table: Arc<GuestMemory>,
    },
    /// Told when it was reached.
    Mark(SyncSender<()>),
}

/// One for the process; none where no thread could be had.
fn sender() -> Option<&'static Sender<DropJob>> {
    static SENDER: OnceLock<Option<Sender<DropJob>>> = OnceLock::new();
    SENDER.get_or_init(start_thread).as_ref()
}

fn start_thread() -> Option<Sender<DropJob>> {
    let (sender, jobs) = mpsc::channel();
    let work = move || {
        for job in jobs {
            if let DropJob::Mark(reached) = job {
                // Who no longer waits need not be told.
                let _ = reached.send(());
            }
        }
    };
    let started = std::thread::Builder::new().name("dropper".into()).spawn(work);
    started.inspect_err(|e| tracing::warn!("no thread to drop rings and tables: {e}")).ok()?;
    Some(sender)
}

/// Starts the thread that drops what the kernel takes long to take apart (rings, memory tables), if
/// it does not run; one serves all disks. Else the first port does it.
pub fn start() {
    let _ = sender();
}

/// Drops a disk, soon.
pub(crate) fn drop_disk(disk: Box<dyn Disk>) {
    send(DropJob::Disk { _disk: disk });
}

/// Lets go of a memory table, soon: it may be the last hold.
pub(crate) fn drop_table(table: Arc<GuestMemory>) {
    send(DropJob::Table { _table: table });
}

/// Without a thread it is dropped here.
fn send(job: DropJob) {
    let _ = sender().map(|sender| sender.send(job));
}

/// Waits until all that was to be dropped before is gone: a disk keeps its image locked.
pub(crate) fn wait() {
    let (reached, wait) = mpsc::sync_channel(1);
    send(DropJob::Mark(reached));
    // Without a thread the mark is gone at once.
    let _ = wait.recv();
}

#[cfg(test)]
mod tests {
    use super::*;
    use queue::testing::{ModelDriver, ModelOptions};

    #[test]
    fn what_was_sent_is_gone_after_the_wait() {
        let options = ModelOptions::default();
        let memory = ModelDriver::with_options(queue::Layout::Split, 4, options).memory();
        let held = Arc::downgrade(&memory);
        drop_table(memory);
        wait();
        assert_eq!(held.strong_count(), 0);
    }
}
