//! Files of the table store with any content: it starts, or says that it cannot; no panic, and it
//! never takes memory for what a length only claims.

#![cfg_attr(fuzzing, no_main)]

use harness::fuzz_target;
use sdk::testing::TestHost;
use sdk::{Host, Module, open};
use table_module::Store;

fuzz_target!(|bytes: &[u8]| {
    let mut host = TestHost::new(1);
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let name = if kind % 2 == 0 { "log-0000000000000001" } else { "checkpoint-0000000000000001" };
    let Ok(file) = host.open(name, open::CREATE) else { return };
    assert!(host.append(file, bytes).is_ok());
    host.close(file);
    let _ = Store::start(&mut host);
});
