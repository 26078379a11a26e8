//! Made-up measurements for this module's own tests.

use std::time::Duration;

use super::Server;
use super::meter::Cpu;
use super::{Cache, FileLoad, Measured, Mode, Sample, ServerLoad, Setup};

/// A run of two rounds.
pub fn setup() -> Setup {
    Setup {
        rounds: 2,
        file_bytes: 64 << 20,
        length: Duration::from_secs(1),
        busy: vec![0, 1, 3],
        servers: vec![Server::Nginx],
        sizes_bytes: vec![4 << 10, 64 << 10, 64 << 20],
        servers_busy: vec![0, 3],
        connections: 4,
        min_bytes: None,
        cpus: (0, 1),
        kernel: lab::KernelChoice::default(),
        millrace: "millrace".into(),
        sidecore: String::new(),
        out: "out".into(),
    }
}

fn sample(mb_per_s: f64, cpu: f64) -> Sample {
    let (client, machine) = (50.0, 7.0 * cpu);
    let cpu = Cpu {
        vcpu: cpu,
        qemu: cpu,
        sidecore: cpu,
        pool: cpu,
        daemon: cpu,
        kernel: cpu,
        client,
        machine,
    };
    Sample { mb_per_s, cpu, stolen: 0.0, foreign: 0.0 }
}

/// Pipes bring 800 MB/s whatever happens and take a quarter of the CPU time; the others as much
/// with no neighbour, and their share with some. The first round is nonsense.
pub fn measured() -> Measured {
    let (setup, mut all) = (setup(), Measured::default());
    for round in 0..=setup.rounds {
        let nonsense = if round == 0 { 77.0 } else { 1.0 };
        for &busy in &setup.busy {
            let others = nonsense * 800.0 / (busy as f64 + 1.0);
            for cache in Cache::ALL {
                let mut add = |mode, mb_per_s, cpu| {
                    let sample = sample(mb_per_s, cpu);
                    all.files.push(FileLoad { round, busy, cache, mode, sample });
                };
                add(Mode::Pipe, 800.0, 100.0);
                add(Mode::Sendfile, others, 400.0);
                add(Mode::ReadWrite, others / 2.0, 800.0);
                if (busy, cache) == (0, Cache::Warm) {
                    add(Mode::HostSendfile, 880.0, 100.0);
                }
            }
        }
        for &busy in &setup.servers_busy {
            for &size_bytes in &setup.sizes_bytes {
                for shim in [true, false] {
                    let mb_per_s =
                        if shim { 800.0 } else { nonsense * 800.0 / (busy as f64 + 1.0) };
                    all.servers.push(ServerLoad {
                        round,
                        busy,
                        server: Server::Nginx,
                        size_bytes,
                        shim,
                        requests_per_s: mb_per_s * 1e6 / size_bytes as f64,
                        piped: f64::from(u8::from(shim)),
                        sample: sample(mb_per_s, if shim { 100.0 } else { 400.0 }),
                    });
                }
            }
        }
    }
    all
}
