//! A member that writes anything anywhere into its mailbox: what the host takes for sane is within
//! the limits, and its own half is healed with its next change.

#![cfg_attr(fuzzing, no_main)]

use guest_abi::channel::{GUEST_MAGIC, GUEST_OFF, VERSION};
use harness::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, bytes)) = bytes.split_first() else { return };
    let mut said = Vec::new();
    if kind & 1 == 1 {
        // A half whose beginning is right is looked at further.
        let word =
            |at: usize, value: u64| [&(at as u16).to_le_bytes()[..], &value.to_le_bytes()].concat();
        said.extend(word(GUEST_OFF, GUEST_MAGIC));
        said.extend(word(GUEST_OFF + 8, u64::from(VERSION) | u64::from(kind >> 6) << 32));
    }
    said.extend_from_slice(bytes);
    channel::fuzzing::mailbox(&said, u64::from(kind) << 12).expect("memory");
});
