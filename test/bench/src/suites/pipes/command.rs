//! The command line of `bench pipes`.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use crate::harness::error::BenchError;
use crate::harness::options::{VmArgs, seconds, sidecore, two_cpus, value_or};
use crate::harness::progress::Progress;
use crate::harness::suite::PageSuite;
use crate::harness::table::{Section, size_text};
use crate::suites::pipes::{Measured, Server, Setup, rounds};

/// Most neighbours: those of the paper.
const MAX_BUSY: i64 = 3;

#[derive(Args)]
pub struct PipesArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Size of the file that is transferred, in MiB (1 to 1024; the paper's has 1024).
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1024))]
    mib: u64,
    /// Least seconds of a load (0.2 to 60); a file is transferred as often as that takes.
    #[arg(long, default_value = "1", value_parser = seconds)]
    secs: Duration,
    /// Numbers of busy neighbours (0 to 3) in transfers of the file; "none" for no such transfers.
    #[arg(long, value_delimiter = ',', default_value = "0,1,2,3", value_parser = busy)]
    busy: Vec<Option<usize>>,
    /// Web servers; "none" for none.
    #[arg(long, value_delimiter = ',', default_value = "nginx,lighttpd",
        value_parser = |text: &str| value_or::<Server>("none", text))]
    servers: Vec<Option<Server>>,
    /// Sizes of the files that web servers serve, in KiB (1 to 65536).
    #[arg(long, value_delimiter = ',', default_value = "4,16,64,256,1024,4096,16384,65536",
        value_parser = clap::value_parser!(u64).range(1..=65_536))]
    sizes: Vec<u64>,
    /// Numbers of busy neighbours (0 to 3) of the web servers.
    #[arg(long, value_delimiter = ',', default_value = "0,2,3",
        value_parser = clap::value_parser!(u64).range(0..=MAX_BUSY as u64))]
    servers_busy: Vec<u64>,
    /// Keep-alive connections to a web server.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    connections: u64,
    /// Smallest file in KiB that the shim pipes (MILLRACE_MIN_BYTES); the shim's default when left
    /// out.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    min_kib: Option<u64>,
    /// CPU of all VMs, and CPU of the daemon and the client.
    #[arg(long, value_delimiter = ',', num_args = 1.., default_values_t = [0, 1])]
    cpus: Vec<usize>,
    /// Microseconds that the sidecore polls before it sleeps; the daemon's default when left out.
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    spin_us: Option<u32>,
    /// One round of 4 MiB with 0 and 3 busy neighbours: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "mib", "secs", "busy", "sizes", "servers_busy"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

fn busy(text: &str) -> Result<Option<usize>, String> {
    match text {
        "none" => Ok(None),
        _ => match text.parse() {
            Ok(n) if n <= MAX_BUSY as usize => Ok(Some(n)),
            _ => Err(format!("{text:?}; 0 to {MAX_BUSY} or none allowed")),
        },
    }
}

impl PageSuite for PipesArgs {
    const SECTION: Section = Section::Pipes;
    type Setup = Setup;
    type Measured = Measured;

    fn setup(&self) -> Result<Setup, BenchError> {
        let mut setup = Setup {
            rounds: self.rounds,
            file_bytes: self.mib << 20,
            length: self.secs,
            busy: self.busy.iter().flatten().copied().collect(),
            servers: self.servers.iter().flatten().copied().collect(),
            sizes_bytes: self.sizes.iter().map(|kib| kib << 10).collect(),
            servers_busy: self.servers_busy.iter().map(|n| *n as usize).collect(),
            connections: self.connections as usize,
            min_bytes: self.min_kib.map(|kib| kib << 10),
            cpus: two_cpus(&self.cpus)?,
            kernel: self.vms.kernel()?,
            millrace: self.vms.millrace()?,
            sidecore: sidecore(self.spin_us),
            out: self.vms.out.clone(),
        };
        if self.quick {
            (setup.rounds, setup.file_bytes) = (1, 4 << 20);
            setup.length = Duration::from_millis(200);
            (setup.busy, setup.servers_busy) = (vec![0, 3], vec![0]);
            setup.sizes_bytes = vec![4 << 10, 1 << 20];
        }
        if setup.servers.is_empty() {
            setup.servers_busy.clear();
        }
        Ok(setup)
    }

    fn measure(setup: &Setup, progress: &mut Progress) -> Result<Measured, BenchError> {
        rounds::run(setup, progress)
    }

    fn text(setup: &Setup) -> Vec<String> {
        let (vms, host) = setup.cpus;
        let sizes: Vec<String> = setup.sizes_bytes.iter().map(|s| size_text(*s)).collect();
        let mut text = vec![
            format!(
                "The server VM (1 vCPU) and its neighbours, VMs with a busy loop, share CPU {vms}; the \
                 daemon with sidecore, pipes and twins runs on CPU {host}, and so do the client, which is in \
                 a bridge at the switch’s uplink, and the reference’s sender."
            ),
            "Neighbours that are not wanted are stopped. The guest’s disk is a raw image behind the host’s \
             page cache, which holds all of it, on every side; “cold” and “warm” are the guest’s own cache."
                .into(),
            format!(
                "{} MiB over one kept connection, as often as {:.1} s take, by `mrpipe -p`, `-s` and `-w`. All \
                 three brought the same bytes in the first round.",
                setup.file_bytes >> 20,
                setup.length.as_secs_f64()
            ),
            "host-sendfile: a process of the host sends a file of the same length by sendfile over a veth \
             pair into the same bridge."
                .into(),
            "CPU time is that of QEMU’s and the daemon’s threads and of the host kernel’s worker and packet \
             threads, from the request until a moment after the last byte. Under emulation a guest’s share is \
             several times what it is under KVM."
                .into(),
            format!("{} rounds, after one thrown away; who begins changes.", setup.rounds),
        ];
        if !setup.servers.is_empty() {
            text.push(format!(
                "Web servers: Debian’s, unmodified, one process each that serves; files of {} from the \
                 guest’s warm cache over {} kept connections, with the preload shim and without, other \
                 settings alike (nginx: `sendfile_max_chunk 0`). The shim pipes what has at least {}. Files \
                 of at most 4 MiB, with no neighbour busy, are served by both sides’ processes at once, by \
                 short turns, and by new processes four times a round.",
                sizes.join(", "),
                setup.connections,
                setup.min_bytes.map_or("its default".into(), size_text)
            ));
        }
        text
    }

    fn out(&self) -> &Path {
        &self.vms.out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options;

    #[test]
    fn the_papers_settings_are_the_default() {
        let args: PipesArgs = options::parse(&[]).unwrap();
        assert_eq!(args.busy, [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(args.servers, [Some(Server::Nginx), Some(Server::Lighttpd)]);
        assert_eq!((args.sizes.len(), args.rounds, args.mib), (8, 5, 64));
    }

    #[test]
    fn servers_can_be_left_out() {
        let args: PipesArgs = options::parse(&["--busy", "none", "--servers", "none"]).unwrap();
        assert_eq!(args.servers, [None]);
    }
}
