//! Memory that a guest and its modules share: whatever the guest writes there, the host stays
//! within its ring.
#![cfg_attr(fuzzing, no_main)]

use harness::fuzz_target;
use modules::fuzzing::Shared;

thread_local! {
    static SHARED: Shared = Shared::new().expect("memory");
}

fuzz_target!(|bytes: &[u8]| {
    SHARED.with(|shared| {
        let _ = shared.ring(bytes);
    });
});
