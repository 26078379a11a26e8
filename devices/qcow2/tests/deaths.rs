//! Kills and power cuts at every point of random operations, on many kinds of image: nothing that
//! was acknowledged is lost at a kill, nothing that was flushed at a cut, and `qemu-img check`
//! agrees.
//!
//! `MILLRACE_CUTS` is the number of cut points (2,000; the 100,000 in `make soak`), and
//! `MILLRACE_SEED` the seed; `MILLRACE_KIND` is one kind's name.

#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use common::{KINDS, World};

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn abuse_X_what_was_acknowledged_survives_kills_and_what_was_flushed_power_cuts() {
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let cuts = number("MILLRACE_CUTS", if soak { 100_000 } else { 2_000 });
    let seed = number("MILLRACE_SEED", 1);
    let only = std::env::var("MILLRACE_KIND").ok();
    let (mut done, mut round) = (0, 0);
    while done < cuts {
        for kind in KINDS.iter().filter(|kind| only.as_deref().is_none_or(|o| o == kind.name)) {
            let mut world = World::new(kind, seed + round);
            world.run(60);
            done += world.die_everywhere((cuts / KINDS.len() as u64 / 4).clamp(20, 400));
            println!("{}: seed {}, {done} cut points", kind.name, seed + round);
            round += 1;
            if done >= cuts {
                break;
            }
        }
    }
    println!("{done} cut points, {round} images");
}
