//! State of a guest's CPUs, as QEMU's monitor shows it.

use std::time::Duration;

/// Time between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// State of one CPU at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub(crate) number: usize,
    /// Line of its instruction pointer, flags, and whether it has halted.
    pub(crate) pointer: String,
    /// Vectors of interrupts in service, as text; empty if there are none.
    pub(crate) in_service: String,
    /// Vectors of interrupts requested, as text.
    requested: String,
}

impl Cpu {
    /// Looks at all CPUs, by commands of QEMU's monitor for people.
    pub(crate) fn look(monitor: impl Fn(&str) -> String) -> Vec<Self> {
        Self::all(&monitor("info registers -a"), |cpu| monitor(&format!("info lapic {cpu}")))
    }

    /// Reads what `info registers -a` says, and `info lapic` of each CPU by its number.
    fn all(registers: &str, lapic: impl Fn(usize) -> String) -> Vec<Self> {
        let pointers = registers.lines().map(str::trim).filter(|line| line.starts_with("RIP="));
        let cpu = |(number, pointer): (usize, &str)| {
            let controller = lapic(number);
            let vectors = |register: &str| {
                let line = controller.lines().find_map(|line| line.trim().strip_prefix(register));
                let words = line.unwrap_or_default().split_ascii_whitespace();
                words.filter(|word| *word != "(none)").collect::<Vec<_>>().join(" ")
            };
            let (in_service, requested) = (vectors("ISR"), vectors("IRR"));
            Self { number, pointer: pointer.into(), in_service, requested }
        };
        pointers.enumerate().map(cpu).collect()
    }

    /// Lines that show its interrupts in service and requested.
    pub(crate) fn interrupts(&self) -> [String; 2] {
        let line = |register: &str, vectors: &str| {
            let vectors = if vectors.is_empty() { "(none)" } else { vectors };
            format!("CPU {} {register} {vectors}", self.number)
        };
        [line("ISR", &self.in_service), line("IRR", &self.requested)]
    }

    /// Whether it has halted with an interrupt in service.
    pub(crate) fn has_halted_in_service(&self) -> bool {
        self.pointer.contains("HLT=1") && !self.in_service.is_empty()
    }
}

/// Looks at the CPUs twice; the second look comes a moment later.
pub(crate) fn look_twice(look: impl Fn() -> Vec<Cpu>) -> [Vec<Cpu>; 2] {
    let first = look();
    std::thread::sleep(LOOK_AGAIN);
    [first, look()]
}

/// The first CPU that has halted with interrupts in service in both looks alike, and their vectors.
///
/// Such a CPU takes no other interrupt of the class or below, and a kernel halts only when all
/// handlers have ended: the end of that interrupt has been lost.
pub(crate) fn stuck(looks: &[Vec<Cpu>; 2]) -> Option<(usize, String)> {
    let same = looks[0].iter().zip(&looks[1]).filter(|(before, after)| {
        before.pointer == after.pointer && before.in_service == after.in_service
    });
    let (_, cpu) = same.into_iter().find(|(_, after)| after.has_halted_in_service())?;
    Some((cpu.number, cpu.in_service.clone()))
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case)]

    use super::*;

    /// Two CPUs of a guest whose boot hung.
    const REGISTERS: &str = "\r\nCPU#0\r\nRAX=0000000000000000 RBX=0000000000000000\r\n\
        RIP=ffffffff81a17a0b RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\r\n\
        CPU#1\r\nRAX=0000000000000000 RBX=0000000000000000\r\n\
        RIP=ffffffff81a17a0b RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\r\n";
    const IDLE: &str = "dumping local APIC state for CPU 0\r\n\r\nISR\t (none)\r\nIRR\t (none)\r\n";
    const HUNG: &str =
        "dumping local APIC state for CPU 1\r\n\r\nISR\t 236\r\nIRR\t 34 35 36 236\r\n";

    fn look(registers: &str, second: &str) -> Vec<Cpu> {
        Cpu::all(registers, |cpu| [IDLE, second][cpu].into())
    }

    #[test]
    fn interrupts_in_service_and_requested_are_read() {
        let hung = look(REGISTERS, HUNG);
        assert_eq!(hung[0].interrupts(), ["CPU 0 ISR (none)", "CPU 0 IRR (none)"]);
        assert_eq!(hung[1].interrupts(), ["CPU 1 ISR 236", "CPU 1 IRR 34 35 36 236"]);
        assert!(!hung[0].has_halted_in_service() && hung[1].has_halted_in_service());
    }

    #[test]
    fn abuse_G2_a_cpu_without_the_end_of_its_interrupt_is_known() {
        let hung = look(REGISTERS, HUNG);
        assert_eq!(stuck(&[hung.clone(), hung.clone()]), Some((1, "236".into())));
        // In its handler, or idle, or elsewhere a moment later: the guest only is slow.
        let running = look(&REGISTERS.replace("HLT=1", "HLT=0"), HUNG);
        assert_eq!(stuck(&[running.clone(), running]), None);
        let idle = look(REGISTERS, IDLE);
        assert_eq!(stuck(&[hung.clone(), idle.clone()]), None);
        assert_eq!(stuck(&[idle.clone(), idle]), None);
        let elsewhere = look(&REGISTERS.replace("RIP=ffffffff81a17a0b", "RIP=0"), HUNG);
        assert_eq!(stuck(&[elsewhere, hung]), None);
        // QEMU's monitor does not answer.
        assert_eq!(stuck(&[Vec::new(), Vec::new()]), None);
    }
}
