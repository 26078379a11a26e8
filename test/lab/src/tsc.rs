//! How fast the time stamp counter runs that emulated guests read: the host's own.
//!
//! Linux measures it against an emulated timer while it boots. Where the host is busy, it comes to
//! wrong ends: of eight guests that booted at once one found 307 MHz for 2,594, and all its clocks
//! ran eight times too fast for as long as it lived. So it is measured here, and told to the guest.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Long enough for a ten-thousandth.
const MEASURE: Duration = Duration::from_millis(50);
/// Readings, of which the one counts that was interrupted least.
const READINGS: u32 = 100;
/// Frequencies that processors have. Anything else was not measured.
const POSSIBLE_KHZ: std::ops::Range<u32> = 500_000..10_000_000;

/// Measured once. None: the guest finds out by itself.
pub(crate) fn khz() -> Option<u32> {
    static KHZ: OnceLock<Option<u32>> = OnceLock::new();
    *KHZ.get_or_init(measure)
}

fn measure() -> Option<u32> {
    let (first, began) = reading()?;
    std::thread::sleep(MEASURE);
    let (last, ended) = reading()?;
    let ticks = last.checked_sub(first)? as f64;
    let khz = (ticks / ended.duration_since(began).as_secs_f64() / 1e3).round() as u32;
    POSSIBLE_KHZ.contains(&khz).then_some(khz)
}

/// The counter, and the time at which it was read.
fn reading() -> Option<(u64, Instant)> {
    let once = |_| {
        let before = Instant::now();
        let ticks = counter()?;
        Some((before.elapsed(), ticks, before))
    };
    let (took, ticks, before) = (0..READINGS).filter_map(once).min_by_key(|(took, ..)| *took)?;
    Some((ticks, before + took / 2))
}

#[cfg(target_arch = "x86_64")]
fn counter() -> Option<u64> {
    // SAFETY: every x86-64 CPU has the instruction, and it touches no memory.
    Some(unsafe { std::arch::x86_64::_rdtsc() })
}

/// Guests are x86, and read something that QEMU makes.
#[cfg(not(target_arch = "x86_64"))]
fn counter() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn two_measurements_agree() {
        let [one, two] = [measure().unwrap(), measure().unwrap()];
        assert!(one.abs_diff(two) < one / 200, "{one} and {two} kHz");
    }
}
