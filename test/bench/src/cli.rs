//! The command line of `bench`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::harness::error::BenchError;
use crate::harness::results::Results;
use crate::harness::table::{self, Section};
use crate::harness::{suite, summary};
use crate::suites::events::output::Results as EventsResults;
use crate::suites::{channels, consolidate, demo, events, idle, modules, peers, pipes, shares};

#[derive(Parser)]
#[command(name = "bench", version, about = "Compares Millrace with its peers on this machine")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Boot four VMs, two on Millrace and two on QEMU's own devices, and compare them.
    ///
    /// Exit code: 0 complete, 1 something failed, 2 usage, 3 complete and a floor was missed.
    Demo(demo::command::DemoArgs),
    /// Run our back end and its peers in turns under one front end, without VMs.
    ///
    /// Exit code: as `demo`.
    Peers(peers::command::PeersArgs),
    /// Count exits, interrupts, wake-ups and system calls per request on real VMs.
    ///
    /// Exit code: 0 complete, 1 something failed, 2 usage; there are no floors.
    Events(events::command::EventsArgs),
    /// Load eight VMs unevenly, on one sidecore and on QEMU's main loops and disk threads, and
    /// compare.
    ///
    /// Exit code: as `events`.
    Consolidate(consolidate::command::ConsolidateArgs),
    /// Many VMs on one sidecore: does each get what is due to it?
    ///
    /// Exit code: as `demo`.
    Shares(shares::command::SharesArgs),
    /// Measure the cost of ports that do nothing, and what remains of those that go.
    ///
    /// Exit code: as `demo`.
    Idle(idle::command::IdleArgs),
    /// Files from a VM that shares its CPU, by pipes, sendfile and read-write, and from web
    /// servers.
    ///
    /// Exit code: as `demo`.
    Pipes(pipes::command::PipesArgs),
    /// Two guests of one host, by the channel and by everything else.
    ///
    /// Exit code: as `demo`.
    Channels(channels::command::ChannelsArgs),
    /// A database in a guest inserts rows: its table store in the host, in the guest, and other
    /// engines.
    ///
    /// Exit code: as `demo`.
    Modules(modules::command::ModulesArgs),
    /// The load of the TAP and bridge reference.
    #[command(hide = true)]
    Tap(peers::command::TapArgs),
    /// DPDK's virtio-user driver as the front end of `peers`.
    #[command(hide = true)]
    VirtioUser(peers::command::VirtioUserArgs),
    /// Print the table of an earlier run, or put it into a document.
    Table {
        /// Result file.
        #[arg(long, default_value = "out/demo.json")]
        from: PathBuf,
        /// Document whose part between `<!-- bench:SECTION -->` and `<!-- /bench:SECTION -->` is
        /// rewritten.
        #[arg(long, alias = "readme")]
        document: Option<PathBuf>,
        /// Section of the document, and so the kind of table.
        #[arg(long, value_enum, default_value_t = Section::Demo)]
        section: Section,
        /// Print Markdown.
        #[arg(long)]
        markdown: bool,
    },
    /// Write the README's summary and its plot from the tables of the document of results.
    Summary {
        /// Document with the tables.
        #[arg(long, default_value = "docs/results.md")]
        results: PathBuf,
        /// Document whose part between `<!-- bench:summary -->` and `<!-- /bench:summary -->` is
        /// rewritten.
        #[arg(long, default_value = "README.md")]
        readme: PathBuf,
        /// Plot to write.
        #[arg(long, default_value = "docs/results.svg")]
        plot: PathBuf,
    },
}

/// Runs the command; what `main` does.
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Demo(args) => suite::run(&args),
        Command::Peers(args) => suite::run(&args),
        Command::Events(args) => suite::run(&args),
        Command::Consolidate(args) => suite::run(&args),
        Command::Shares(args) => suite::run(&args),
        Command::Idle(args) => suite::run(&args),
        Command::Pipes(args) => suite::run(&args),
        Command::Channels(args) => suite::run(&args),
        Command::Modules(args) => suite::run(&args),
        Command::Tap(args) => peers::command::tap(&args).map(|()| 0),
        Command::VirtioUser(args) => peers::command::virtio_user(&args).map(|()| 0),
        Command::Table { from, document, section, markdown } => {
            print_table(&from, document.as_deref(), section, markdown).map(|()| 0)
        }
        Command::Summary { results, readme, plot } => {
            summary::write(&results, &readme, &plot).map(|()| 0)
        }
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("bench: {e}");
            ExitCode::FAILURE
        }
    }
}

fn print_table(
    from: &Path,
    document: Option<&Path>,
    section: Section,
    markdown: bool,
) -> Result<(), BenchError> {
    let (text, plain) = match section {
        Section::Events => {
            let text = EventsResults::read(from)?.markdown();
            (text.clone(), text)
        }
        _ => {
            let results = Results::read(from)?;
            (section.markdown(&results), table::terminal(section, &results))
        }
    };
    match document {
        Some(path) => {
            table::rewrite_file(path, section, &text)?;
            eprintln!(
                "bench: {} has the new table; README's is of `bench summary`",
                path.display()
            );
        }
        None if markdown => print!("{text}"),
        None => print!("{plain}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Command lines that are refused, and the reason in part.
    const REFUSED: [(&str, &str); 19] = [
        ("demo --rounds 0", "1..=99"),
        ("demo --secs 0.1", "0.2 to 60 allowed"),
        ("demo --secs NaN", "allowed"),
        ("demo --quick --rounds 3", "cannot be used with"),
        ("peers --rounds 0", "1..=99"),
        ("pipes --busy 4", "0 to 3 or none allowed"),
        ("pipes --mib 1025", "1..=1024"),
        ("pipes --servers apache", "apache"),
        ("pipes --quick --mib 8", "cannot be used with"),
        ("channels --programs redis --tests tcp_rr", "cannot be used with"),
        ("channels --sizes 63", "64..=65536"),
        ("channels --ways carrier-pigeon", "tap-bridge"),
        ("channels --vcpus 9", "1..=8"),
        ("channels --tests icmp_rr", "icmp_rr"),
        ("modules --sizes 3", "powers of two up to 128"),
        ("modules --sizes 256", "powers of two up to 128"),
        ("modules --rows 4", "16..=10000"),
        ("modules --sides oracle", "oracle"),
        ("modules --quick --rows 20", "cannot be used with"),
    ];

    #[test]
    fn limits_are_kept_and_told() {
        for (line, reason) in REFUSED {
            let words = ["bench"].into_iter().chain(line.split(' '));
            let text = Cli::try_parse_from(words).err().unwrap().to_string();
            assert!(text.contains(reason), "{line}: {text}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
