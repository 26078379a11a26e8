//! Accelerator of the guests: KVM where it really runs one, else QEMU's emulator (TCG).
//!
//! A `/dev/kvm` may be there, and may be opened, and still run no guest: in the VMs of some clouds
//! a guest stands still in its firmware. So a guest is booted under it, within limits, and the
//! answer counts for the process; a file in the cache keeps it until the host boots again.
//!
//! What only the emulator needs is done only under it: a CPU without `erms` and `fsrm`, words of
//! the kernel's command line that save its boot time, room for a second CPU, second boots after
//! faults of its own, and long limits of a boot.

use std::fmt;
use std::fs::{self, File};
use std::path::Path;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;

use base::sync::lock;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::{Cache, LabError};

/// Environment variable that chooses: `auto`, `kvm` or `tcg`.
const CHOICE: &str = "MILLRACE_ACCEL";
/// The host's KVM.
const DEVICE: &str = "/dev/kvm";
/// The host's number of this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// CPU time in which a guest under KVM has long started: it takes one second. On a busy host that
/// is longer by the clock.
pub(crate) const PROBE_CPU: Duration = Duration::from_secs(5);
/// Time for a guest that stands still without using a CPU.
pub(crate) const PROBE_TIME: Duration = Duration::from_secs(60);
/// Longest boot under KVM, whatever limit a test has for the emulator.
const KVM_BOOT: Duration = Duration::from_secs(60);

/// Accelerator of a guest's CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The host's kernel.
    Kvm,
    /// QEMU's emulator.
    Tcg,
}

impl Accelerator {
    /// Phrase for reports: how the guests run.
    #[must_use]
    pub fn phrase(self) -> &'static str {
        match self {
            Self::Kvm => "guests run by KVM",
            Self::Tcg => "guests emulated (TCG)",
        }
    }

    /// Whether QEMU emulates the guest.
    #[must_use]
    pub fn is_emulator(self) -> bool {
        self == Self::Tcg
    }

    /// Limit of a boot for which an emulated guest has `time`.
    pub(crate) fn boot_time(self, time: Duration) -> Duration {
        match self {
            Self::Kvm => time.min(KVM_BOOT),
            Self::Tcg => time,
        }
    }

    /// Name of QEMU's accelerator, and the model of its CPU.
    pub(crate) fn qemu_words(self) -> (&'static str, &'static str) {
        match self {
            Self::Kvm => ("kvm", "host"),
            // With `rep movsb` TCG copies byte by byte and seems to hang.
            Self::Tcg => ("tcg", "max,-erms,-fsrm"),
        }
    }
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.qemu_words().0)
    }
}

/// Choice of an accelerator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccelChoice {
    /// KVM where it runs a guest, else the emulator.
    #[default]
    Auto,
    /// KVM, or nothing.
    Kvm,
    /// The emulator.
    Tcg,
}

impl AccelChoice {
    /// Choice by `MILLRACE_ACCEL`; auto if that is not set.
    ///
    /// # Errors
    /// It names none.
    pub fn from_env() -> Result<Self, LabError> {
        match std::env::var(CHOICE) {
            Ok(text) => text.parse().map_err(LabError::Refused),
            Err(_) => Ok(Self::default()),
        }
    }
}

impl FromStr for AccelChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "kvm" => Ok(Self::Kvm),
            "tcg" => Ok(Self::Tcg),
            _ => Err(format!("{CHOICE}={text:?}: auto, kvm or tcg")),
        }
    }
}

/// Whether KVM runs a guest here; if not, the reason.
pub(crate) type Answer = Result<(), String>;

/// An accelerator and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acceleration {
    /// Accelerator of all guests of this process.
    pub accelerator: Accelerator,
    /// Reason, for people.
    pub reason: String,
}

/// Accelerator by the environment, which this process keeps; `kvm` answers whether KVM runs a
/// guest.
pub(crate) fn of_process(
    kvm: impl FnOnce() -> Result<Answer, LabError>,
) -> Result<Acceleration, LabError> {
    static KEPT: Mutex<Option<Acceleration>> = Mutex::new(None);
    // Held meanwhile, so that only one guest finds it out.
    let mut kept = lock(&KEPT);
    if let Some(known) = &*kept {
        return Ok(known.clone());
    }
    let found = choose(AccelChoice::from_env()?, kvm)?;
    eprintln!("lab: {}: {}", found.accelerator.phrase(), found.reason);
    Ok(kept.insert(found).clone())
}

/// The accelerator of a choice; `kvm` answers whether KVM runs a guest, and is asked only where
/// that matters.
fn choose(
    choice: AccelChoice,
    kvm: impl FnOnce() -> Result<Answer, LabError>,
) -> Result<Acceleration, LabError> {
    let found = |accelerator, reason| Ok(Acceleration { accelerator, reason });
    match choice {
        AccelChoice::Tcg => found(Accelerator::Tcg, format!("{CHOICE}=tcg")),
        AccelChoice::Kvm => match kvm()? {
            Ok(()) => found(Accelerator::Kvm, format!("{CHOICE}=kvm")),
            Err(reason) => Err(LabError::Refused(format!(
                "{CHOICE}=kvm, but KVM runs no guest here: {reason}; without {CHOICE}, or with \
                 {CHOICE}=tcg, guests are emulated"
            ))),
        },
        AccelChoice::Auto => match kvm()? {
            Ok(()) => found(Accelerator::Kvm, "a guest has booted under it".into()),
            Err(reason) => found(Accelerator::Tcg, format!("KVM runs no guest here: {reason}")),
        },
    }
}

/// Whether KVM runs a guest, as the cache knows or else `probe` shows. `what` names QEMU and the
/// kernel.
pub(crate) fn answer(
    cache: &Cache,
    what: &str,
    probe: impl FnOnce() -> Result<Answer, LabError>,
) -> Result<Answer, LabError> {
    // The device alone says no, never yes.
    if let Err(error) = File::options().read(true).write(true).open(DEVICE) {
        return Ok(Err(format!("{DEVICE}: {error}")));
    }
    let boot = fs::read_to_string(BOOT_ID).map_err(LabError::io(format!("read {BOOT_ID}")))?;
    let name = format!("kvm-{}-{:016x}", boot.trim(), xxh3_64(what.as_bytes()));
    read(&cache.get(&name, |part| keep(part, &probe()?))?)
}

fn keep(path: &Path, answer: &Answer) -> Result<(), LabError> {
    let what = format!("write {}", path.display());
    let text = serde_json::to_vec(answer).map_err(|e| LabError::Refused(format!("{what}: {e}")))?;
    fs::write(path, text).map_err(LabError::io(what))
}

fn read(path: &Path) -> Result<Answer, LabError> {
    let what = format!("read {}", path.display());
    let text = fs::read(path).map_err(LabError::io(&what))?;
    let answer: Answer = serde_json::from_slice(&text)
        .map_err(|error| LabError::Refused(format!("{what}: {error}; run `lab clean`")))?;
    Ok(answer.map_err(|reason| format!("{reason} (kept in {} for this boot)", path.display())))
}

/// The answer that an error of the guest is, after so much CPU time; errors of others stay.
pub(crate) fn refusal(error: LabError, used: Option<Duration>) -> Result<Answer, LabError> {
    match error {
        LabError::GuestTimeout { .. } => {
            let used = used.unwrap_or_default().as_secs_f64();
            Ok(Err(format!("a guest had not started after {used:.1} s of CPU time")))
        }
        LabError::GuestDied { why, stderr, .. } => {
            let said = stderr.lines().last().unwrap_or_default();
            Ok(Err(format!("{why} {said}").trim_end().into()))
        }
        other => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no() -> Result<Answer, LabError> {
        Ok(Err("a guest stood still".into()))
    }

    fn unasked() -> Result<Answer, LabError> {
        panic!("KVM is not asked")
    }

    #[test]
    fn a_choice_is_one_of_three_words() {
        assert_eq!("auto".parse(), Ok(AccelChoice::Auto));
        assert_eq!("kvm".parse(), Ok(AccelChoice::Kvm));
        assert_eq!("tcg".parse(), Ok(AccelChoice::Tcg));
        let error = "xen".parse::<AccelChoice>().unwrap_err();
        assert_eq!(error, "MILLRACE_ACCEL=\"xen\": auto, kvm or tcg");
    }

    #[test]
    fn auto_takes_kvm_only_where_a_guest_has_booted_under_it() {
        let found = choose(AccelChoice::Auto, || Ok(Ok(()))).unwrap();
        assert_eq!(found.accelerator, Accelerator::Kvm);
        let found = choose(AccelChoice::Auto, no).unwrap();
        assert_eq!(found.accelerator, Accelerator::Tcg);
        assert_eq!(found.reason, "KVM runs no guest here: a guest stood still");
        assert_eq!(choose(AccelChoice::Tcg, unasked).unwrap().accelerator, Accelerator::Tcg);
    }

    #[test]
    fn kvm_that_was_asked_for_and_does_not_work_is_an_error_with_the_reason() {
        let found = choose(AccelChoice::Kvm, || Ok(Ok(()))).unwrap();
        assert_eq!(found.accelerator, Accelerator::Kvm);
        let error = choose(AccelChoice::Kvm, no).unwrap_err().to_string();
        assert!(error.starts_with("MILLRACE_ACCEL=kvm, but KVM runs no guest here: a guest stood"));
        assert!(error.contains("MILLRACE_ACCEL=tcg"), "{error}");
    }

    #[test]
    fn a_probe_that_could_not_be_made_is_no_answer() {
        for choice in [AccelChoice::Auto, AccelChoice::Kvm] {
            let broken = || Err(LabError::Refused("no kernel".into()));
            assert_eq!(choose(choice, broken).unwrap_err().to_string(), "no kernel");
        }
        assert!(refusal(LabError::Refused("no kernel".into()), None).is_err());
    }

    #[test]
    fn an_answer_is_kept_whole_and_says_where() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kvm");
        keep(&path, &Ok(())).unwrap();
        assert_eq!(read(&path).unwrap(), Ok(()));
        keep(&path, &Err("QEMU ended".into())).unwrap();
        let reason = read(&path).unwrap().unwrap_err();
        assert_eq!(reason, format!("QEMU ended (kept in {} for this boot)", path.display()));
    }

    #[test]
    fn a_guest_that_died_or_stood_still_tells_why() {
        let died = LabError::GuestDied {
            name: "kvm-probe".into(),
            why: "QEMU ended: exit status: 1".into(),
            console: String::new(),
            stderr: "first\nCould not access KVM kernel module".into(),
        };
        let reason = refusal(died, None).unwrap().unwrap_err();
        assert_eq!(reason, "QEMU ended: exit status: 1 Could not access KVM kernel module");
        let late = LabError::GuestTimeout {
            name: "kvm-probe".into(),
            what: "its start".into(),
            after: PROBE_TIME,
            console: String::new(),
        };
        let reason = refusal(late, Some(PROBE_CPU)).unwrap().unwrap_err();
        assert_eq!(reason, "a guest had not started after 5.0 s of CPU time");
    }

    #[test]
    fn only_the_emulator_has_long_boots_and_a_cpu_of_its_own() {
        let long = Duration::from_secs(3600);
        assert_eq!(Accelerator::Tcg.boot_time(long), long);
        assert_eq!(Accelerator::Kvm.boot_time(long), KVM_BOOT);
        assert_eq!(Accelerator::Kvm.qemu_words(), ("kvm", "host"));
        assert_eq!(Accelerator::Tcg.qemu_words(), ("tcg", "max,-erms,-fsrm"));
    }
}
