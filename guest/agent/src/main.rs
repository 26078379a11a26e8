//! `millrace-agent`: the agent as a service. See millrace-agent(8).

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use agent::host::{Dial, Unix, Vsock};
use agent::line::Heartbeat;
use agent::say::say;
use agent::{Agent, AgentError, Config, identity};
use base::notify;

const HELP: &str = "\
Usage: millrace-agent [--socket PATH] [--host-socket PATH]

Takes pipes from this guest's programs and passes them to the host's daemon.

  --socket PATH       where programs connect (/run/millrace/agent.sock)
  --host-socket PATH  the daemon's Unix socket instead of vsock, for tests
  --version           print the version
  --help              print this text
";

/// What the command line says.
#[derive(Debug)]
enum Command {
    Serve { socket: PathBuf, host: Option<PathBuf> },
    Print(String),
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Command, AgentError> {
    let (mut socket, mut host) = (PathBuf::from(guest_abi::program::SOCKET), None);
    while let Some(word) = words.next() {
        let mut value = || {
            let missing = || AgentError::Usage(format!("{word} needs a value"));
            words.next().map(PathBuf::from).ok_or_else(missing)
        };
        match word.as_str() {
            "--socket" => socket = value()?,
            "--host-socket" => host = Some(value()?),
            "--version" => {
                return Ok(Command::Print(format!(
                    "millrace-agent {}\n",
                    env!("CARGO_PKG_VERSION")
                )));
            }
            "--help" | "-h" => return Ok(Command::Print(HELP.into())),
            _ => return Err(AgentError::Usage(format!("unknown argument {word:?}"))),
        }
    }
    Ok(Command::Serve { socket, host })
}

fn main() -> ExitCode {
    let done = parse(std::env::args().skip(1)).and_then(|command| match command {
        Command::Print(text) => {
            print!("{text}");
            Ok(())
        }
        Command::Serve { socket, host: None } => serve(socket, Vsock),
        Command::Serve { socket, host: Some(path) } => serve(socket, Unix(path)),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("millrace-agent: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Serves until SIGTERM or SIGINT.
fn serve(socket: PathBuf, dial: impl Dial) -> Result<(), AgentError> {
    // Before there are other threads.
    identity::give_up_privileges().map_err(|error| AgentError::Io {
        what: "give up capabilities".into(),
        source: error.into(),
    })?;
    let io = |source| AgentError::Io { what: "listen for signals".into(), source };
    let (mut told, teller) = UnixStream::pair().map_err(io)?;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let teller = teller.try_clone().map_err(io)?;
        signal_hook::low_level::pipe::register(signal, teller).map_err(io)?;
    }
    let agent =
        Agent::start(Config { socket, dial, any_device: false, heartbeat: Heartbeat::default() })?;
    tell("READY=1");
    told.read_exact(&mut [0]).map_err(io)?;
    tell("STOPPING=1");
    drop(agent);
    Ok(())
}

fn tell(state: &str) {
    if let Err(error) = notify::tell(state) {
        say(format_args!("tell the service manager {state}: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Command, AgentError> {
        parse(line.split_ascii_whitespace().map(str::to_owned))
    }

    #[test]
    fn command_lines() {
        let Ok(Command::Serve { socket, host: None }) = words("") else { panic!() };
        assert_eq!(socket, PathBuf::from("/run/millrace/agent.sock"));
        let Ok(Command::Serve { socket, host }) = words("--socket a --host-socket b") else {
            panic!()
        };
        assert_eq!((socket, host), (PathBuf::from("a"), Some(PathBuf::from("b"))));
        assert!(matches!(words("--help"), Ok(Command::Print(_))));
        for (wrong, why) in [("--socket", "--socket"), ("serve", "serve")] {
            assert!(words(wrong).unwrap_err().to_string().contains(why));
        }
    }
}
