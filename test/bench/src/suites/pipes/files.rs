//! Part one: one file over one connection.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::bed::{Bed, SERVER};
use super::fetch::Connection;
use super::meter::Sum;
use super::{Cache, FileLoad, Measured, Mode, Sample, Setup, with_repeats};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::order_for_round;
use crate::harness::steal_time;

/// How long CPU time counts on after the client has everything: a guest then takes the last
/// acknowledgements, and a pipe is handed back. Longer than a neighbour's turn.
pub const TAIL: Duration = Duration::from_millis(50);
/// Most transfers of a load.
const MAX_TRANSFERS: u32 = 16;
/// The file in the guest.
const PATH: &str = "/mnt/file";
/// First port of the guest's servers; each new one has the next.
const FIRST_PORT: u16 = 7001;
/// Rounds that a server in the guest serves: more than there will be.
const ROUNDS: u32 = 1_000_000;

/// The loads of part one.
pub struct Files<'a> {
    bed: &'a Bed,
    setup: &'a Setup,
    open: HashMap<Mode, (Connection, u16)>,
    next_port: u16,
    /// Hash of the file's bytes; all modes in the guest must bring the same.
    hash: Option<u64>,
}

/// Conditions of one load.
struct Conditions {
    /// Counted from 1; 0 is the one thrown away.
    round: u32,
    /// Mode that moves the bytes.
    mode: Mode,
    /// State of the guest's page cache.
    cache: Cache,
    /// Busy neighbours.
    busy: usize,
}

impl<'a> Files<'a> {
    /// Makes the file.
    pub fn new(bed: &'a Bed, setup: &'a Setup) -> Result<Files<'a>, BenchError> {
        if !setup.busy.is_empty() {
            bed.fill(PATH, setup.file_bytes)?;
        }
        let (open, hash) = (HashMap::new(), None);
        Ok(Files { bed, setup, open, next_port: FIRST_PORT, hash })
    }

    /// Everything once.
    pub fn round(
        &mut self,
        round: u32,
        measured: &mut Measured,
        progress: &mut Progress,
    ) -> Result<(), BenchError> {
        for busy in order_for_round(&self.setup.busy, round) {
            for cache in Cache::ALL {
                self.cell(round, (busy, cache), measured, progress);
            }
        }
        self.bed.busy(0)
    }

    /// All modes with so many neighbours and such a cache.
    fn cell(
        &mut self,
        round: u32,
        (busy, cache): (usize, Cache),
        measured: &mut Measured,
        progress: &mut Progress,
    ) {
        let mut modes = order_for_round(&Mode::IN_GUEST, round);
        // The reference has no guest whose cache could be cold.
        if (busy, cache) == (0, Cache::Warm) {
            modes.push(Mode::HostSendfile);
        }
        let case = format!("file_{}_{busy}", cache.name());
        let mut told = Vec::new();
        for mode in modes {
            let name = (case.as_str(), mode.name());
            let load = |_| self.load(&Conditions { round, mode, cache, busy });
            let Some(sample) = with_repeats(name, round, measured, progress, load) else {
                continue;
            };
            told.push(format!("{} {:.0}", mode.name(), sample.mb_per_s));
            measured.files.push(FileLoad { round, busy, cache, mode, sample });
        }
        progress.step(&format!("{case}: MB/s: {}", told.join(", ")));
    }

    fn load(&mut self, conditions: &Conditions) -> Result<Sample, BenchError> {
        let done = self.transfers(conditions);
        // What is left of a connection that failed is of no use.
        let Err(e) = done else { return done };
        let Some((_, port)) = self.open.remove(&conditions.mode) else { return Err(e) };
        let said = self.bed.sh(&format!("tail -n 3 {}", log(port))).unwrap_or_default();
        Err(BenchError::lab(e.to_string(), format!("the server said {said:?}")))
    }

    /// Makes as many transfers as the load's time takes.
    fn transfers(&mut self, conditions: &Conditions) -> Result<Sample, BenchError> {
        let Conditions { round, mode, cache, busy } = *conditions;
        let (bed, len_bytes) = (self.bed, self.setup.file_bytes);
        self.connect(mode)?;
        let (meter, cpus) = (bed.meter(), [self.setup.cpus.0, self.setup.cpus.1]);
        let (mut sum, mut took, mut bytes, mut stolen) = (Sum::default(), Duration::ZERO, 0, 0f64);
        for _ in 0..MAX_TRANSFERS {
            if mode != Mode::HostSendfile {
                bed.busy(0)?;
                bed.sh(match cache {
                    Cache::Cold => "echo 3 > /proc/sys/vm/drop_caches",
                    Cache::Warm => "cat /mnt/file > /dev/null",
                })?;
            }
            bed.busy(busy)?;
            let (before, steal) = (meter.snapshot()?, steal_time::read(&cpus));
            let Some((connection, _)) = self.open.get_mut(&mode) else { break };
            let transfer = connection.transfer(bed.client_cpu(), round == 0)?;
            std::thread::sleep(TAIL);
            meter.add(&mut sum, &before, &meter.snapshot()?, transfer.client_ns);
            stolen = stolen.max(steal_time::read(&cpus).since(&steal));
            self.compare(mode, transfer.hash)?;
            (took, bytes) = (took + transfer.took, bytes + len_bytes);
            if took >= self.setup.length {
                break;
            }
        }
        let mb_per_s = bytes as f64 / 1e6 / took.as_secs_f64().max(1e-9);
        Ok(Sample { mb_per_s, cpu: sum.per_mb(bytes), stolen, foreign: sum.foreign() })
    }

    /// A server for the mode, and a connection to it, unless there is one.
    fn connect(&mut self, mode: Mode) -> Result<(), BenchError> {
        if self.open.contains_key(&mode) {
            return Ok(());
        }
        let port = self.next_port;
        self.next_port += 1;
        let to = match mode {
            Mode::HostSendfile => self.bed.reference(),
            _ => {
                self.bed.busy(0)?;
                self.bed.serve(&script(mode, port))?;
                format!("{SERVER}:{port}")
                    .parse::<SocketAddr>()
                    .map_err(|e| BenchError::lab("address", e))?
            }
        };
        let connection = Connection::open(self.bed.net(), to, self.setup.file_bytes)?;
        self.open.insert(mode, (connection, port));
        Ok(())
    }

    /// Compares the bytes with those of the first mode: one that brings others is not worth
    /// measuring.
    fn compare(&mut self, mode: Mode, hash: Option<u64>) -> Result<(), BenchError> {
        let (Some(hash), true) = (hash, mode != Mode::HostSendfile) else { return Ok(()) };
        if *self.hash.get_or_insert(hash) == hash {
            return Ok(());
        }
        Err(BenchError::lab(mode.name(), "it brought other bytes than the others"))
    }
}

/// Path of the log of a server in the guest.
fn log(port: u16) -> String {
    format!("/tmp/mrpipe.{port}")
}

fn script(mode: Mode, port: u16) -> String {
    let option = match mode {
        Mode::Pipe => "-p",
        Mode::Sendfile | Mode::HostSendfile => "-s",
        Mode::ReadWrite => "-w",
    };
    format!("mrpipe -l {port} {option} -r -n {ROUNDS} {PATH} 2>&1 | tee {}", log(port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mode_has_its_server() {
        let script = |mode| script(mode, 7001);
        assert_eq!(
            script(Mode::Pipe),
            "mrpipe -l 7001 -p -r -n 1000000 /mnt/file 2>&1 | tee /tmp/mrpipe.7001"
        );
        assert!(
            script(Mode::Sendfile).contains(" -s ") && script(Mode::ReadWrite).contains(" -w ")
        );
    }
}
