//! The calls of a module, and what comes of them.

use std::time::Instant;

use guest_abi::module::{failure, flag, kind};
use guest_abi::module_call::event;

use super::{Life, Service, push_event};
use crate::clients::Waiting;
use crate::conn::{Bytes, failure as failed, finish};
use crate::control::Used;
use crate::folder::Folder;
use crate::instance::{Given, Stopped};
use crate::limits::{CALL_BYTES, USED_BYTES, USED_INTERVAL};
use crate::stats::ModuleStats;

impl Service {
    /// Calls the module, if there is anything for it.
    pub(super) fn call(&mut self) {
        if self.pause().is_some() {
            return;
        }
        let Life::Running(instance) = &mut self.life else { return self.call_nobody() };
        if self.events.is_empty() {
            if instance.state().wake.is_none_or(|at| Instant::now() < at) {
                return;
            }
            push_event(&mut self.events, event::WAKE, 0, 0, 0, &[]);
        }
        self.meter.told.calls += 1;
        let served = instance.serve(&self.events);
        self.events.clear();
        if self.events.capacity() > 2 * CALL_BYTES {
            self.events = Vec::new();
        }
        let given = std::mem::take(&mut instance.state().given);
        self.hand_out(given);
        self.rest();
        let Life::Running(instance) = &mut self.life else { return };
        // Handed out: they count where they wait.
        instance.state().held.set(0);
        // What it believes to be in its files may not be there.
        let failed = instance.state().folder.has_failed().then_some(Stopped::Storage);
        if let Some(stopped) = failed.or(served.err()) {
            self.stopped(stopped);
        }
    }

    /// Requests that nobody can take fail at once, or wait for the next instance.
    fn call_nobody(&mut self) {
        if let Life::Waiting { broken: Some(why), .. } = &self.life {
            let why = why.clone();
            self.events.clear();
            self.fail_all(failure::BROKEN, &why);
        }
    }

    /// Replies leave: those that promise nothing first, the others when it is true.
    fn hand_out(&mut self, given: Vec<Given>) {
        let (durable, now): (Vec<Given>, Vec<Given>) = given.into_iter().partition(|g| g.durable);
        let waits = !durable.is_empty() && !now.is_empty();
        now.into_iter().for_each(|given| self.reply(given));
        if durable.is_empty() {
            return;
        }
        if waits {
            self.flush_all();
        }
        let Life::Running(instance) = &mut self.life else { return };
        match instance.state().folder.sync_all() {
            Ok(()) => durable.into_iter().for_each(|given| self.reply(given)),
            Err(e) => {
                tracing::error!(module = %self.spec.name, "making its files durable: {e}");
                let text = format!("the host's storage failed: {e}");
                for given in durable {
                    self.fail(given.client, given.seq, failure::STORAGE, &text);
                }
            }
        }
    }

    fn answered(&mut self, number: u32, seq: u64) -> Option<Waiting> {
        let waiting = self.clients.get_mut(number)?.answered(seq)?;
        self.meter.latency.record(waiting.since.elapsed().as_nanos() as u64);
        Some(waiting)
    }

    fn reply(&mut self, given: Given) {
        let Given { client, seq, frame, flags, .. } = given;
        let Some(waiting) = self.answered(client, seq) else {
            return tracing::debug!(module = %self.spec.name, client, seq, "a reply to no request");
        };
        if flags & flag::FAILED != 0 {
            self.meter.told.failed += 1;
            self.meter.told.crowded += 1;
        }
        let bytes = finish(frame, kind::REPLY, flags, seq);
        self.send(client, seq, &bytes, !waiting.repeatable);
    }

    fn fail(&mut self, number: u32, seq: u64, code: u32, text: &str) {
        if self.answered(number, seq).is_some() {
            self.meter.told.failed += 1;
            let bytes = failed(kind::REPLY, seq, code, text);
            self.send(number, seq, &bytes, true);
        }
    }

    fn send(&mut self, number: u32, seq: u64, bytes: &Bytes, keep: bool) {
        let Some(client) = self.clients.get_mut(number) else { return };
        if keep {
            client.keep(seq, bytes);
        }
        let conn = client.conn.and_then(|at| self.conns.get_mut(at)?.as_mut());
        if let Some(conn) = conn {
            self.meter.told.sent_bytes += bytes.len() as u64;
            conn.push(Bytes::clone(bytes));
        }
    }

    pub(super) fn fail_all(&mut self, code: u32, text: &str) {
        let waiting: Vec<(u32, u64)> = self
            .clients
            .iter_mut()
            .flat_map(|(number, client)| client.waiting().map(move |seq| (number, seq)))
            .collect();
        waiting.into_iter().for_each(|(number, seq)| self.fail(number, seq, code, text));
    }

    pub(super) fn folder(&mut self) -> Option<&mut Folder> {
        match &mut self.life {
            Life::Running(instance) => Some(&mut instance.state().folder),
            Life::Waiting { folder, .. } => Some(folder),
            Life::Over => None,
        }
    }

    /// Tells what was done with the files, now and then: what is left is told with what comes next.
    pub(super) fn tell_used(&mut self) {
        let Some(now) = self.folder().map(|folder| folder.counts()) else { return };
        let (before, at) = self.told_used;
        let mut used = Used::between(before, now);
        // What goes by sockets the vsock device charges.
        used.bytes = used.bytes.saturating_add(self.ring_bytes);
        let much = used.bytes >= USED_BYTES || at.elapsed() >= USED_INTERVAL;
        if used.bytes > 0 && much && (self.spec.used)(used) {
            self.told_used = (now, Instant::now());
            self.ring_bytes = 0;
        }
    }

    pub(super) fn stats(&mut self) -> ModuleStats {
        let mut told = self.meter.told.clone();
        told.clients = self.clients.len() as u64;
        let by_ring = || self.conns.iter().flatten().filter(|conn| conn.has_ring());
        told.rings = by_ring().count() as u64;
        told.bells += by_ring().map(|conn| conn.bells).sum::<u64>();
        told.state = self.state();
        if let Life::Running(instance) = &mut self.life {
            told.memory_bytes = instance.memory_bytes();
        }
        if let Some(folder) = self.folder() {
            told.stored_bytes = folder.used_bytes();
            told.files = folder.counts();
        }
        let latency = self.meter.latency.snapshot();
        told.latency_p50_ns = latency.quantile(0.5);
        told.latency_p99_ns = latency.quantile(0.99);
        told.latency = latency.coarse().collect();
        told.latency_sum_ns = latency.sum();
        told
    }

    /// The last call, and the last words.
    pub(super) fn finish(&mut self) {
        // Whoever copies the files sees that the process has gone.
        (self.held_until, self.rests_until) = (None, None);
        push_event(&mut self.events, event::ENDING, 0, 0, 0, &[]);
        self.call();
        self.fail_all(failure::ENDING, "the service of modules ends");
        for at in 0..self.conns.len() {
            self.goodbye(at, failure::ENDING, "the service of modules ends");
        }
        if let Life::Running(instance) = &mut self.life
            && let Err(e) = instance.state().folder.sync_all()
        {
            tracing::error!(module = %self.spec.name, "making its files durable: {e}");
        }
    }
}
