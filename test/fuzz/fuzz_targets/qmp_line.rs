//! A monitor that says anything: an answer or an error, and no more is kept than the limits say.
//! The answer is that of the last line with our number before the end of what came, as another
//! reader of JSON finds it.

#![cfg_attr(fuzzing, no_main)]

use harness::fuzz_target;
use serde_json::Value;

/// Lines up to the first that is no JSON; none if there is one.
fn lines(bytes: &[u8]) -> Option<Vec<Value>> {
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
    let lines = bytes[..whole].split_inclusive(|&byte| byte == b'\n');
    lines.map(|line| serde_json::from_slice(line).ok()).collect()
}

fuzz_target!(|bytes: &[u8]| {
    let answer = channel::fuzzing::qmp(bytes);
    let Some(lines) = lines(bytes) else { return };
    let ours = |line: &&Value| line.get("id").and_then(Value::as_u64) == Some(1);
    let Some(first) = lines.iter().find(ours) else {
        assert!(answer.is_err(), "{answer:?} of nothing");
        return;
    };
    // One answer: what follows it in the same piece may be another.
    if lines.iter().filter(ours).count() == 1 {
        assert_eq!(answer.ok().as_ref(), first.get("return"), "{first}");
    }
});
