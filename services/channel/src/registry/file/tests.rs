use std::fs;

use tempfile::TempDir;

use super::*;
use crate::registry::PluggedDevice;

fn membership(vm: &str) -> Membership {
    Membership {
        vm: vm.into(),
        domain: "t".into(),
        qmp: format!("/run/{vm}.qmp").into(),
        devices: vec![PluggedDevice {
            device: "millrace-peer1".into(),
            object: Some("millrace-peer1".into()),
            chardev: None,
            root_port: Some("millrace0".into()),
        }],
    }
}

fn place() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("registry.json");
    (folder, path)
}

#[test]
fn what_was_put_is_there_for_the_next_one() {
    let (folder, path) = place();
    let mut registry = FileRegistry::open(&path).unwrap();
    assert!(registry.memberships().is_empty());
    for vm in ["b", "a"] {
        registry.put(membership(vm)).unwrap();
    }
    registry.remove("nobody").unwrap();
    let mut next = FileRegistry::open(&path).unwrap();
    assert_eq!(next.memberships(), [membership("a"), membership("b")]);
    assert_eq!(next.membership("b"), Some(membership("b")));
    next.remove("a").unwrap();
    assert_eq!(FileRegistry::open(&path).unwrap().memberships(), [membership("b")]);
    // Nothing else lies around.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_a_crash_left_is_no_obstacle_and_no_way_to_somewhere_else() {
    let (folder, path) = place();
    let victim = folder.path().join("victim");
    fs::write(&victim, "mine").unwrap();
    std::os::unix::fs::symlink(&victim, folder.path().join("registry.json.new")).unwrap();
    FileRegistry::open(&path).unwrap().put(membership("a")).unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
}

#[test]
fn a_foreign_file_is_refused_and_left_alone() {
    let (_folder, path) = place();
    let cases = [
        ("", "not what millrace writes"),
        ("{\"format\": \"millrace-registry\"", "not what millrace writes"),
        ("\u{0}\u{1}", "not what millrace writes"),
        (r#"{"format": "x", "version": 1, "memberships": []}"#, "format \"x\", version 1;"),
        (
            r#"{"format": "millrace-registry", "version": 2, "memberships": []}"#,
            "version 2; \"millrace-registry\", 1 expected",
        ),
        (r#"{"format": "millrace-registry", "version": 1, "memberships": [], "x": 1}"#, "`x`"),
    ];
    for (content, text) in cases {
        fs::write(&path, content).unwrap();
        let error = FileRegistry::open(&path).unwrap_err().to_string();
        assert!(error.contains(text) && error.contains("registry.json"), "{content}: {error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }
}

#[test]
fn a_file_over_the_limit_is_not_read_to_its_end() {
    let (_folder, path) = place();
    File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let error = FileRegistry::open(&path).unwrap_err().to_string();
    assert!(error.contains("1048577; the limit is 1048576"), "{error}");
}

#[test]
fn too_much_is_refused_and_changes_nothing() {
    let (_folder, path) = place();
    let mut registry = FileRegistry::open(&path).unwrap();
    registry.put(membership("a")).unwrap();
    let mut long = membership("a");
    long.domain = "x".repeat(65);
    let mut many = membership("a");
    many.devices = vec![many.devices[0].clone(); 65];
    let mut device = membership("a");
    device.devices[0].root_port = Some("x".repeat(65));
    let mut far = membership("a");
    far.qmp = "x".repeat(108).into();
    for (wrong, text) in [
        (long, "VM a's domain is 65; the limit is 64"),
        (many, "number of devices of VM a is 65; the limit is 64"),
        (device, "VM a's device is 65; the limit is 64"),
        (far, "monitor's path of VM a is 108; the limit is 107"),
        (membership(&"x".repeat(70)), "is 70; the limit is 64"),
    ] {
        let error = registry.put(wrong).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    for n in 1..MAX_MEMBERSHIPS {
        registry.memberships.insert(format!("vm{n}"), membership("a"));
    }
    let error = registry.put(membership("one-more")).unwrap_err().to_string();
    assert!(error.contains("1025; the limit is 1024"), "{error}");
    assert_eq!(FileRegistry::open(&path).unwrap().memberships(), [membership("a")]);
}

#[test]
fn a_folder_that_is_gone_is_an_error_and_changes_nothing() {
    let (folder, path) = place();
    let mut registry = FileRegistry::open(&path).unwrap();
    registry.put(membership("a")).unwrap();
    folder.close().unwrap();
    let error = registry.put(membership("b")).unwrap_err().to_string();
    assert!(error.contains("making a new one"), "{error}");
    assert_eq!(registry.memberships(), [membership("a")]);
}
