use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::{Value, json};

use super::super::sample::Sample;
use super::*;

/// Two answers of a daemon, a second apart: `web` moves three times as much as `db`.
fn samples() -> (Sample, Sample) {
    let at = Instant::now();
    let sample = |at, status: Value| Sample { at, status: serde_json::from_value(status).unwrap() };
    let disk = |requests: u64, buckets: Value| {
        json!({"port": "root", "kind": "disk", "connected": true, "health": "ok",
               "requests": requests, "bytes": requests * 4096, "drops": 0,
               "disk": {"format": "null", "latency": {"buckets": buckets}}})
    };
    let net = |requests: u64, drops: u64| {
        json!({"port": "net0", "kind": "net", "connected": false, "health": "ok",
               "requests": requests, "bytes": requests * 1000, "drops": drops, "net": {}})
    };
    let usage = |bytes: u64, held_ns: u64| {
        json!({"charged_bytes": bytes, "held_by_weight_ns": held_ns,
               "held_by_ceiling_ns": 2 * held_ns, "thread_ns": 3 * held_ns})
    };
    let core = |index: usize, active: bool, n: u64| {
        json!({"index": index, "node": 1, "active": active, "workers": 2, "rounds": 1000 * n,
               "wakeups": 50 * n, "busy_ns": 620_000_000 * n, "spin_ns": 30_000_000 * n,
               "asleep_ns": 350_000_000 * n})
    };
    let status = |n: u64, web: Value, db: Value| {
        json!({"version": "0.1.0", "pid": 7, "uptime_s": 3600 + n, "vms": [web, db],
               "sidecores": [core(0, true, n), core(1, false, 0)],
               "workers": [{"name": "switch lan", "sidecore": 0, "pinned": false,
                            "busy_ns": 500_000_000 * n, "moves": 3}],
               "placement": {"moves": 4 + n},
               "switches": [{"holds": 20 * n, "held_ns": 10_000_000 * n}]})
    };
    let vm = |name: &str, weight: u64, usage: Value, ports: Value| {
        json!({"name": name, "weight": weight,
               "usage": usage, "ports": ports})
    };
    let first = status(
        1,
        vm("web", 300, usage(1_000, 0), json!([net(0, 0), disk(100, json!({"1024": 100}))])),
        vm("db", 100, usage(500, 0), json!([])),
    );
    let second = status(
        2,
        vm(
            "web",
            300,
            usage(301_000, 125_000_000),
            json!([net(12_345, 5), disk(300, json!({"1024": 100, "65536": 198, "2097152": 2}))]),
        ),
        vm("db", 100, usage(100_500, 0), json!([])),
    );
    (sample(at, first), sample(at + Duration::from_secs(1), second))
}

fn view() -> View {
    let (first, second) = samples();
    View::between(&first, &second)
}

/// The screen's text, line by line.
fn screen(view: &View, choice: &Choice, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, view, choice)).unwrap();
    let buffer = terminal.backend().buffer();
    let cell = |x, y| buffer.cell((x, y)).unwrap().symbol().to_owned();
    (0..height)
        .map(|y| (0..width).map(|x| cell(x, y)).collect::<String>().trim_end().to_owned())
        .collect()
}

#[test]
fn vms_are_shown_with_their_rates() {
    let lines = screen(&view(), &Choice::default(), 100, 20);
    assert_eq!(lines[0], "millrace 0.1.0  up 1h 0m  sidecores 1/2 active  2 VMs  2 ports");
    assert!(lines[1].contains("1.0k rounds/s  50 wake-ups/s  moves 6 (+1)"), "{}", lines[1]);
    assert!(lines[1].ends_with("receivers full 20/s, 1.0% of the time"), "{}", lines[1]);
    assert_eq!(lines[2], "  0 [||||||    ]  62%      1 [          ] park");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines[3].split_whitespace().next(), Some("VM"));
    let web = words(&lines[4]);
    assert_eq!(web[..6], ["web", "300", "75.0%", "12.3k", "12.6Mi", "200"]);
    // What its ceiling took stands apart from what others had.
    assert_eq!(words(&lines[3])[6..8], ["CAPPED", "YIELDED"]);
    assert_eq!(web[6..9], ["25.0%", "12.5%", "5"]);
    assert_eq!(web.len(), 12);
    assert_eq!((&words(&lines[3])[11], &web[11]), (&"PIPES".to_owned(), &"37.5%".to_owned()));
    assert!(web[9].starts_with("69.") && web[9].ends_with("us"), "{web:?}");
    let db = ["db", "100", "25.0%", "0", "0", "0", "0.0%", "0.0%", "0", "-", "-", "0.0%"];
    assert_eq!(words(&lines[5]), db);
    assert!(lines[19].starts_with("q quit"), "{}", lines[19]);
    // Numbers end under their heads.
    assert_eq!(lines[3].find("WEIGHT").unwrap() + 6, lines[4].find("300").unwrap() + 3);
}

#[test]
fn every_page_has_its_table() {
    let page = |page| screen(&view(), &Choice { page, ..Choice::default() }, 90, 12).join("\n");
    let ports = page(Page::Ports);
    assert!(ports.contains("web  net0  net   down   12.3k"), "{ports}");
    assert!(ports.contains("disk  up"), "{ports}");
    let workers = page(Page::Workers);
    assert!(workers.contains("switch lan") && workers.contains("50.0%"), "{workers}");
}

#[test]
fn trouble_is_told_and_the_last_view_stays() {
    let choice = Choice { trouble: Some("no daemon answers".into()), ..Choice::default() };
    let lines = screen(&view(), &choice, 80, 10);
    assert_eq!(lines[9], "no daemon answers");
    assert!(lines[4].starts_with("web"));
}

#[test]
fn no_size_of_the_terminal_is_too_small() {
    let mut view = view();
    view.sidecores = vec![view.sidecores[0].clone(); 64];
    view.vms = vec![view.vms[0].clone(); 1000];
    for (width, height) in [(1, 1), (3, 2), (20, 3), (80, 6), (300, 100)] {
        for page in [Page::Vms, Page::Ports, Page::Workers] {
            let choice = Choice { page, skipped: 999, ..Choice::default() };
            assert_eq!(screen(&view, &choice, width, height).len(), usize::from(height));
        }
    }
    let lines = screen(&view, &Choice { skipped: 5000, ..Choice::default() }, 80, 24);
    assert!(lines.iter().any(|l| l.starts_with("... and 43 more sidecores")), "{lines:#?}");
    assert!(lines[22].starts_with("web"), "the last rows stay: {lines:#?}");
}

#[test]
fn a_daemon_that_was_restarted_has_done_nothing_yet() {
    let (first, mut second) = samples();
    second.status.pid = 8;
    let view = View::between(&first, &second);
    assert_eq!((view.rounds_per_s, view.new_moves, view.vms[0].share), (0.0, 0, 0.0));
    assert_eq!(view.vms[0].disk_p99_ns, None);
}

#[test]
fn what_is_new_counts_from_nothing_and_what_began_anew_counts_as_nothing() {
    let (mut first, second) = samples();
    first.status.vms.retain(|vm| vm.name == "db");
    first.status.vms[0].usage.charged_bytes = u64::MAX;
    let view = View::between(&first, &second);
    assert_eq!((view.vms[0].requests_per_s, view.vms[0].share), (300.0, 1.0));
    assert_eq!(view.vms[1].charged_bytes_per_s, 0.0);
    // The same moment twice divides by nothing.
    assert_eq!(View::between(&second, &second).rounds_per_s, 0.0);
}

#[test]
fn plain_text_has_everything() {
    let text = plain(&view());
    for part in [
        "sidecore 0 (node 1) active: busy 62.0% polling 3.0% asleep 35.0%",
        "sidecore 1 (node 1) parked",
        "\nVM ",
        "\nWORKER ",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    assert!(text.lines().all(|line| line == line.trim_end()));
}
