//! The command `frontend`.

fn main() -> std::process::ExitCode {
    frontend::cli::main()
}
