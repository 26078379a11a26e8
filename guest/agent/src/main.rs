//! `millrace-agent`: the agent as a service. See millrace-agent(8).

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use agent::host::{Dial, Unix, Vsock};
use agent::line::Heartbeat;
use agent::log::log;
use agent::{Agent, AgentError, Config, identity};
use base::notify;
use guest_abi::pipe::{SECRET_BYTES, SECRET_PATH};

const HELP: &str = "\
Usage: millrace-agent [--socket PATH] [--secret FILE] [--host-socket PATH]

Takes pipes from this guest's programs and passes them to the host's daemon.

  --socket PATH       where programs connect (/run/millrace/agent.sock)
  --secret FILE       what the daemon knows the agent by (opt/millrace/secret of fw_cfg, where it is)
  --host-socket PATH  the daemon's Unix socket instead of vsock, for tests
  --version           print the version
  --help              print this text
";

/// Command line.
#[derive(Debug)]
enum Command {
    Serve { socket: PathBuf, secret: Option<PathBuf>, host: Option<PathBuf> },
    Print(String),
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Command, AgentError> {
    let mut socket = PathBuf::from(guest_abi::program::SOCKET);
    let (mut secret, mut host) = (None, None);
    while let Some(word) = words.next() {
        let mut value = || {
            let missing = || AgentError::Usage(format!("{word} needs a value"));
            words.next().map(PathBuf::from).ok_or_else(missing)
        };
        match word.as_str() {
            "--socket" => socket = value()?,
            "--secret" => secret = Some(value()?),
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
    Ok(Command::Serve { socket, secret, host })
}

fn main() -> ExitCode {
    let done = parse(std::env::args().skip(1)).and_then(|command| match command {
        Command::Print(text) => {
            print!("{text}");
            Ok(())
        }
        Command::Serve { socket, secret, host: None } => serve(socket, secret, Vsock),
        Command::Serve { socket, secret, host: Some(path) } => serve(socket, secret, Unix(path)),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(format_args!("millrace-agent: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Reads the secret that identifies the agent to the daemon: from the named file, or else from
/// where the VMM puts it, if it does.
fn read_secret(named: Option<PathBuf>) -> Result<Vec<u8>, AgentError> {
    let path = named.clone().unwrap_or_else(|| SECRET_PATH.into());
    let mut secret = match (std::fs::read(&path), named) {
        (Err(error), None) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        (Err(source), _) => {
            let what = format!("read the secret {}", path.display());
            return Err(AgentError::Io { what, source });
        }
        (Ok(bytes), _) => bytes,
    };
    if secret.last() == Some(&b'\n') {
        secret.pop();
    }
    if !SECRET_BYTES.contains(&secret.len()) {
        let (least, most) = (SECRET_BYTES.start(), SECRET_BYTES.end());
        let (path, len) = (path.display(), secret.len());
        let text = format!("the secret {path} has {len} bytes; the limit is {least} to {most}");
        return Err(AgentError::Usage(text));
    }
    Ok(secret)
}

/// Serves until SIGTERM or SIGINT.
fn serve(socket: PathBuf, secret: Option<PathBuf>, dial: impl Dial) -> Result<(), AgentError> {
    // Root's alone to read.
    let secret = read_secret(secret)?;
    // Before there are other threads.
    identity::give_up_privileges().map_err(|error| AgentError::Io {
        what: "give up capabilities".into(),
        source: error.into(),
    })?;
    let io = |source| AgentError::Io { what: "listen for signals".into(), source };
    let (mut signalled, sender) = UnixStream::pair().map_err(io)?;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let sender = sender.try_clone().map_err(io)?;
        signal_hook::low_level::pipe::register(signal, sender).map_err(io)?;
    }
    let heartbeat = Heartbeat::default();
    let agent = Agent::start(Config { socket, dial, any_device: false, heartbeat, secret })?;
    tell("READY=1");
    signalled.read_exact(&mut [0]).map_err(io)?;
    tell("STOPPING=1");
    drop(agent);
    Ok(())
}

fn tell(state: &str) {
    if let Err(error) = notify::tell(state) {
        log(format_args!("the service manager was not told {state}: {error}"));
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
        let Ok(Command::Serve { socket, secret: None, host: None }) = words("") else { panic!() };
        assert_eq!(socket, PathBuf::from("/run/millrace/agent.sock"));
        let Ok(Command::Serve { socket, secret, host }) =
            words("--socket a --host-socket b --secret c")
        else {
            panic!()
        };
        let path = PathBuf::from;
        assert_eq!((socket, secret, host), (path("a"), Some(path("c")), Some(path("b"))));
        assert!(matches!(words("--help"), Ok(Command::Print(_))));
        for (wrong, why) in [("--socket", "--socket"), ("serve", "serve")] {
            assert!(words(wrong).unwrap_err().to_string().contains(why));
        }
    }
}
