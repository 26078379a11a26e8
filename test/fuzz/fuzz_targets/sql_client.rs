//! A client that says anything to the SQL database: as bytes of its stream, and as statements. No
//! panic.

#![cfg_attr(fuzzing, no_main)]

use harness::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    sql_module::fuzzing::statement(bytes);
    sql_module::fuzzing::client(bytes);
});
