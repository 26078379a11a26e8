//! The command line of `bench modules`.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::harness::error::BenchError;
use crate::harness::options::VmArgs;
use crate::harness::progress::Progress;
use crate::harness::suite::PageSuite;
use crate::harness::table::Section;
use crate::suites::modules::{Form, Measured, Setup, Shape, Side, rounds, size_text};

/// Largest rows, KiB: those of the paper's figures.
const MAX_KIB: u32 = 128;

#[derive(Args)]
pub struct ModulesArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Row sizes in KiB: powers of two up to 128.
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64,128", value_parser = size)]
    sizes: Vec<u32>,
    /// Durable rows of a load (16 to 10000), of at most 16 KiB; larger ones are fewer, those that
    /// are not durable twice as many.
    #[arg(long, default_value_t = 160, value_parser = clap::value_parser!(u32).range(16..=10_000))]
    rows: u32,
    /// Rows of a statement or transaction that has several (2 to 1000).
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..=1000))]
    batch: u32,
    /// Only these sides.
    #[arg(long, value_delimiter = ',', value_enum)]
    sides: Vec<Side>,
    /// How rows are grouped: one by one, several in a statement, several statements in a
    /// transaction.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "one,rows,tx")]
    shapes: Vec<Shape>,
    /// How many microseconds guest and host look at memory that they share before they sleep.
    /// Emulated, a guest takes milliseconds from one row to the next.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    spin_us: u32,
    /// The guest's disks past the host's page cache (cache=none), as the store in the host cannot
    /// be.
    #[arg(long)]
    direct: bool,
    /// The plugin; its version of MariaDB stands in the file `version` beside it.
    #[arg(long, default_value = "target/mariadb/ha_millrace.so")]
    plugin: PathBuf,
    /// The table store.
    #[arg(long, default_value = "target/modules/table.wasm")]
    module: PathBuf,
    /// Two rounds of a few rows of 1 and 16 KiB: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "sizes", "rows"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

fn size(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(kib) if kib.is_power_of_two() && kib <= MAX_KIB => Ok(kib << 10),
        _ => Err(format!("{text:?}; powers of two up to {MAX_KIB} allowed")),
    }
}

impl PageSuite for ModulesArgs {
    const SECTION: Section = Section::Modules;
    type Setup = Setup;
    type Measured = Measured;

    fn setup(&self) -> Result<Setup, BenchError> {
        let all = |sides: &[Side]| if sides.is_empty() { Side::ALL.into() } else { sides.into() };
        let mut setup = Setup {
            rounds: self.rounds,
            sizes_bytes: self.sizes.clone(),
            rows: self.rows,
            batch: self.batch,
            sides: all(&self.sides),
            forms: Form::all(&self.shapes),
            kernel: self.vms.kernel()?,
            millrace: self.vms.millrace()?,
            plugin: self.plugin.clone(),
            module: self.module.clone(),
            spin_us: self.spin_us,
            direct: self.direct,
            out: self.vms.out.clone(),
        };
        if self.quick {
            (setup.rounds, setup.rows, setup.sizes_bytes) = (2, 16, vec![1 << 10, 16 << 10]);
        }
        Ok(setup)
    }

    fn measure(setup: &Setup, progress: &mut Progress) -> Result<Measured, BenchError> {
        rounds::run(setup, progress)
    }

    fn text(setup: &Setup) -> Vec<String> {
        let sizes: Vec<String> = setup.sizes_bytes.iter().map(|s| size_text(*s)).collect();
        let cache = if setup.direct {
            "The guest’s disks go past the host’s page cache; the host’s store goes through it."
        } else {
            "The guest’s disks and the host’s store go through the host’s page cache."
        };
        vec![
            "One VM (1 vCPU) with Debian’s MariaDB, unmodified, and the plugin; all sides are tables of this \
             server. guest-*: the same store as the module, in the same build of the daemon inside the guest, by a \
             Unix socket, with batching. module: each write and each commit is a request of its own. module-ring: as \
             module-batched, by memory that guest and host share."
                .into(),
            format!(
                "module-ring: both sides look at their memory for up to {} µs before they sleep, which takes CPU time.",
                setup.spin_us
            ),
            format!(
                "Disks are raw files, whose blocks are all there before, in the folder where the host’s store is; \
                 ext4 in the guest; QEMU’s with io_uring, virtio-blk with a thread of its own. {cache} Durable \
                 means, on all sides, that fdatasync of a file in this folder has returned."
            ),
            format!(
                "Rows of {}: a key and a LONGBLOB, from a seed, by a stored procedure that tells its own time, \
                 into an empty table; {} durable rows a load, fewer of more than 16k, twice as many that are not \
                 durable; one by one, or {} of them in a statement or a transaction. Checksums of all sides are equal.",
                sizes.join(", "),
                setup.rows,
                setup.batch
            ),
            "Not durable: millrace_durable=OFF; innodb_flush_log_at_trx_commit=2 instead of 1; \
             aria_group_commit=soft instead of none. MyISAM is never durable. All else is as Debian has it, without \
             binary log."
                .into(),
            "Exits (accesses to registers of virtio and IDE) and interrupts are counted in the first round, which \
             does not count otherwise. CPU time is that of QEMU’s threads, of the daemon, of the module’s process \
             and of the host kernel’s worker and journal threads. Under emulation the guest’s share is several \
             times what it is under KVM, and it contains IDE’s emulation."
                .into(),
            format!("{} rounds, after one thrown away; who begins changes.", setup.rounds),
        ]
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
        let args: ModulesArgs = options::parse(&[]).unwrap();
        assert_eq!(args.sizes, [1, 4, 16, 64, 128].map(|kib| kib << 10));
        assert_eq!((args.rounds, args.rows, args.batch, args.sides.len()), (5, 160, 16, 0));
    }
}
