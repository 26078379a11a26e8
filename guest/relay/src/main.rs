//! `millrace-relay`: a module of the host as a socket of the guest. See millrace-relay(8).

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use base::notify;
use clap::{Args, Parser, Subcommand};
use relay::link::{Plan, SILENCE};
use relay::log::log;
use relay::serve::{self, Relay};
use relay::session::ModuleName;
use relay::{Address, Listen, RelayError, client};

/// Lets programs of this VM use a module of its host that speaks a protocol of bytes.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: Option<Serve>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the modules that this VM may use
    Ls(Ls),
}

#[derive(Debug, Args)]
struct Serve {
    /// Name of the module
    #[arg(long, value_name = "NAME")]
    module: String,
    /// Address for programs: unix:/PATH or tcp:IP:PORT
    #[arg(long, value_name = "ADDRESS")]
    listen: Listen,
    /// Mode of a Unix socket: who may connect
    #[arg(long, value_name = "OCTAL", default_value = "0666", value_parser = octal)]
    mode: u32,
    /// Most connections of programs at a time
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = serve::MAX_CONNECTIONS,
        value_parser = connections
    )]
    max_connections: usize,
    /// Seconds for which connecting to the host is retried before a program's connection ends
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    patience: u64,
    /// A line that goes ahead of each program's bytes
    #[arg(long, value_name = "TEXT")]
    first_line: Option<String>,
    /// The module speaks before the program does, as MySQL's servers do
    #[arg(long)]
    greeting: bool,
    /// Address of the host: vsock:CID:PORT or unix:/PATH
    #[arg(long, value_name = "ADDRESS", default_value_t = Address::HOST)]
    host: Address,
}

#[derive(Debug, Args)]
struct Ls {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Address of the host: vsock:CID:PORT or unix:/PATH
    #[arg(long, value_name = "ADDRESS", default_value_t = Address::HOST)]
    host: Address,
}

fn octal(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "an octal number up to 0777 is wanted".into())
}

fn connections(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=65_536).contains(n));
    number.ok_or_else(|| "a number from 1 to 65536 is wanted".into())
}

fn main() -> ExitCode {
    let done = match Cli::parse() {
        Cli { command: Some(Command::Ls(ls)), .. } => list(&ls),
        Cli { serve: Some(serve), .. } => relay(serve),
        // clap demands one of them.
        Cli { .. } => Ok(()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(format_args!("millrace-relay: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs the relay until SIGTERM or SIGINT.
fn relay(serve: Serve) -> Result<(), RelayError> {
    let io = |source| RelayError::Io { what: "listen for signals".into(), source };
    let (told, teller) = UnixStream::pair().map_err(io)?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        let teller = teller.try_clone().map_err(io)?;
        signal_hook::low_level::pipe::register(signal, teller).map_err(io)?;
    }
    let first_line = serve.first_line.map(|line| format!("{line}\r\n").into_bytes());
    let relay = Relay::new(serve::Config {
        plan: Plan {
            host: serve.host,
            patience: Duration::from_secs(serve.patience),
            first_line: first_line.unwrap_or_default(),
            is_greeted: serve.greeting,
            silence: SILENCE,
        },
        module: serve.module,
        listen: serve.listen,
        mode: serve.mode,
        max_connections: serve.max_connections,
    })?;
    tell("READY=1");
    relay.run(told)?;
    tell("STOPPING=1");
    Ok(())
}

fn tell(state: &str) {
    if let Err(error) = notify::tell(state) {
        log(format_args!("the service manager was not told {state}: {error}"));
    }
}

fn list(ls: &Ls) -> Result<(), RelayError> {
    let greeting = client::list(ls.host.clone(), Duration::from_secs(5))?;
    let text = render(&greeting.modules, ls.json);
    let io = |source| RelayError::Io { what: "print".into(), source };
    std::io::stdout().write_all(text.as_bytes()).map_err(io)
}

fn render(modules: &[ModuleName], json: bool) -> String {
    let hash = |m: &ModuleName| m.hash.iter().map(|b| format!("{b:02x}")).collect::<String>();
    if json {
        let object =
            |m| serde_json::json!({ "name": ModuleName::clone(m).name, "sha256": hash(m) });
        let all: Vec<_> = modules.iter().map(object).collect();
        return format!("{}\n", serde_json::json!({ "modules": all }));
    }
    let mut text = format!("{:32}  SHA256\n", "MODULE");
    modules.iter().for_each(|m| text += &format!("{:32}  {}\n", m.name, hash(m)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cli(line: &str) -> Result<Cli, String> {
        let words = std::iter::once("millrace-relay").chain(line.split_ascii_whitespace());
        Cli::try_parse_from(words).map_err(|e| e.to_string())
    }

    #[test]
    fn command_lines() {
        let all = "--module kv --listen tcp:127.0.0.1:11211 --host unix:/h --mode 0600";
        let serve = cli(all).unwrap().serve.unwrap();
        assert_eq!((serve.module.as_str(), serve.mode), ("kv", 0o600));
        assert_eq!(cli("--module kv --listen unix:/a").unwrap().serve.unwrap().host, Address::HOST);
        let ls = cli("ls --json").unwrap();
        assert!(
            matches!(ls.command, Some(Command::Ls(Ls { json: true, .. }))) && ls.serve.is_none()
        );
        for (wrong, why) in [
            ("", "--module"),
            ("--module kv", "--listen"),
            ("--module kv --listen tcp:x", "tcp:IP:PORT"),
            ("--module kv --listen unix:/a --mode 999", "octal"),
            ("--module kv --listen unix:/a --max-connections 0", "65536"),
            ("ls --host tcp:1", "vsock:CID:PORT"),
        ] {
            let told = cli(wrong).unwrap_err();
            assert!(told.contains(why), "{wrong}: {told}");
        }
    }

    #[test]
    fn lists() {
        let module = ModuleName { name: "kv".into(), hash: [0xab; 32] };
        let hash = "ab".repeat(32);
        assert!(render(std::slice::from_ref(&module), false).ends_with(&format!("  {hash}\n")));
        let json = render(&[module], true);
        assert_eq!(json, format!("{{\"modules\":[{{\"name\":\"kv\",\"sha256\":\"{hash}\"}}]}}\n"));
    }
}
