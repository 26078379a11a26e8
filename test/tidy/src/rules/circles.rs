//! `circles`: no circle of imports has more than a pair of files.

use crate::circles::Circle;
use crate::config::Config;
use crate::finding::Finding;

/// Name of the rule.
pub const NAME: &str = "circles";

/// Finds circles that are too large.
pub fn find(circles: &[Circle], config: &Config, out: &mut Vec<Finding>) {
    let limit = config.limits.circle_files;
    for circle in circles {
        let size = circle.files.len();
        if size > limit {
            let files = circle.files.join(", ");
            let text =
                format!("{size} files import each other in a circle, limit {limit}: {files}");
            out.push(Finding::new(NAME, &circle.files[0], 1, text).sized(size));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::found;

    const MANIFEST: (&str, &str) = ("x/Cargo.toml", "[package]\nname = 'x'");

    #[test]
    fn a_circle_of_three_files_is_found() {
        let seen = found(
            NAME,
            &[
                MANIFEST,
                ("x/src/lib.rs", "mod a; mod b; mod c;"),
                ("x/src/a.rs", "pub struct A(super::b::B);"),
                ("x/src/b.rs", "pub struct B; fn f() { crate::c::run() }"),
                ("x/src/c.rs", "use crate::a::A; pub fn run(_: A) {}"),
            ],
        );
        let files = "x/src/a.rs, x/src/b.rs, x/src/c.rs";
        let text = format!("3 files import each other in a circle, limit 2: {files}");
        assert_eq!(seen, [format!("x/src/a.rs:1: {text}")]);
    }

    #[test]
    fn a_pair_is_allowed() {
        let seen = found(
            NAME,
            &[
                MANIFEST,
                ("x/src/lib.rs", "mod a; mod b;"),
                ("x/src/a.rs", "pub struct A(super::b::B);"),
                ("x/src/b.rs", "pub struct B; fn f(_: crate::a::A) {}"),
            ],
        );
        assert!(seen.is_empty(), "{seen:?}");
    }
}
