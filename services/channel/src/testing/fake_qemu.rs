//! A monitor that keeps books like QEMU's, and a guest behind it that a test plays.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Nothing in a test takes so long.
const LONG: Duration = Duration::from_secs(60);

/// State of the fake QEMU.
#[derive(Debug, Default)]
pub(crate) struct Books {
    /// Root ports and their slots.
    pub ports: BTreeMap<String, u32>,
    /// Devices: driver and bus.
    pub devices: BTreeMap<String, (String, String)>,
    /// Memory: a descriptor and bytes of it.
    pub objects: BTreeMap<String, (OwnedFd, u64)>,
    pub chardevs: BTreeMap<String, OwnedFd>,
    /// Devices that the guest does not let go.
    pub stubborn: BTreeSet<String>,
    /// Commands that are refused.
    pub refused: BTreeMap<String, String>,
    /// Commands as they came.
    pub log: Vec<String>,
    pub has_kvm: bool,
    pub named_fds: BTreeMap<String, OwnedFd>,
    fdsets: BTreeMap<u64, OwnedFd>,
    connection: Option<UnixStream>,
}

impl Books {
    /// Whether the memory of the member with this index is there.
    pub fn has_memory_of(&self, index: usize) -> bool {
        self.memory_of(index).is_some()
    }

    fn memory_of(&self, index: usize) -> Option<String> {
        let of = |id: &&String| id.starts_with(&format!("millrace-peer{index}-"));
        self.objects.keys().find(of).cloned()
    }
}

/// A process that is none.
pub(crate) struct FakeQemu {
    books: Arc<(Mutex<Books>, Condvar)>,
    path: PathBuf,
    _folder: TempDir,
}

impl FakeQemu {
    /// One with so many root ports, `millrace0` in slot 10 and so on.
    pub fn new(ports: u32) -> Self {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let mut books = Books::default();
        books.ports.extend((0..ports).map(|n| (format!("millrace{n}"), 10 + n)));
        books.ports.insert("other0".into(), 99);
        let books = Arc::new((Mutex::new(books), Condvar::new()));
        let theirs = books.clone();
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                theirs.0.lock().unwrap().connection = Some(stream.try_clone().unwrap());
                serve(&theirs, stream);
            }
        });
        Self { books, path, _folder: folder }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn books(&self) -> MutexGuard<'_, Books> {
        self.books.0.lock().unwrap()
    }

    /// The id of the memory of the member with this index.
    pub fn memory_of(&self, index: usize) -> Option<String> {
        self.books().memory_of(index)
    }

    /// Waits until the books say so.
    pub fn wait_for(&self, what: &str, so: impl Fn(&Books) -> bool) {
        let (books, changed) = &*self.books;
        let waited = changed.wait_timeout_while(books.lock().unwrap(), LONG, |books| !so(books));
        let (books, late) = waited.unwrap();
        assert!(!late.timed_out(), "{what}: {books:#?}");
    }

    /// The monitor says something by itself.
    pub fn event(&self, event: &Value) {
        writeln!(self.books().connection.as_ref().unwrap(), "{event}").unwrap();
    }

    /// The guest lets a device go.
    pub fn let_go(&self, device: &str) {
        let mut books = self.books();
        books.stubborn.remove(device);
        books.devices.remove(device).unwrap();
        writeln!(books.connection.as_ref().unwrap(), "{}", deleted(device)).unwrap();
    }

    /// Ends QEMU as if it was killed.
    pub fn kill(&self) {
        let mut books = self.books();
        let connection = books.connection.take().unwrap();
        connection.shutdown(std::net::Shutdown::Both).unwrap();
        books.devices.clear();
        books.chardevs.clear();
        books.objects.clear();
    }
}

fn deleted(device: &str) -> Value {
    let path = format!("/machine/peripheral/{device}");
    json!({"event": "DEVICE_DELETED", "data": {"device": device, "path": path}})
}

fn serve(books: &(Mutex<Books>, Condvar), mut stream: UnixStream) {
    // Somebody may only have looked whether we are there.
    let _ = stream.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n");
    let (mut buffer, mut fds) = (Vec::new(), Vec::new());
    while receive(&stream, &mut buffer, &mut fds) {
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = buffer.drain(..=end).collect();
            let line: Value = serde_json::from_slice(&line).unwrap();
            let mut locked = books.0.lock().unwrap();
            let command = line["execute"].as_str().unwrap();
            locked.log.push(command.to_owned());
            let answer = match locked.refused.get(command) {
                Some(text) => Err(("GenericError", text.clone())),
                None => answer(&mut locked, command, &line["arguments"], &mut fds),
            };
            let answer = match answer {
                Ok(value) => json!({"return": value, "id": line["id"]}),
                Err((class, text)) => {
                    json!({"error": {"class": class, "desc": text}, "id": line["id"]})
                }
            };
            // A killed one answers nobody.
            let _ = writeln!(stream, "{answer}");
            let device = line["arguments"]["id"].as_str().unwrap_or_default();
            if command == "device_del" && !locked.stubborn.contains(device) {
                locked.devices.remove(device);
                let _ = writeln!(stream, "{}", deleted(device));
            }
            books.1.notify_all();
        }
    }
    let mut locked = books.0.lock().unwrap();
    // As QEMU does when a monitor is closed; it keeps those with a name.
    locked.fdsets.clear();
    books.1.notify_all();
}

fn receive(stream: &UnixStream, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4096];
    let mut into = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg(stream, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more);
        }
    }
    let count = got.map_or(0, |got| got.bytes);
    buffer.extend_from_slice(&bytes[..count]);
    count > 0
}

type Answer = Result<Value, (&'static str, String)>;

fn answer(books: &mut Books, command: &str, arguments: &Value, fds: &mut Vec<OwnedFd>) -> Answer {
    let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
    let no = |text: String| Err(("GenericError", text));
    let id = text("id");
    match command {
        "qmp_capabilities" => {}
        "query-kvm" => return Ok(json!({"enabled": books.has_kvm, "present": true})),
        "qom-list" => return Ok(list(books, &text("path"))),
        "qom-get" => {
            assert_eq!(text("property"), "slot");
            let path = text("path");
            return Ok(json!(books.ports[path.rsplit('/').next().unwrap()]));
        }
        "getfd" => {
            books.named_fds.insert(text("fdname"), fds.remove(0));
        }
        "closefd" => {
            books.named_fds.remove(&text("fdname"));
        }
        "add-fd" => {
            let fd = fds.remove(0);
            let number = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&fd)).unwrap();
            books.fdsets.insert(number, fd);
            return Ok(json!({"fd": number, "fdset-id": number}));
        }
        "remove-fd" => {
            books.fdsets.remove(&arguments["fdset-id"].as_u64().unwrap()).unwrap();
        }
        "chardev-add" => {
            let name = &arguments["backend"]["data"]["addr"]["data"]["str"];
            assert_eq!(arguments["backend"]["data"]["server"], false);
            let fd = books.named_fds.remove(name.as_str().unwrap()).unwrap();
            books.chardevs.insert(id, fd);
        }
        "chardev-remove" if !books.chardevs.contains_key(&id) => {
            return no(format!("Chardev '{id}' not found"));
        }
        "chardev-remove" if books.devices.contains_key(&id) => {
            return no(format!("Chardev '{id}' is busy"));
        }
        "chardev-remove" => {
            books.chardevs.remove(&id);
        }
        "object-add" => return add_object(books, id, arguments),
        "object-del" if books.objects.remove(&id).is_none() => {
            return no(format!("object '{id}' not found"));
        }
        "object-del" => assert!(!books.devices.contains_key(&id)),
        "device_add" => return add_device(books, id, text("driver"), text("bus"), arguments),
        "device_del" if !books.devices.contains_key(&id) => {
            return Err(("DeviceNotFound", format!("Device '{id}' not found")));
        }
        "device_del" => {}
        other => {
            return Err(("CommandNotFound", format!("The command {other} has not been found")));
        }
    }
    Ok(json!({}))
}

fn list(books: &Books, path: &str) -> Value {
    let entry = |name: &str, kind: &str| json!({"name": name, "type": kind});
    let mut entries = vec![entry("type", "string")];
    match path {
        "/machine/peripheral" => {
            entries.extend(books.ports.keys().map(|id| entry(id, "child<pcie-root-port>")));
            let devices = books.devices.iter();
            entries.extend(devices.map(|(id, (kind, _))| entry(id, &format!("child<{kind}>"))));
        }
        "/objects" => {
            let kind = "child<memory-backend-file>";
            entries.extend(books.objects.keys().map(|id| entry(id, kind)));
        }
        bus => {
            let port = bus.rsplit('/').next().unwrap();
            assert_eq!(bus, format!("/machine/peripheral/{port}/{port}"));
            if books.devices.values().any(|(_, bus)| bus == port) {
                entries.push(entry("child[0]", "link<ivshmem-plain>"));
            }
        }
    }
    json!(entries)
}

fn add_object(books: &mut Books, id: String, arguments: &Value) -> Answer {
    if books.objects.contains_key(&id) {
        let text = format!("attempt to add duplicate property '{id}' to object (type 'container')");
        return Err(("GenericError", text));
    }
    assert_eq!(arguments["qom-type"], "memory-backend-file");
    assert_eq!((&arguments["share"], &arguments["readonly"]), (&json!(true), &json!(true)));
    let number = arguments["mem-path"].as_str().unwrap().strip_prefix("/proc/self/fd/").unwrap();
    let fd = books.fdsets[&number.parse::<u64>().unwrap()].try_clone().unwrap();
    let flags = rustix::fs::fcntl_getfl(&fd).unwrap();
    assert!(!flags.intersects(OFlags::WRONLY | OFlags::RDWR), "{flags:?}");
    let size = arguments["size"].as_u64().unwrap();
    let file_len = u64::try_from(rustix::fs::fstat(&fd).unwrap().st_size).unwrap();
    assert!(size.is_power_of_two() && size <= file_len, "{size} of {file_len}");
    books.objects.insert(id, (fd, size));
    Ok(json!({}))
}

fn add_device(
    books: &mut Books,
    id: String,
    driver: String,
    bus: String,
    arguments: &Value,
) -> Answer {
    assert!(books.ports.contains_key(&bus), "{bus}");
    assert!(!books.devices.contains_key(&id), "{id}");
    assert!(books.devices.values().all(|(_, other)| *other != bus), "{bus} is occupied");
    match driver.as_str() {
        "ivshmem-doorbell" => assert!(books.chardevs.contains_key(&id)),
        "ivshmem-plain" => {
            assert!(books.objects.contains_key(arguments["memdev"].as_str().unwrap()))
        }
        other => panic!("{other}"),
    }
    books.devices.insert(id, (driver, bus));
    Ok(json!({}))
}
