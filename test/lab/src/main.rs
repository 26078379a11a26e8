//! The command `lab`: prepare the machine, boot guests by hand, clean up.

use std::io::{self, BufRead, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use lab::{
    Cache, Daemon, Guest, Image, ImageBuilder, Kernel, KernelChoice, Lab, LabError, Net, Qemu, Vm,
    apt, kmod,
};

/// Boots real VMs for Millrace's tests, demo and benchmarks.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: What,
}

#[derive(Subcommand)]
enum What {
    /// Install what is missing, unpack the kernels, build the images (root; may run again)
    Setup,
    /// Boot guests and type commands to them
    Boot(Boot),
    /// Boot guests, run one command on each, end
    Run {
        #[command(flatten)]
        boot: Boot,
        /// The shell command
        script: String,
    },
    /// Build Millrace's kernel modules and print their folder for each kernel
    Kmod {
        /// Only for this kernel: 6.1 or 6.12
        #[arg(long)]
        kernel: Option<KernelChoice>,
        /// Check their types (sparse) and style (checkpatch) as well
        #[arg(long)]
        check: bool,
    },
    /// Remove kernels, images and builds from the cache
    Clean,
}

#[derive(clap::Args)]
struct Boot {
    /// How many guests
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    vms: u8,
    /// Network that connects them
    #[arg(long, value_enum, default_value_t = Network::Tap)]
    net: Network,
    /// Kernel: 6.1, 6.12 or 5.10
    #[arg(long, default_value_t = KernelChoice::V6_1)]
    kernel: KernelChoice,
    /// Memory of each guest
    #[arg(long, default_value_t = lab::builder::DEFAULT_MEMORY_MB)]
    memory_mb: u32,
    /// Take the image with network and disk tools instead of the small one
    #[arg(long)]
    tools: bool,
    /// Type commands to the guests instead of ending when they are ready
    #[arg(long)]
    shell: bool,
    /// The millrace program for --net millrace
    #[arg(long, env = "MILLRACE_BIN")]
    millrace: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Eq)]
enum Network {
    /// QEMU's TAPs on a bridge
    Tap,
    /// Millrace's switch over vhost-user
    Millrace,
    /// No network
    None,
}

const BOOT_TIMEOUT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let done = match Arguments::parse().command {
        What::Setup => setup(),
        What::Boot(boot) => boot_and_talk(&boot),
        What::Run { boot, script } => run(&boot, &script),
        What::Kmod { kernel, check } => kernel_modules(kernel, check),
        What::Clean => clean(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lab: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one step with its name and time on one line.
fn step<T>(what: &str, work: impl FnOnce() -> Result<T, LabError>) -> Result<T, LabError> {
    eprint!("lab: {what} … ");
    // Only the line's look depends on it.
    let _ = io::stderr().flush();
    let start = Instant::now();
    let done = work();
    match &done {
        Ok(_) => eprintln!("{:.1} s", start.elapsed().as_secs_f64()),
        Err(_) => eprintln!("failed"),
    }
    done
}

/// The image with all tools.
fn tools() -> ImageBuilder {
    Image::builder().net_tools().disk_tools().program("fio")
}

fn setup() -> Result<(), LabError> {
    let missing = apt::missing_packages();
    if !missing.is_empty() {
        step(&format!("install {}", missing.join(" ")), || apt::install(&missing))?;
    }
    let cache = Cache::open()?;
    let qemu = step("QEMU", || Qemu::chosen(&cache))?;
    let (major, minor) = qemu.version();
    eprintln!("lab: guests run on QEMU {major}.{minor}");
    for choice in KernelChoice::ALL {
        let kernel = match step(&format!("kernel {choice}"), || Kernel::get(&cache, choice)) {
            // A machine whose sources lack the newer series can still do everything with 6.1.
            Err(error @ LabError::Missing { .. }) if choice != KernelChoice::default() => {
                eprintln!("lab: kernel {choice} left out: {error}");
                continue;
            }
            other => other?,
        };
        for (name, recipe) in [("small", Image::builder()), ("tools", tools())] {
            step(&format!("image {name} for {}", kernel.release()), || {
                recipe.build(&cache, &kernel)
            })?;
        }
    }
    // It says what it has found.
    lab::acceleration(&Lab::new()?)?;
    eprintln!("lab: ready; cache in {}", cache.root().display());
    Ok(())
}

fn kernel_modules(choice: Option<KernelChoice>, check: bool) -> Result<(), LabError> {
    let cache = Cache::open()?;
    let sources = kmod::sources();
    for choice in choice.map_or(KernelChoice::CURRENT.to_vec(), |choice| vec![choice]) {
        let kernel = Kernel::get(&cache, choice)?;
        if check {
            let what = format!("kernel modules for {}, types", kernel.release());
            step(&what, || kmod::check_types(&cache, &kernel, &sources))?;
        }
        println!("{}", kmod::build(&cache, &kernel, &sources)?.display());
    }
    if check {
        step("kernel modules, style", || kmod::check_style(&cache, &sources))?;
    }
    Ok(())
}

fn clean() -> Result<(), LabError> {
    let root = Cache::open()?.root().to_owned();
    std::fs::remove_dir_all(&root).map_err(LabError::io(format!("remove {}", root.display())))
}

/// Booted guests; the daemon, if any, goes after them.
struct Booted {
    guests: Vec<Guest>,
    _daemon: Option<Daemon>,
}

fn boot(lab: &Lab, options: &Boot) -> Result<Booted, LabError> {
    let names: Vec<String> = (1..=options.vms).map(|number| format!("vm{number}")).collect();
    let daemon = match options.net {
        Network::Millrace => Some(start_daemon(lab, options, &names)?),
        Network::Tap => {
            lab.net().bridge("br0")?;
            None
        }
        Network::None => None,
    };
    let start = Instant::now();
    let mut guests = Vec::new();
    for (number, name) in (1..).zip(&names) {
        let mut guest = Guest::builder(name).kernel(options.kernel).memory_mb(options.memory_mb);
        if options.tools {
            guest = guest.image(tools());
        }
        let net = match &daemon {
            Some(daemon) => Net::vhost_user(daemon.socket(name, "net0")).into(),
            None if options.net == Network::Tap => {
                let tap = format!("tap{number}");
                lab.net().tap(&tap, Some("br0"))?;
                Net::tap(tap)
            }
            None => Net::None,
        };
        if net != Net::None {
            let (v4, v6) = (format!("10.0.0.{number}/24"), format!("fd00::{number}/64"));
            guest = guest.net(net).address(v4).address(v6);
        }
        guests.push(guest);
    }
    let guests = lab::boot_all(lab, guests, BOOT_TIMEOUT)?;
    let mut cpu = Duration::ZERO;
    for guest in &guests {
        cpu += guest.cpu_time()?;
    }
    let (took, cpu) = (start.elapsed().as_secs_f64(), cpu.as_secs_f64());
    eprintln!("lab: {} guests in {took:.1} s ({cpu:.1} s of CPU)", guests.len());
    Ok(Booted { guests, _daemon: daemon })
}

fn start_daemon(lab: &Lab, options: &Boot, names: &[String]) -> Result<Daemon, LabError> {
    let mut daemon = Daemon::builder("mr").switch("lan", "");
    if let Some(path) = &options.millrace {
        daemon = daemon.binary(path);
    }
    for name in names {
        daemon = daemon.vm(Vm::new(name, "").net("net0", "switch = \"lan\""));
    }
    daemon.start(lab)
}

fn run(options: &Boot, script: &str) -> Result<(), LabError> {
    let lab = Lab::new()?;
    for guest in boot(&lab, options)?.guests {
        println!("{}", guest.sh(script)?);
    }
    Ok(())
}

fn boot_and_talk(options: &Boot) -> Result<(), LabError> {
    let lab = Lab::new()?;
    let booted = boot(&lab, options)?;
    for guest in &booted.guests {
        eprintln!("lab: {}: {} (QEMU {})", guest.name(), guest.release(), guest.pid());
    }
    if options.shell { talk(&booted.guests) } else { Ok(()) }
}

/// Reads lines and runs each on the chosen guest until the input ends.
fn talk(guests: &[Guest]) -> Result<(), LabError> {
    eprintln!(
        "lab: a line is a shell command; :NAME changes the guest, :console shows its console,"
    );
    eprintln!("lab: :quit or the end of input ends all guests");
    let mut lines = io::stdin().lock().lines();
    let mut at = 0;
    loop {
        let Some(guest) = guests.get(at) else { return Ok(()) };
        print!("{}> ", guest.name());
        io::stdout().flush().map_err(LabError::io("write the prompt"))?;
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.map_err(LabError::io("read a command"))?;
        match line.trim() {
            "" => {}
            ":quit" => return Ok(()),
            ":console" => println!("{}", guest.console_tail(lab::console::TAIL_LINES)),
            word if word.starts_with(':') => {
                match guests.iter().position(|guest| guest.name() == &word[1..]) {
                    Some(found) => at = found,
                    None => eprintln!("lab: no guest {:?}", &word[1..]),
                }
            }
            script => {
                let output = guest.run(script)?;
                print!("{}", output.text());
                eprint!("{}", String::from_utf8_lossy(&output.stderr));
                if output.code != 0 {
                    eprintln!("[{}]", output.code);
                }
            }
        }
    }
}
