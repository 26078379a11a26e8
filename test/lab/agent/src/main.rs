//! One static program under several names: `/init` (process 1), `agent`, `modprobe`.

use std::process::ExitCode;

use lab_agent::{AgentError, init, modprobe, tools};

fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::main();
    }
    let arguments: Vec<String> = std::env::args().collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), AgentError> {
    let (name, rest) =
        arguments.split_first().map_or(("", &[][..]), |(name, rest)| (name.as_str(), rest));
    if name.ends_with("modprobe") {
        return modprobe::main(rest);
    }
    let words: Vec<&str> = rest.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["serve"] => init::serve_port(None),
        ["serve", root] => init::serve_port(Some(root)),
        ["modprobe", ..] => modprobe::main(&rest[1..]),
        tool => tools::main(tool).unwrap_or_else(|| {
            Err(AgentError::Usage(format!("{name} serve | modprobe NAME | a network tool")))
        }),
    }
}
