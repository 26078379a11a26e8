//! Problems of a config, for tests that expect them.

use std::path::Path;

use config::parse;

/// The problems of a config in `m.toml`, as they are told.
pub fn errors(text: &str) -> Vec<String> {
    let problems = parse(Path::new("m.toml"), text).expect_err(text);
    problems.problems.iter().map(ToString::to_string).collect()
}

/// The config has these problems, in order: where, and words of the text.
#[track_caller]
pub fn expect(text: &str, expected: &[(&str, &str)]) {
    let found = errors(text);
    assert_eq!(found.len(), expected.len(), "{text}\n=> {found:#?}");
    for (problem, (place, words)) in found.iter().zip(expected) {
        assert!(problem.starts_with(place), "{text}\n=> {problem}\nnot at {place}");
        assert!(problem.contains(words), "{text}\n=> {problem}\nwithout {words}");
    }
}
