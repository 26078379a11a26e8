//! The control API on a real Unix socket, over a plane without engines. Every answer is checked
//! against the schema that the API publishes.
#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};

use common::{COPY_BYTES, Served};
use config::{MAX_PROBLEMS, ReadSocketConfig};
use control::ControlError;
use control::api::{ApiServer, MAX_BODY_LEN_BYTES, SCHEMA};
use control::client::Answer;
use serde_json::{Value, json};

/// Checks `value` against a schema of the published description.
fn conforms(name: &str, value: &Value) {
    let api: Value = serde_json::from_str(SCHEMA).unwrap();
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": format!("#/components/schemas/{name}"),
        "components": api["components"],
    });
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> =
        validator.iter_errors(value).map(|e| format!("{}: {e}", e.instance_path())).collect();
    assert!(errors.is_empty(), "{name}: {errors:#?}\n{value:#}");
}

fn ask(served: &Served, method: &str, path: &str, body: Option<Value>) -> Answer {
    served.client.request(method, path, body.as_ref()).unwrap()
}

/// Asks and checks status and schema of the answer.
fn expect(
    served: &Served,
    (method, path, body): (&str, &str, Option<Value>),
    (status, schema): (u16, &str),
) -> Value {
    let answer = ask(served, method, path, body);
    assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
    let value = answer.json();
    conforms(schema, &value);
    value
}

fn disk(name: &str) -> Value {
    json!({"disk": {"name": name, "format": "null", "size": "1MiB"}})
}

#[test]
fn listings_conform_to_the_schema() {
    let served = Served::start();
    let version = expect(&served, ("GET", "/v1/version", None), (200, "Version"));
    assert_eq!(version["api"], "v1");
    let status = expect(&served, ("GET", "/v1/status", None), (200, "Status"));
    assert_eq!(status["vms"][0]["ports"].as_array().unwrap().len(), 3);
    let ports = ask(&served, "GET", "/v1/ports", None).json();
    ports.as_array().unwrap().iter().for_each(|p| conforms("Port", p));
    let pipes = ask(&served, "GET", "/v1/pipes", None).json();
    pipes.as_array().unwrap().iter().for_each(|p| conforms("Pipe", p));
    assert_eq!((pipes.as_array().unwrap().len(), &pipes[1]["id"]), (2, &json!(u64::MAX)));
    let channels = ask(&served, "GET", "/v1/channels", None).json();
    channels.as_array().unwrap().iter().for_each(|c| conforms("Channel", c));
    assert_eq!((&channels[1]["state"], &channels[1]["id"]), (&json!("out"), &json!(null)));
    let modules = ask(&served, "GET", "/v1/modules", None).json();
    modules.as_array().unwrap().iter().for_each(|m| conforms("Module", m));
    assert_eq!((&modules[0]["state"], &modules[0]["requests"]), (&json!("busy"), &json!(7)));
    let schema = ask(&served, "GET", "/v1/schema", None).json();
    assert_eq!(schema["openapi"], "3.1.0");
}

#[test]
fn the_schema_names_every_route() {
    let served = Served::start();
    let api: Value = serde_json::from_str(SCHEMA).unwrap();
    for (path, methods) in api["paths"].as_object().unwrap() {
        for method in ["get", "post", "put", "delete"].iter().filter(|m| methods.get(**m).is_some())
        {
            let real = path.replace("{vm}", "nobody").replace("{port}", "nothing");
            let real = real.replace("{module}", "none");
            let answer = ask(&served, &method.to_uppercase(), &real, Some(json!({"up": true})));
            assert_ne!(answer.status, 405, "{method} {path}");
            assert!(!answer.body.contains("no route"), "{method} {path}: {}", answer.body);
        }
    }
}

#[test]
fn abuse_S5_what_is_logged_is_shown_and_changed() {
    let served = Served::start();
    let shown = expect(&served, ("GET", "/v1/log", None), (200, "LogFilter"));
    assert_eq!(shown, json!({"filter": "info", "configured": "warn"}));
    let put = |body| ("PUT", "/v1/log", Some(body));
    let set = expect(&served, put(json!({"filter": "info,net=debug"})), (200, "LogFilter"));
    assert_eq!(set["filter"], "info,net=debug");
    for bad in [json!({}), json!({"filter": 3}), json!({"level": "info"})] {
        expect(&served, put(bad), (400, "Error"));
    }
    assert_eq!(*served.fake.asked.lock().unwrap(), ["log info,net=debug"]);
}

/// Every route of the API but the listings is refused, also one that is added later.
#[test]
fn abuse_S4_the_socket_for_reading_changes_nothing() {
    let group = rustix::process::getgid().as_raw().to_string();
    let served = Served::start_by(|path| {
        let config = ReadSocketConfig { path: path.into(), group: group.clone() };
        ApiServer::bind_read_only(&config).unwrap()
    });
    let meta = served.socket.metadata().unwrap();
    assert_eq!(meta.permissions().mode() & 0o777, 0o660);
    assert_eq!(meta.gid().to_string(), group);
    let api: Value = serde_json::from_str(SCHEMA).unwrap();
    let listings = [
        "version",
        "schema",
        "status",
        "metrics",
        "log",
        "ports",
        "pipes",
        "channels",
        "modules",
        "vms/web/modules",
    ];
    let listings = listings.map(|name| format!("/v1/{name}"));
    for (path, methods) in api["paths"].as_object().unwrap() {
        let path =
            path.replace("{vm}", "web").replace("{port}", "root").replace("{module}", "table");
        for method in methods.as_object().unwrap().keys().filter(|key| *key != "parameters") {
            let reads = method == "get" && listings.contains(&path);
            let answer = ask(&served, &method.to_uppercase(), &path, Some(json!({})));
            let wanted = if reads { 200 } else { 403 };
            assert_eq!(answer.status, wanted, "{method} {path}: {}", answer.body);
            if !reads {
                conforms("Error", &answer.json());
                assert!(answer.error().contains("ask on the control socket"), "{}", answer.body);
            }
        }
    }
    let metrics = ask(&served, "GET", "/metrics", None);
    assert!(metrics.body.starts_with("# HELP millrace_build_info"), "{}", metrics.body);
    assert_eq!(*served.fake.asked.lock().unwrap(), [""; 0]);
}

#[test]
fn a_port_that_does_not_run_is_started() {
    let served = Served::start();
    let started = expect(&served, ("POST", "/v1/vms/web/ports/root/start", None), (200, "Port"));
    assert_eq!(started["port"], "root");
    expect(&served, ("POST", "/v1/vms/web/ports/gone/start", None), (404, "Error"));
    assert_eq!(*served.fake.asked.lock().unwrap(), ["start web/root"]);
}

#[test]
fn modules_are_those_of_a_vm_and_are_loaded_again() {
    let served = Served::start();
    let of = |path: &str| ask(&served, "GET", path, None);
    assert_eq!(of("/v1/vms/web/modules").json()[0]["module"], "table");
    expect(&served, ("GET", "/v1/vms/nobody/modules", None), (404, "Error"));
    let loaded = ask(&served, "POST", "/v1/vms/web/modules/load", None);
    assert_eq!((loaded.status, &loaded.json()[0]["vm"]), (200, &json!("web")));
    expect(&served, ("POST", "/v1/vms/nobody/modules/load", None), (404, "Error"));
    assert_eq!(*served.fake.asked.lock().unwrap(), ["load web"]);
}

#[test]
fn modules_are_drained_and_resumed() {
    let served = Served::start();
    for (what, state) in [("drain", "drained"), ("resume", "busy")] {
        let answer = ask(&served, "POST", &format!("/v1/vms/web/modules/{what}"), None);
        answer.json().as_array().unwrap().iter().for_each(|m| conforms("Module", m));
        assert_eq!((answer.status, &answer.json()[0]["state"]), (200, &json!(state)));
        let path = format!("/v1/vms/nobody/modules/{what}");
        expect(&served, ("POST", &path, None), (404, "Error"));
    }
    assert_eq!(*served.fake.asked.lock().unwrap(), ["drain web", "resume web"]);
}

#[test]
fn copies_are_passed_on_whatever_their_length() {
    let served = Served::start();
    let mut copy = Vec::new();
    let from = served.client.download("/v1/vms/web/modules/table/backup").unwrap();
    from.unwrap_or_else(|answer| panic!("{answer:?}")).read_to_end(&mut copy).unwrap();
    assert_eq!((copy.len() as u64, copy.iter().all(|b| *b == 7)), (COPY_BYTES, true));
    let gone = served.client.download("/v1/vms/nobody/modules/table/backup").unwrap();
    let answer = gone.err().unwrap();
    conforms("Error", &answer.json());
    assert_eq!((answer.status, answer.error().as_str()), (404, "there is no VM nobody"));
    // Whoever reads no more harms nobody.
    let left = served.client.download("/v1/vms/web/modules/table/backup").unwrap();
    drop(left.map_err(|answer| answer.status).unwrap());
    let path = "/v1/vms/web/modules/table/restore";
    let answer = served.client.upload(&format!("{path}?replace=true"), &mut &copy[..]).unwrap();
    conforms("Restored", &answer.json());
    assert_eq!(answer.json()["files_bytes"], COPY_BYTES);
    let mut asked = served.fake.asked.lock().unwrap().clone();
    asked.sort();
    assert_eq!(asked, ["back up web table", "back up web table", "restore web table true"]);
}

#[test]
fn a_copy_that_is_refused_or_cut_short_is_told() {
    let served = Served::start();
    let upload = |path: &str, body: &mut dyn Read| {
        let answer = served.client.upload(path, body).unwrap();
        conforms("Error", &answer.json());
        (answer.status, answer.error())
    };
    let copy = vec![7; COPY_BYTES as usize];
    let full = upload("/v1/vms/web/modules/full/restore", &mut &copy[..]);
    assert_eq!(full, (422, "there is no room".into()));
    let path = "/v1/vms/web/modules/table/restore";
    expect(&served, ("GET", path, None), (405, "Error"));
    let (status, text) = upload("/v1/vms/web/modules/table/restore?replace=1", &mut &copy[..9]);
    assert!(status == 400 && text.starts_with("replace: "), "{status} {text}");
    // The end of the connection is no end of the body.
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    stream
        .write_all(
            b"PUT /v1/vms/web/modules/table/restore HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\
              Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        )
        .unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(!answer.contains(" 200 "), "{answer}");
    assert!(served.fake.asked.lock().unwrap().is_empty());
}

#[test]
fn a_port_comes_and_goes() {
    let served = Served::start();
    let body = disk("data");
    conforms("Attach", &body);
    let port = expect(&served, ("POST", "/v1/vms/new/ports", Some(body)), (201, "Port"));
    assert_eq!(port["disk"]["format"], "null");
    let again = ("POST", "/v1/vms/new/ports", Some(disk("data")));
    expect(&served, again, (409, "Error"));
    assert_eq!(ask(&served, "DELETE", "/v1/vms/new/ports/data", None).status, 204);
    expect(&served, ("DELETE", "/v1/vms/new/ports/data", None), (404, "Error"));
}

#[test]
fn a_bad_port_is_refused_with_its_field_and_limit() {
    let served = Served::start();
    let body = json!({"net": {"name": "n", "switch": "lan", "mtu": 67, "mak": "x"}});
    let error = expect(&served, ("POST", "/v1/vms/web/ports", Some(body)), (400, "Error"));
    assert_eq!((&error["field"], &error["limit"]), (&json!("net.mtu"), &json!("68 to 65535")));
    assert_eq!(error["problems"].as_array().unwrap().len(), 2);
    for body in [json!(null), json!([]), json!({}), json!({"disk": 3}), json!("x")] {
        expect(&served, ("POST", "/v1/vms/web/ports", Some(body)), (400, "Error"));
    }
    expect(&served, ("POST", "/v1/vms/a%2Fb/ports", Some(disk("d"))), (400, "Error"));
    expect(&served, ("POST", "/v1/vms/web/ports", Some(disk("refused"))), (422, "Error"));
}

#[test]
fn disks_are_resized_and_cables_pulled() {
    let served = Served::start();
    let path = "/v1/vms/web/disks/root/resize";
    for (body, len_bytes) in [
        (None, 1 << 20),
        (Some(json!({})), 1 << 20),
        (Some(json!({"size": "2MiB"})), 2 << 20),
        (Some(json!({"size": 4096})), 4096),
    ] {
        let answer = expect(&served, ("POST", path, body), (200, "Resized"));
        assert_eq!(answer["len_bytes"], len_bytes);
    }
    for body in [json!({"size": "2MB"}), json!({"size": -1}), json!({"size": 0}), json!([])] {
        expect(&served, ("POST", path, Some(body)), (400, "Error"));
    }
    let error = expect(&served, ("POST", path, Some(json!({"sise": 1}))), (400, "Error"));
    assert_eq!(error["field"], "sise");

    let path = "/v1/vms/web/disks/root/resume";
    assert_eq!(expect(&served, ("POST", path, None), (200, "Resumed")), json!({"resumed": 2}));
    expect(&served, ("POST", "/v1/vms/web/disks/x/resume", None), (404, "Error"));

    let path = "/v1/vms/web/nets/net0/link";
    expect(&served, ("PUT", path, Some(json!({"up": false}))), (200, "LinkState"));
    expect(&served, ("PUT", path, Some(json!({"up": 1}))), (400, "Error"));
    expect(&served, ("PUT", path, None), (400, "Error"));
    expect(&served, ("PUT", "/v1/vms/web/nets/x/link", Some(json!({"up": true}))), (404, "Error"));
    assert_eq!(served.fake.asked.lock().unwrap().last().unwrap(), "link false");
}

#[test]
fn a_vms_settings_change_one_by_one() {
    let served = Served::start();
    let path = "/v1/vms/web";
    let body = json!({"weight": 300, "ceiling_bytes_per_s": "1MiB", "ceiling_ops_per_s": 7});
    let now = expect(&served, ("PATCH", path, Some(body)), (200, "Credit"));
    assert_eq!((&now["weight"], &now["ceiling_bytes_per_s"]), (&json!(300), &json!(1 << 20)));
    let now = expect(&served, ("PATCH", path, Some(json!({"weight": 1}))), (200, "Credit"));
    assert_eq!((&now["weight"], &now["ceiling_ops_per_s"]), (&json!(1), &json!(7)));
    for (body, field) in [
        (json!({"weight": 0}), "weight"),
        (json!({"weight": 10_001}), "weight"),
        (json!({"floor_bytes_per_s": "2MiB"}), "floor_bytes_per_s"),
        (json!({"ceiling_bytes_per_s": "many"}), "ceiling_bytes_per_s"),
        (json!({"ceiling_burst_ms": 0}), "ceiling_burst_ms"),
        (json!({"wait": 5}), "wait"),
    ] {
        let error = expect(&served, ("PATCH", path, Some(body)), (400, "Error"));
        assert_eq!(error["field"], field);
    }
    expect(&served, ("PATCH", path, None), (400, "Error"));
    expect(&served, ("PATCH", path, Some(json!([1]))), (400, "Error"));
    expect(&served, ("PATCH", "/v1/vms/nobody", Some(json!({}))), (404, "Error"));
}

#[test]
fn channels_are_joined_and_left() {
    let served = Served::start();
    let joined = expect(&served, ("POST", "/v1/vms/web/channel/join", None), (200, "Channel"));
    assert_eq!(joined["links"][1]["received_bytes"], u64::MAX);
    expect(&served, ("POST", "/v1/vms/nobody/channel/join", None), (404, "Error"));
    assert_eq!(ask(&served, "POST", "/v1/vms/db/channel/leave", None).status, 204);
    let held = expect(&served, ("POST", "/v1/vms/web/channel/leave", None), (422, "Error"));
    assert_eq!(held["error"], "db has 3 pages of web in use");
    expect(&served, ("POST", "/v1/vms/nobody/channel/leave", None), (404, "Error"));
    expect(&served, ("GET", "/v1/vms/web/channel/leave", None), (405, "Error"));
    assert_eq!(*served.fake.asked.lock().unwrap(), ["join web", "join nobody", "leave db"]);
}

#[test]
fn shutdown_is_passed_on() {
    let served = Served::start();
    expect(&served, ("POST", "/v1/shutdown", None), (202, "Stopping"));
    expect(&served, ("POST", "/v1/shutdown", Some(json!({"forget": true}))), (202, "Stopping"));
    expect(&served, ("POST", "/v1/shutdown", Some(json!({"forget": 1}))), (400, "Error"));
    assert_eq!(*served.fake.asked.lock().unwrap(), ["shutdown false", "shutdown true"]);
}

#[test]
fn wrong_routes_methods_and_bodies_are_json_errors() {
    let served = Served::start();
    expect(&served, ("GET", "/v2/status", None), (404, "Error"));
    expect(&served, ("DELETE", "/v1/status", None), (405, "Error"));
}

#[test]
fn abuse_R10_bodies_and_problems_are_bounded() {
    let served = Served::start();
    let many: serde_json::Map<String, Value> =
        (0..3000).map(|i| (format!("k{i}"), json!(0))).collect();
    let error =
        expect(&served, ("POST", "/v1/vms/v/ports", Some(json!({ "net": many }))), (400, "Error"));
    assert_eq!(error["problems"].as_array().unwrap().len(), MAX_PROBLEMS);
    let big = json!({ "disk": "x".repeat(MAX_BODY_LEN_BYTES) });
    let error = expect(&served, ("POST", "/v1/vms/web/ports", Some(big)), (413, "Error"));
    assert_eq!(error["limit"], MAX_BODY_LEN_BYTES.to_string());
}

#[test]
fn a_panic_of_the_plane_ends_its_request_only() {
    let served = Served::start();
    expect(&served, ("POST", "/v1/vms/web/ports", Some(disk("panic"))), (500, "Error"));
    expect(&served, ("GET", "/v1/version", None), (200, "Version"));
}

/// Sends raw bytes and reads until the server closes.
fn raw(served: &Served, bytes: &[u8]) -> String {
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    // The server may have seen enough before all is written.
    let _ = stream.write_all(bytes);
    read_all(stream)
}

/// The same, and ends before the server does: it may drop what it was at.
fn cut(served: &Served, bytes: &[u8]) {
    let mut stream = UnixStream::connect(&served.socket).unwrap();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    read_all(stream);
}

fn read_all(mut stream: UnixStream) -> String {
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn nonsense_on_the_socket_harms_nobody() {
    let served = Served::start();
    let post = |body: &str| {
        let len = body.len();
        format!(
            "POST /v1/vms/v/ports HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}"
        )
    };
    assert!(raw(&served, post("{").as_bytes()).contains("is not JSON"));
    assert!(raw(&served, post(&"[".repeat(5000)).as_bytes()).contains("is not JSON"));
    cut(&served, b"POST /v1/shutdown HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{");
    cut(&served, b"\x16\x03\x01\x00\xff\x00");
    cut(&served, &[b'A'; 300_000]);
    expect(&served, ("GET", "/v1/version", None), (200, "Version"));
    assert!(served.fake.asked.lock().unwrap().is_empty());
}

#[test]
fn metrics_are_read_back() {
    let served = Served::start();
    let text = ask(&served, "GET", "/v1/metrics", None).body;
    let mut typed = std::collections::HashMap::new();
    let mut samples = std::collections::HashMap::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert!(typed.insert(name.to_string(), kind).is_none(), "{name} is typed twice");
        } else if !line.starts_with("# HELP ") {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            let family =
                ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let is_histogram = |f: &&str| typed.get(*f).is_some_and(|kind| *kind == "histogram");
            let name = family.filter(is_histogram).unwrap_or(name);
            let kind = typed.get(name).unwrap_or_else(|| panic!("{name} has no TYPE"));
            assert_eq!(*kind == "counter", name.ends_with("_total"), "{name}");
            let value: u64 = value.parse().unwrap();
            assert!(samples.insert(series.to_string(), value).is_none(), "{series} twice");
        }
    }
    let vm = r#"vm="we\"b\\\n",port="net0",kind="net""#;
    let get = |series: &str| samples[series];
    assert_eq!(get(&format!("millrace_queue_requests_total{{{vm},queue=\"1\"}}")), 42);
    assert_eq!(get(&format!("millrace_queue_requests_total{{{vm},queue=\"0\"}}")), 0);
    let drops = format!("millrace_queue_drops_total{{{vm},queue=\"1\",reason=\"spoofed\"}}");
    assert_eq!(get(&drops), 1);
    assert_eq!(get(&format!("millrace_port_connected{{{vm}}}")), 1);
    assert_eq!(get("millrace_sidecore_sleeps_total{sidecore=\"0\"}"), 2);
    assert_eq!(get("millrace_uplink_requests_total{switch=\"lan\"}"), 42);
    assert_eq!(get("millrace_disk_size_bytes{vm=\"db\"}"), 8);
    let worker = r#"worker="disk we\"b/root queue 0",sidecore="0""#;
    assert_eq!(get(&format!("millrace_worker_busy_nanoseconds_total{{{worker}}}")), 700);
    let latency = |end: &str| get(&format!("millrace_disk_latency_nanoseconds_{end}"));
    let up_to = |le: &str| latency(&format!("bucket{{vm=\"web\",queue=\"0\",le=\"{le}\"}}"));
    let all = ["1000", "2000", "5000", "10000000000", "+Inf"].map(up_to);
    assert_eq!(all, [1, 1, 2, 2, 2]);
    assert_eq!(latency("sum{vm=\"web\",queue=\"0\"}"), 4000);
    assert_eq!(latency("count{vm=\"web\",queue=\"0\"}"), 2);
    assert_eq!(get("millrace_build_info{version=\"0.0.0\"}"), 1);
}

#[test]
fn the_socket_is_for_its_owner_and_goes_with_the_daemon() {
    let served = Served::start();
    let socket = served.socket.clone();
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert!(matches!(ApiServer::bind(&socket), Err(ControlError::AlreadyRunning(_))));
    drop(served);
    assert!(!socket.exists());
    let gone = control::client::Client::new(&socket).request("GET", "/v1/version", None);
    assert!(matches!(gone, Err(ControlError::Unreachable { .. })));
}

#[test]
fn only_a_dead_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control.sock");
    // A daemon that was killed leaves its socket behind.
    drop(UnixListener::bind(&path).unwrap());
    drop(ApiServer::bind(&path).unwrap());
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(ApiServer::bind(&path), Err(ControlError::NotASocket(_))));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}
