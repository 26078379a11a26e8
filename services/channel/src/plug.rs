//! Hot-plug over QMP, into root ports that the VM was started with.
//!
//! A VM has `pcie-root-port`s whose ids begin with a prefix; each takes one device. What we plug
//! can be told by its id ([`DevicePart::of`]), so that a later daemon finds it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::registry::PluggedDevice;
use base::event::Event;
use serde_json::{Value, json};

use crate::error::{PlugError, QmpError};
use crate::qmp::Qmp;

/// Id of the doorbell.
const BELL_ID: &str = "millrace-bell";
/// Prefix of the ids of peers' memory; the peer's index and a number follow.
const MEMORY_PREFIX: &str = "millrace-peer";
/// Most root ports of a VM that are looked at.
const MAX_PORTS: usize = 64;
/// Descriptor numbers to occupy beyond those that matter: QEMU gives out the lowest first.
const SPARE_NUMBERS: u32 = 10;
/// Path of devices with an id in QEMU.
const PERIPHERAL: &str = "/machine/peripheral";
/// Type of a root port there.
const ROOT_PORT: &str = "child<pcie-root-port>";

/// Device of ours in a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DevicePart {
    /// Doorbell, with the mailbox.
    Bell,
    /// Memory of the member with this index.
    Memory(usize),
}

impl DevicePart {
    /// Makes an id for the device, and for the character device or memory object behind it. QEMU
    /// ends itself over memory with the name of one that it has not quite forgotten, which may be
    /// long after its object and device are gone: so each memory has a new name. (A doorbell's
    /// character device is not let go before all of it is gone.)
    pub fn new_id(self) -> String {
        match self {
            Self::Bell => BELL_ID.into(),
            Self::Memory(index) => format!("{MEMORY_PREFIX}{index}-{:x}", unique()),
        }
    }

    /// Finds the part with this id; none if it is none of ours.
    pub fn of(id: &str) -> Option<Self> {
        if id == BELL_ID {
            return Some(Self::Bell);
        }
        let (index, _) = id.strip_prefix(MEMORY_PREFIX)?.split_once('-')?;
        Some(Self::Memory(index.parse().ok()?))
    }

    /// Record for the registry.
    pub fn record(self, id: &str, root_port: Option<&str>) -> PluggedDevice {
        let behind = Some(id.to_owned());
        let (object, chardev) = match self {
            Self::Bell => (None, behind),
            Self::Memory(_) => (behind, None),
        };
        let root_port = root_port.map(str::to_owned);
        PluggedDevice { device: id.into(), object, chardev, root_port }
    }
}

/// Makes a number that no other call has returned, in this daemon or an earlier one.
fn unique() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(since_1970.as_nanos()).unwrap_or_default();
    let next = |last: u64| Some(now.max(last + 1));
    LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
        .map_or(now, |last| now.max(last + 1))
}

/// Location of a plugged device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceLocation {
    /// Id of the device.
    pub id: String,
    /// Id of the root port.
    pub port: String,
    /// Physical slot number of the root port.
    pub slot: u32,
}

/// Finds the first free root port, for a device with this id.
fn free_port(qmp: &mut Qmp, prefix: &str, id: &str) -> Result<DeviceLocation, PlugError> {
    let mut ports: Vec<String> = list(qmp, PERIPHERAL)?
        .into_iter()
        .filter(|(name, kind)| kind == ROOT_PORT && name.starts_with(prefix))
        .map(|(name, _)| name)
        .collect();
    // So that "x10" comes after "x9".
    ports.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
    ports.truncate(MAX_PORTS);
    for port in &ports {
        // A bus has the id of its port; what is on it are its links `child[N]`.
        let bus = list(qmp, &format!("{PERIPHERAL}/{port}/{port}"))?;
        if bus.iter().any(|(name, _)| name.starts_with("child[")) {
            continue;
        }
        let path = format!("{PERIPHERAL}/{port}");
        let slot = qmp.run("qom-get", json!({"path": path, "property": "slot"}))?;
        let slot = slot.as_u64().and_then(|slot| u32::try_from(slot).ok());
        let slot =
            slot.ok_or_else(|| unexpected("qom-get", "a root port without a slot number"))?;
        return Ok(DeviceLocation { id: id.into(), port: port.clone(), slot });
    }
    Err(PlugError::NoPort { prefix: prefix.into(), count: ports.len() })
}

/// Lists names and types below a path of QEMU's objects.
fn list(qmp: &mut Qmp, path: &str) -> Result<Vec<(String, String)>, QmpError> {
    let answer = qmp.run("qom-list", json!({"path": path}))?;
    let entries = answer.as_array().ok_or_else(|| unexpected("qom-list", "no list"))?;
    let text = |entry: &Value, key| entry[key].as_str().unwrap_or_default().to_owned();
    Ok(entries.iter().map(|entry| (text(entry, "name"), text(entry, "type"))).collect())
}

fn unexpected(command: &'static str, why: &str) -> QmpError {
    QmpError::BadLine { command, why: format!("the answer is {why}") }
}

/// Plugs the doorbell, whose server is at the other end of `connection`. What the server says at
/// the beginning must be there already: QEMU waits for it with everything stopped.
pub(crate) fn plug_bell(
    qmp: &mut Qmp,
    prefix: &str,
    connection: BorrowedFd<'_>,
    vectors: u32,
) -> Result<DeviceLocation, PlugError> {
    let id = DevicePart::Bell.new_id();
    let place = free_port(qmp, prefix, &id)?;
    qmp.run_with_fd("getfd", json!({"fdname": id}), connection)?;
    let address = json!({"type": "fd", "data": {"str": id}});
    let backend = json!({"type": "socket", "data": {"addr": address, "server": false}});
    if let Err(error) = qmp.run("chardev-add", json!({"id": id, "backend": backend})) {
        // Taken by the command if it got so far; what is left is closed with the monitor.
        let _ = qmp.run("closefd", json!({"fdname": id}));
        return Err(error.into());
    }
    let device = json!({
        "driver": "ivshmem-doorbell", "id": id, "chardev": id, "vectors": vectors,
        "bus": place.port,
    });
    if let Err(error) = qmp.run("device_add", device) {
        let _ = qmp.run("chardev-remove", json!({"id": id}));
        return Err(error.into());
    }
    Ok(place)
}

/// Plugs the first `window_len` bytes (a power of two, at most the file's length) of a memory file,
/// for reading.
pub(crate) fn plug_memory(
    qmp: &mut Qmp,
    prefix: &str,
    id: &str,
    file: BorrowedFd<'_>,
    window_len: u64,
) -> Result<DeviceLocation, PlugError> {
    let place = free_port(qmp, prefix, id)?;
    let added = qmp.run_with_fd("add-fd", json!({}), file.as_fd())?;
    let fd = added["fd"].as_u64().ok_or_else(|| unexpected("add-fd", "without a number"))?;
    // QEMU 7.2 cannot open /dev/fdset for memory; its own descriptor has a name, too.
    let object = json!({
        "qom-type": "memory-backend-file", "id": id, "mem-path": format!("/proc/self/fd/{fd}"),
        "size": window_len, "share": true, "readonly": true,
    });
    let made = qmp.run("object-add", object);
    // The object has its own descriptor now, or never will.
    let removed = qmp.run("remove-fd", json!({"fdset-id": added["fdset-id"]}));
    made?;
    removed?;
    let device = json!({"driver": "ivshmem-plain", "id": id, "memdev": id, "bus": place.port});
    if let Err(error) = qmp.run("device_add", device) {
        let _ = qmp.run("object-del", json!({"id": id}));
        return Err(error.into());
    }
    Ok(place)
}

/// Whether the VM runs without KVM.
pub(crate) fn is_emulated(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let answer = qmp.run("query-kvm", json!({}))?;
    Ok(answer["enabled"] != true)
}

/// Occupies descriptor numbers that an unplugged doorbell had. Without KVM, QEMU (7.2 and today's)
/// goes on to watch the numbers of a doorbell's eventfds after it has closed them and freed what it
/// would do then: the first readable file with such a number ends it. So silent ones get the
/// numbers, for as long as this QEMU lives.
pub(crate) fn occupy_numbers(qmp: &mut Qmp, vectors: u32) -> Result<(), QmpError> {
    let silent = Event::new().map_err(|source| QmpError::Io { command: "getfd", source })?;
    for _ in 0..vectors + SPARE_NUMBERS {
        // A name that was used would give its number back.
        let name = format!("millrace-hold-{:x}", unique());
        match qmp.run_with_fd("getfd", json!({"fdname": name}), silent.as_fd()) {
            Err(error) if error.is_final() => return Err(error),
            Err(error) => {
                tracing::warn!("descriptor number of an unplugged doorbell not occupied: {error}")
            }
            Ok(_) => {}
        }
    }
    Ok(())
}

/// Asks the guest to let a device go. True when there is no such device (any more); else
/// `DEVICE_DELETED` will say so, if the guest does what it is asked.
pub(crate) fn ask_to_unplug(qmp: &mut Qmp, device: &str) -> Result<bool, QmpError> {
    match qmp.run("device_del", json!({"id": device})) {
        Err(QmpError::Refused { class, .. }) if class == "DeviceNotFound" => Ok(true),
        // "already in the process of unplug", "guest is busy", no answer: asked again later.
        Err(error) if !error.is_final() => {
            tracing::debug!(device, "{error}");
            Ok(false)
        }
        other => other.map(|_| false),
    }
}

/// Removes what was behind a device that is gone. True when nothing is left: right after
/// `DEVICE_DELETED` QEMU may still be using it.
pub(crate) fn remove_rest(qmp: &mut Qmp, device: &PluggedDevice) -> Result<bool, QmpError> {
    let mut done = true;
    for (command, id) in [("object-del", &device.object), ("chardev-remove", &device.chardev)] {
        let Some(id) = id else { continue };
        match qmp.run(command, json!({"id": id})) {
            Ok(_) => {}
            Err(QmpError::Refused { text, .. }) => done &= text.ends_with("not found"),
            Err(error) if !error.is_final() => done = false,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Finds devices with identifiers of ours, and memory objects without a device.
pub(crate) fn leftovers(qmp: &mut Qmp) -> Result<Vec<PluggedDevice>, QmpError> {
    let mut found = Vec::new();
    for path in [PERIPHERAL, "/objects"] {
        for (name, _) in list(qmp, path)? {
            let Some(part) = DevicePart::of(&name) else { continue };
            let record = part.record(&name, None);
            if !found.contains(&record) {
                found.push(record);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_new_and_known_again() {
        assert_eq!(DevicePart::of(&DevicePart::Bell.new_id()), Some(DevicePart::Bell));
        let ids = [DevicePart::Memory(31).new_id(), DevicePart::Memory(31).new_id()];
        assert_ne!(ids[0], ids[1]);
        assert!(ids.iter().all(|id| DevicePart::of(id) == Some(DevicePart::Memory(31))));
        for foreign in ["millrace0", "millrace-bell2", "millrace-peer1", "millrace-peer-1", "bell"]
        {
            assert_eq!(DevicePart::of(foreign), None, "{foreign}");
        }
        let record = DevicePart::Memory(2).record(&ids[0], Some("millrace1"));
        assert!(record.device.len() <= crate::registry::MAX_NAME_LEN_BYTES);
        assert_eq!((&record.object, record.chardev), (&Some(ids[0].clone()), None));
    }
}
