//! Idle-priority busy loops, one per CPU, during latency runs.
//!
//! A host CPU that goes idle between two packets enters a sleep state and, under a hypervisor, is
//! given away; waking it costs more than the packet. Round trips then measure the sleep (500/s
//! against 1,500/s on the lab machine). A thread of class SCHED_IDLE runs only when nobody else
//! wants the CPU and is preempted at once, so it keeps the CPU awake and takes nothing. Plain
//! `nice` does not do: with autogroups it only counts within a login session.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use crate::harness::error::BenchError;
use crate::harness::host::Thread;

/// Busy loops on all CPUs; they stop when this is dropped.
pub struct Spinners {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    tids: Vec<Thread>,
}

impl Spinners {
    /// Starts one loop for each CPU that this process may use.
    pub fn start() -> Result<Spinners, BenchError> {
        let cpus = base::cpu::allowed_cpus().map_err(|e| BenchError::lab("list CPUs", e))?;
        let mut all = Spinners {
            stop: Arc::new(AtomicBool::new(false)),
            threads: Vec::new(),
            tids: Vec::new(),
        };
        for cpu in cpus {
            let (stop, (ready, started)) = (all.stop.clone(), mpsc::sync_channel(1));
            let body = move || {
                let prepared = base::cpu::pin_current_thread(cpu).and_then(|()| idle_class());
                let go = prepared.is_ok();
                // The starter waits for this; it cannot be gone.
                let _ = ready.send(prepared.map(|()| Thread::current()));
                while go && !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            };
            let thread = std::thread::Builder::new().name(format!("spin-{cpu}")).spawn(body);
            all.threads.push(thread.map_err(|e| BenchError::lab("start a spinner", e))?);
            match started.recv() {
                Ok(Ok(tid)) => all.tids.push(tid),
                Ok(Err(e)) => return Err(BenchError::lab(format!("spinner on CPU {cpu}"), e)),
                Err(e) => return Err(BenchError::lab(format!("spinner on CPU {cpu}"), e)),
            }
        }
        Ok(all)
    }

    /// The threads, to leave their CPU time out of the accounts.
    pub fn tids(&self) -> &[Thread] {
        &self.tids
    }
}

impl Drop for Spinners {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A spinner that panicked has stopped too.
            let _ = thread.join();
        }
    }
}

/// Puts the calling thread into class SCHED_IDLE. rustix has no call for this.
fn idle_class() -> std::io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: pid 0 is the calling thread and `param` lives across the call, which only reads it.
    let rc = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &param) };
    if rc == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Set from when a thread begins to exit (include/linux/sched.h).
    const PF_EXITING: i64 = 4;

    /// A field of a thread's stat line, counted as in proc(5), from the third on.
    fn field(tid: u32, number: usize) -> Option<i64> {
        let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).ok()?;
        let (_, rest) = text.rsplit_once(')')?;
        rest.split_whitespace().nth(number - 3)?.parse().ok()
    }

    fn class_of(tid: u32) -> Option<i32> {
        field(tid, 41)?.try_into().ok()
    }

    fn is_running(tid: u32) -> bool {
        field(tid, 9).is_some_and(|flags| flags & PF_EXITING == 0)
    }

    #[test]
    fn one_per_cpu_in_the_idle_class_and_gone_after_drop() {
        let spinners = Spinners::start().unwrap();
        let tids: Vec<u32> = spinners.tids().iter().map(|t| t.tid).collect();
        assert_eq!(tids.len(), base::cpu::allowed_cpus().unwrap().len());
        for tid in &tids {
            assert_eq!(class_of(*tid), Some(libc::SCHED_IDLE));
        }
        drop(spinners);
        // The kernel lets a thread be joined a moment before it takes its entry away.
        for tid in &tids {
            assert!(!is_running(*tid), "thread {tid} is still there");
        }
    }
}
