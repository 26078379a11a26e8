//! The assembly in this process: what a port that fails leaves behind, and who shares a domain.

#![allow(non_snake_case)]

use control::plane::{Health, Plane};
use serde_json::{Value, json};
use vhost_user::NullStore;

use super::*;

mod panic;

pub(super) struct House {
    pub(super) host: Arc<Host>,
    pub(super) dir: tempfile::TempDir,
}

impl House {
    /// A host with the VMs described by `text`, in which `DIR` is the run directory.
    pub(super) fn new(text: &str) -> Self {
        Self::with_session_store(text, Arc::new(NullStore))
    }

    /// A house whose host saves sessions in `session_store`.
    pub(super) fn with_session_store(text: &str, session_store: Arc<dyn SessionStore>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_str().unwrap();
        let daemon = format!("[daemon]\nrun_dir='{place}'\ncontrol_socket='{place}/c.sock'\n");
        let text = format!("{daemon}[sidecore]\ncount=1\n{}", text.replace("DIR", place));
        let path = dir.path().join("m.toml");
        std::fs::write(&path, &text).unwrap();
        let config = config::load(&path).unwrap();
        let runtime_changes = RuntimeChanges::load(dir.path());
        let host = Host::start(path, config, runtime_changes, session_store, None);
        Self { host: host.unwrap(), dir }
    }

    fn config(&self) -> String {
        format!("{:?}", self.host.lock().config)
    }

    pub(super) fn domains(&self) -> usize {
        self.host.lock().domains.len()
    }

    /// A listed port whose image is to be checked.
    fn checking(&self, vm: &str, body: &Value) -> Arc<Port> {
        let config = self.host.lock().config.attach(vm, body).unwrap();
        let progress = checks::needed(&config).expect("it was not closed");
        self.host.ports.push(Port::checking(vm, config, progress))
    }

    fn vsock(&self, name: &str, cid: u64) -> Value {
        let path = self.dir.path().join(name);
        json!({ "vsock": { "cid": cid, "path": path } })
    }
}

impl Drop for House {
    fn drop(&mut self) {
        self.host.stop();
    }
}

#[test]
fn abuse_F1_a_step_that_panics_is_an_error() {
    let error = guarded::<()>(|| panic!("range start {} in a header", 2)).unwrap_err();
    assert_eq!(error.to_string(), "panicked, which is a bug: range start 2 in a header");
    let error = guarded::<()>(|| panic!("short")).unwrap_err();
    assert!(error.to_string().ends_with("short"));
    assert_eq!(guarded(|| Ok(7)).unwrap(), 7);
}

#[test]
fn a_port_that_does_not_start_leaves_the_others_running() {
    let house = House::new(
        "[[vm]]\nname='v'\n[[vm.disk]]\nname='bad'\nformat='qcow2'\npath='/dev/null'\n\
         [[vm.disk]]\nname='good'\nformat='null'\nsize='1MiB'\n",
    );
    assert_eq!(house.host.counts(), (2, 1, 0));
    let ports = house.host.ports();
    assert!(ports[0].reason.as_ref().unwrap().starts_with("not started"), "{:?}", ports[0].reason);
    assert_eq!(ports[1].reason, None);
}

#[test]
fn a_failed_attach_leaves_no_trace() {
    let house = House::new("[[vm]]\nname='empty'\ntrust_domain='t'\n");
    let before = house.config();
    let nowhere = json!({ "disk": { "name": "d", "format": "raw", "path": "/nonexistent/x" } });
    for vm in ["empty", "new"] {
        for _ in 0..2 {
            let refused = house.host.attach(vm, &nowhere);
            assert!(matches!(refused, Err(PlaneError::Refused(_))), "{refused:?}");
        }
        let refused = house.host.attach(vm, &house.vsock("no/such/folder", 3));
        assert!(matches!(refused, Err(PlaneError::Refused(_))), "{refused:?}");
        assert_eq!((house.config(), house.domains()), (before.clone(), 0));
    }
    let good = json!({ "disk": { "name": "d", "format": "null", "size": "1MiB" } });
    house.host.attach("new", &good).unwrap();
}

#[test]
fn a_vm_without_trust_domain_has_a_vsock_domain_of_its_own() {
    let house = House::new(
        "[[vm]]\nname='a'\nvsock={cid=3,path='DIR/a'}\n\
         [[vm]]\nname='b'\nvsock={cid=4,path='DIR/b'}\n\
         [[vm]]\nname='c'\ntrust_domain='a'\nvsock={cid=5,path='DIR/c'}\n\
         [[vm]]\nname='d'\ntrust_domain='a'\nvsock={cid=6,path='DIR/d'}\n",
    );
    assert_eq!(house.host.counts(), (4, 0, 0));
    assert_eq!(house.domains(), 3);
    house.host.attach("e", &house.vsock("e", 7)).unwrap();
    assert_eq!(house.domains(), 4);
    for (vm, left) in [("e", 3), ("c", 3), ("d", 2)] {
        house.host.detach(vm, "vsock").unwrap();
        assert_eq!(house.domains(), left, "after {vm}");
    }
}

fn qcow2_disk(name: &str, path: &std::path::Path) -> Value {
    json!({ "disk": { "name": name, "format": "qcow2", "path": path } })
}

/// An image that was not closed.
fn unclean_image(dir: &std::path::Path) -> PathBuf {
    let path = dir.join("unclean.qcow2");
    let args = ["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "1M"];
    assert!(std::process::Command::new("qemu-img").args(args).status().unwrap().success());
    let mut bytes = std::fs::read(&path).unwrap();
    // The dirty bit, at the end of the incompatible features.
    bytes[79] |= 1;
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_port_is_shown_while_its_image_is_checked() {
    let house = House::new("[[vm]]\nname='v'\n[[vm.disk]]\nname='a'\nformat='null'\nsize='1MiB'\n");
    let path = unclean_image(house.dir.path());
    let body = qcow2_disk("d", &path);
    let port = house.checking("v", &body);
    assert_eq!(house.host.counts(), (2, 0, 1));
    let shown = house.host.ports().pop().unwrap();
    assert_eq!(shown.health, Health::Starting);
    assert_eq!(shown.reason.unwrap(), "its image is being checked: 0 %");
    let refused = house.host.resume("v", "d").err();
    assert!(matches!(refused, Some(PlaneError::Conflict(_))), "{refused:?}");
    // The other's account is not closed with it.
    house.host.detach("v", "a").unwrap();
    house.host.begin_checks(vec![port]);
    assert!(house.host.wait_for_checks());
    let shown = house.host.ports().pop().unwrap();
    assert_eq!((shown.health, shown.reason), (Health::Ok, None));
    let image = shown.disk.unwrap().image.unwrap();
    assert!(image.was_checked && !image.is_damaged);
    house.host.detach("v", "d").unwrap();
    assert_eq!(house.host.counts(), (0, 0, 0));
}

#[test]
fn an_image_is_checked_as_it_is_attached() {
    let house = House::new("[[vm]]\nname='empty'\n");
    let before = house.config();
    let path = unclean_image(house.dir.path());
    let body = qcow2_disk("d", &path);
    // A refcount table that is nowhere cannot be mended.
    let good = std::fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[48..56].fill(0xff);
    std::fs::write(&path, bad).unwrap();
    for vm in ["empty", "new"] {
        let refused = house.host.attach(vm, &body);
        assert!(matches!(refused, Err(PlaneError::Refused(_))), "{refused:?}");
        assert_eq!((house.config(), house.host.counts()), (before.clone(), (0, 0, 0)));
    }
    std::fs::write(&path, good).unwrap();
    let port = house.host.attach("new", &body).unwrap();
    assert_eq!(port.health, Health::Ok);
    assert!(port.disk.unwrap().image.unwrap().was_checked);
    house.host.detach("new", "d").unwrap();
    assert_eq!(house.config(), before);
    // It was closed.
    assert!(!block::qcow2::needs_check(&path));
}

#[test]
fn a_port_that_is_detached_while_its_image_is_checked_does_not_start() {
    let house = House::new("[[vm]]\nname='v'\n");
    let before = house.config();
    let path = unclean_image(house.dir.path());
    let body = qcow2_disk("d", &path);
    let port = house.checking("new", &body);
    house.host.detach("new", "d").unwrap();
    assert_eq!((house.config(), house.host.counts()), (before.clone(), (0, 0, 0)));
    // Another one with its name is not taken for it.
    let other = json!({ "disk": { "name": "d", "format": "null", "size": "1MiB" } });
    house.host.attach("new", &other).unwrap();
    assert!(house.host.attach_checked(&port).is_err());
    assert_eq!(house.host.counts(), (1, 0, 0));
    assert!(house.host.detach("new", "d").is_ok());
    assert_eq!(house.config(), before);
}

#[test]
fn a_stop_closes_images_whoever_has_the_host() {
    let house = House::new("[[vm]]\nname='v'\n");
    let path = unclean_image(house.dir.path());
    let other = house.dir.path().join("other.qcow2");
    std::fs::copy(&path, &other).unwrap();
    let body = qcow2_disk("d", &path);
    house.host.attach("v", &body).unwrap();
    let body = qcow2_disk("e", &other);
    let port = house.checking("v", &body);
    let checker = Arc::clone(&house.host);
    house.host.stop();
    assert!(!block::qcow2::needs_check(&path), "it was not closed");
    // No port starts after that.
    assert!(checker.attach_checked(&port).is_err());
    assert_eq!(checker.counts(), (0, 0, 0));
    assert!(!checker.wait_for_checks());
}
