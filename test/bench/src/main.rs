//! The command `bench`; see the library for how it measures.

fn main() -> std::process::ExitCode {
    bench::cli::main()
}
