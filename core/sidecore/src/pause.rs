//! Waits of a polling thread between two empty rounds.

use base::cpu::has_waitpkg;

/// Kind of wait between two empty rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pause {
    /// Best wait of the CPU: `C01` where there is WAITPKG, else `Spin`.
    #[default]
    Auto,
    /// The instruction `pause`: some ten to hundred cycles, no power saved to speak of.
    Spin,
    /// `tpause` into C0.1: less power, and more of the core for its other hyper-thread.
    C01,
    /// `tpause` into C0.2: still less power, and slower to leave.
    C02,
}

/// Empty rounds that are polled at full speed: a packet that comes soon is met at once.
const EAGER_ROUNDS: u32 = 64;

/// Length of one `tpause` in cycles of the time-stamp counter: about a microsecond, which is added
/// to the latency of what comes meanwhile. The kernel's own limit is 100,000
/// (`/sys/devices/system/cpu/umwait_control`).
const PAUSE_TSC_CYCLES: u64 = 2000;

impl Pause {
    /// Resolves it to a wait that this CPU has: never `Auto`.
    pub fn resolve(self) -> Self {
        match self {
            Self::Auto | Self::C01 if has_waitpkg() => Self::C01,
            Self::C02 if has_waitpkg() => Self::C02,
            _ => Self::Spin,
        }
    }

    /// Waits a moment, after `idle_rounds` empty rounds. `self` was resolved.
    #[inline]
    pub(crate) fn wait(self, idle_rounds: u32) {
        match self {
            Self::C01 if idle_rounds > EAGER_ROUNDS => tpause(1),
            Self::C02 if idle_rounds > EAGER_ROUNDS => tpause(0),
            _ => std::hint::spin_loop(),
        }
    }
}

/// Waits in C0.1 (`state` 1) or C0.2 (0) until the time-stamp counter has moved on, or for less: an
/// interrupt ends it.
#[cfg(target_arch = "x86_64")]
fn tpause(state: u32) {
    // SAFETY: reads a counter; every x86-64 has it.
    let until = unsafe { std::arch::x86_64::_rdtsc() }.wrapping_add(PAUSE_TSC_CYCLES);
    // SAFETY: reached only where `has_waitpkg` said yes; it touches no memory and changes flags
    // only.
    unsafe {
        std::arch::asm!(
            "tpause {state:e}",
            state = in(reg) state,
            in("edx") (until >> 32) as u32,
            in("eax") until as u32,
            options(nomem, nostack),
        );
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn tpause(_state: u32) {
    let _ = PAUSE_TSC_CYCLES;
    std::hint::spin_loop();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_instruction_it_is_never_used() {
        for pause in [Pause::Auto, Pause::Spin, Pause::C01, Pause::C02] {
            let resolved = pause.resolve();
            assert_eq!(resolved == Pause::Spin, !has_waitpkg() || pause == Pause::Spin);
            // Where there is one, this runs it.
            (0..2 * EAGER_ROUNDS).for_each(|round| resolved.wait(round));
        }
    }
}
