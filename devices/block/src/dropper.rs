//! Drops, on a thread of its own, what the kernel takes long to take apart.
//!
//! A ring and a memory table end in munmap(2). It takes as long as they have pages, and waits for
//! whoever maps or fills memory of this process meanwhile: another VM's session, say, that
//! registers a gigabyte. A sidecore must not.

use std::sync::mpsc::{self, Sender, SyncSender};
use std::sync::{Arc, OnceLock};

use base::io::Disk;
use queue::GuestMemory;

enum DropJob {
    // Held only to be dropped.
    Disk {
        _disk: Box<dyn Disk>,
    },
    Table {
        _table: Arc<GuestMemory>,
    },
    /// Mark in the queue: its sender gets a message when all jobs before it are done.
    Mark(SyncSender<()>),
}

/// Sender to the process's dropper; `None` where its thread could not be started.
fn sender() -> Option<&'static Sender<DropJob>> {
    static SENDER: OnceLock<Option<Sender<DropJob>>> = OnceLock::new();
    SENDER.get_or_init(start_thread).as_ref()
}

fn start_thread() -> Option<Sender<DropJob>> {
    let (sender, jobs) = mpsc::channel();
    let work = move || {
        for job in jobs {
            if let DropJob::Mark(reached) = job {
                // A caller that no longer waits needs no message.
                let _ = reached.send(());
            }
        }
    };
    let started = std::thread::Builder::new().name("dropper".into()).spawn(work);
    started.inspect_err(|e| tracing::warn!("no thread to drop rings and tables: {e}")).ok()?;
    Some(sender)
}

/// Starts the thread that drops rings and memory tables, which the kernel takes long to take apart,
/// if it does not run yet. One thread serves all disks; the first port starts it at the latest.
pub fn start() {
    let _ = sender();
}

/// Hands a disk to the dropper.
pub(crate) fn drop_disk(disk: Box<dyn Disk>) {
    send(DropJob::Disk { _disk: disk });
}

/// Hands a reference to a memory table to the dropper: it may be the last one.
pub(crate) fn drop_table(table: Arc<GuestMemory>) {
    send(DropJob::Table { _table: table });
}

/// Sends a job to the dropper; without a thread it is dropped here.
fn send(job: DropJob) {
    let _ = sender().map(|sender| sender.send(job));
}

/// Waits until everything that was handed over before is dropped: a disk keeps its image locked.
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
