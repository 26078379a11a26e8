//! Boots of guests, past the faults of the emulator alone.

use std::time::Duration;

use crate::{Guest, GuestBuilder, Lab, LabError};

/// Boots all guests at once, as [`boot_all`].
///
/// # Errors
/// As [`boot_all`].
pub fn boot<const N: usize>(
    lab: &Lab,
    guests: [GuestBuilder; N],
    time: Duration,
) -> Result<[Guest; N], LabError> {
    let guests = boot_all(lab, guests.into(), time)?;
    guests.try_into().map_err(|_| LabError::Refused("a guest got lost".into()))
}

/// Boots all guests at once and waits for their agents, `time` for each. One that the emulator ends
/// or hangs by a fault of its own ([`LabError::is_emulators_fault_at_boot`]) is started once more,
/// which standard error tells.
///
/// # Errors
/// Those of [`GuestBuilder::start`] and [`Guest::wait_ready`].
pub fn boot_all(
    lab: &Lab,
    guests: Vec<GuestBuilder>,
    time: Duration,
) -> Result<Vec<Guest>, LabError> {
    let start = |builder: GuestBuilder| Ok((builder.clone(), builder.start(lab)?));
    let started = guests.into_iter().map(start).collect::<Result<Vec<_>, LabError>>()?;
    let ready = |(builder, guest): (GuestBuilder, Guest)| match guest.wait_ready(time) {
        Err(error) if error.is_emulators_fault_at_boot() => {
            eprintln!("started once more: {error}");
            drop(guest);
            let guest = builder.start(lab)?;
            guest.wait_ready(time)?;
            Ok(guest)
        }
        ready => ready.map(|()| guest),
    };
    started.into_iter().map(ready).collect()
}
