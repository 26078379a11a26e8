//! The fuzz target for five seconds (`FUZZ_SECONDS`) on its seeds and on changes of them, as
//! `test/fuzz/short` has the others: it is here because SQLite is.

#[path = "../../../test/fuzz/fuzz_targets/sql_client.rs"]
mod sql_client;

#[test]
fn sql_client() {
    assert_eq!(sql_client::run(&[]), std::process::ExitCode::SUCCESS);
}
