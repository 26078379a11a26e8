//! Input of any kind for `module restore` or `module verify`: a whole copy, or an error; no panic,
//! and no more memory than a record may have. The magic and the last record's hash are put in, so
//! that the rest is looked at.

#![cfg_attr(fuzzing, no_main)]

use harness::fuzz_target;
use modules::copy::{CopyError, MAGIC, pass};

/// The input as records: heads whose kinds and lengths are near those that there may be.
fn mended(mut bytes: &[u8]) -> Vec<u8> {
    let mut all = MAGIC.to_vec();
    while let Some((head, rest)) = bytes.split_at_checked(24) {
        let mut head = head.to_vec();
        head[0] %= 8;
        head[1..4].fill(0);
        head[6..8].fill(0);
        let len = (head[16] as usize).min(rest.len());
        let zero = head[0] == 3;
        if !zero {
            head[16..24].copy_from_slice(&(len as u64).to_le_bytes());
        }
        all.extend_from_slice(&head);
        let (body, rest) = rest.split_at(if zero { 0 } else { len });
        all.extend_from_slice(body);
        bytes = rest;
    }
    all
}

fuzz_target!(|bytes: &[u8]| {
    let _ = pass(&mut &bytes[..], &mut std::io::sink());
    let mended = mended(bytes);
    let mut passed = Vec::new();
    match pass(&mut &mended[..], &mut passed) {
        Ok(summary) => assert_eq!(summary.copy_bytes as usize, mended.len()),
        Err(CopyError::Damaged { at, .. }) => assert!(at as usize <= mended.len()),
        Err(_) => {}
    }
    assert_eq!(passed, mended[..passed.len()]);
});
