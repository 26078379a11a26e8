//! Listings for people, made from the API's JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

/// A table with columns as wide as their widest cell.
fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    let mut line = |cells: &[&str]| {
        let mut text = String::new();
        for (cell, width) in cells.iter().zip(&widths) {
            let _ = write!(text, "{cell:<width$}  ");
        }
        out.push_str(text.trim_end());
        out.push('\n');
    };
    line(head);
    for row in rows {
        line(&row.iter().map(String::as_str).collect::<Vec<_>>());
    }
    out
}

fn cell(value: &Value, key: &str) -> String {
    match &value[key] {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Detail of a port: why it is broken, or its settings by kind.
fn detail(port: &Value) -> String {
    if let Some(reason) = port["reason"].as_str() {
        return reason.into();
    }
    if let Some(net) = port.get("net") {
        let link = if net["link"] == Value::Bool(true) { "" } else { " (link down)" };
        return format!("switch {} {}{link}", cell(net, "switch"), cell(net, "mac"));
    }
    if let Some(disk) = port.get("disk") {
        let (format, path) = (cell(disk, "format"), cell(disk, "path"));
        let (checked, most) = (checked(&disk["image"]), most_queues(port));
        return format!("{format} {path} {} bytes{checked}{most}", disk["len_bytes"]);
    }
    if let Some(vsock) = port.get("vsock") {
        return format!("CID {}, {} connections", vsock["cid"], vsock["open_connections"]);
    }
    String::new()
}

/// QEMU asks for as many queues as the VM has CPUs, and ends at once where those are too many: said
/// of disks with fewer than Millrace can serve that wait for their VMM.
fn most_queues(port: &Value) -> String {
    let most = u64::from(base::limits::MAX_DISK_QUEUES);
    match port["queues"].as_u64() {
        Some(queues) if queues < most && port["connected"] != Value::Bool(true) => {
            format!(" (QEMU: num-queues={queues} or fewer)")
        }
        _ => String::new(),
    }
}

/// Repairs of an image that was not closed.
fn checked(image: &Value) -> String {
    if image["was_checked"] != Value::Bool(true) {
        return String::new();
    }
    let (counts, leaks) = (&image["mended_counts"], &image["freed_leaks"]);
    format!(" (was not closed: {counts} counts mended, {leaks} leaks freed)")
}

/// `millrace ports`.
pub fn ports(list: &Value) -> String {
    let head = [
        "VM", "PORT", "KIND", "VMM", "HEALTH", "QUEUES", "REQUESTS", "BYTES", "DROPS", "DETAIL",
        "SOCKET",
    ];
    let rows: Vec<Vec<String>> = items(list)
        .iter()
        .map(|p| {
            let vmm = if p["connected"] == Value::Bool(true) { "connected" } else { "-" };
            vec![
                cell(p, "vm"),
                cell(p, "port"),
                cell(p, "kind"),
                vmm.into(),
                cell(p, "health"),
                format!("{}/{}", p["queues_running"], p["queues"]),
                cell(p, "requests"),
                cell(p, "bytes"),
                cell(p, "drops"),
                detail(p),
                cell(p, "socket"),
            ]
        })
        .collect();
    table(&head, &rows)
}

/// `millrace pipe ls`.
pub fn pipes(list: &Value) -> String {
    let head = ["VM", "ID", "SOURCE", "SINK", "BYTES", "MOVED", "STATE", "AGE_MS"];
    let keys = ["vm", "id", "source", "sink", "len_bytes", "moved_bytes", "state", "age_ms"];
    let rows: Vec<Vec<String>> =
        items(list).iter().map(|p| keys.iter().map(|k| cell(p, k)).collect()).collect();
    table(&head, &rows)
}

/// `millrace channel ls`.
pub fn channels(list: &Value) -> String {
    let head = [
        "VM",
        "DOMAIN",
        "STATE",
        "ADDRESSES",
        "PEERS",
        "SENT",
        "SENT_BYTES",
        "RECEIVED",
        "RECEIVED_BYTES",
        "BY_REFERENCE",
        "HELD_PAGES",
        "REASON",
    ];
    let rows: Vec<Vec<String>> = items(list).iter().map(channel).collect();
    table(&head, &rows)
}

fn channel(member: &Value) -> Vec<String> {
    let links = items(&member["links"]);
    // A daemon believes nothing that a guest counts, and neither does a sum of it.
    let sum = |key: &str| {
        let values = links.iter().filter_map(|link| link[key].as_u64());
        values.fold(0u64, u64::saturating_add)
    };
    let by_reference = match sum("sent_bytes") {
        0 => "-".into(),
        all => format!("{} %", u128::from(sum("referred_bytes")) * 100 / u128::from(all)),
    };
    let state = match (cell(member, "state"), member["silent"] == Value::Bool(true)) {
        (state, true) => format!("{state} (silent)"),
        (state, false) => state,
    };
    let mut cells = vec![cell(member, "vm"), cell(member, "domain"), state];
    cells
        .push(joined(items(&member["addresses"]).iter().map(|a| a.as_str().unwrap_or("-").into())));
    cells.push(joined(links.iter().map(|link| match link["reason"].as_str() {
        // Without its memory there is no link.
        Some(_) => format!("{} (not plugged)", cell(link, "vm")),
        None => format!("{} ({})", cell(link, "vm"), cell(link, "state")),
    })));
    let counts = ["sent", "sent_bytes", "received", "received_bytes"];
    cells.extend(counts.map(|key| sum(key).to_string()));
    cells.extend([by_reference, sum("held_pages").to_string(), why(member, links)]);
    cells
}

/// Why it is no member, or what of a peer could not be plugged into it.
fn why(member: &Value, links: &[Value]) -> String {
    if member["reason"].is_string() {
        return cell(member, "reason");
    }
    let failed = links.iter().find(|link| link["reason"].is_string());
    failed
        .map_or_else(String::new, |link| format!("{}: {}", cell(link, "vm"), cell(link, "reason")))
}

fn joined(texts: impl Iterator<Item = String>) -> String {
    let texts: Vec<String> = texts.collect();
    if texts.is_empty() { "-".into() } else { texts.join(", ") }
}

/// `millrace module ls`.
pub fn modules(list: &Value) -> String {
    let head = [
        "VM", "MODULE", "STATE", "CLIENTS", "REQUESTS", "P50_US", "P99_US", "MEMORY", "STORED",
        "REASON",
    ];
    let us = |m: &Value, key: &str| match m[key].as_u64() {
        Some(ns) => format!("{}.{}", ns / 1000, ns % 1000 / 100),
        None => "-".into(),
    };
    let row = |m: &Value| {
        let mut cells =
            ["vm", "module", "state", "clients", "requests"].map(|k| cell(m, k)).to_vec();
        cells.extend([us(m, "latency_p50_ns"), us(m, "latency_p99_ns")]);
        cells.extend(["memory_bytes", "stored_bytes"].map(|k| cell(m, k)));
        cells.push(m["reason"].as_str().unwrap_or_default().into());
        cells
    };
    table(&head, &items(list).iter().map(row).collect::<Vec<_>>())
}

/// `millrace module stats`: a module after the other, and a line for each number.
pub fn module_stats(list: &Value) -> String {
    let mut out = String::new();
    for module in items(list) {
        if !out.is_empty() {
            out.push('\n');
        }
        let _ = write!(
            out,
            "{}/{} {}",
            cell(module, "vm"),
            cell(module, "module"),
            cell(module, "state")
        );
        match module["reason"].as_str() {
            Some(reason) => _ = writeln!(out, ": {reason}"),
            None => out.push('\n'),
        }
        let counts =
            module.as_object().into_iter().flatten().filter(|(_, value)| value.is_number());
        for (name, value) in counts {
            let _ = writeln!(out, "  {name:<18}{value}");
        }
        out.push_str(&times(&module["latency"]));
    }
    out
}

/// Longest bar of a histogram.
const BAR: u64 = 40;

/// How long requests took: a line and a bar for each power of two that has some.
fn times(latency: &Value) -> String {
    let mut octaves: BTreeMap<u64, u64> = BTreeMap::new();
    for (low, count) in latency["buckets"].as_object().into_iter().flatten() {
        let low: u64 = low.parse().unwrap_or_default();
        let octave = low.checked_ilog2().map_or(0, |bits| 1 << bits);
        let all = octaves.entry(octave).or_default();
        *all = all.saturating_add(count.as_u64().unwrap_or_default());
    }
    let most = octaves.values().copied().max().unwrap_or_default().max(1);
    let mut out = String::new();
    for (from_ns, count) in octaves {
        let bar = "#".repeat((count.saturating_mul(BAR).div_ceil(most)) as usize);
        let us = from_ns as f64 / 1000.0;
        let _ = writeln!(out, "  from {us:>10.1} us  {count:>10}  {bar}");
    }
    out
}

/// `millrace status`.
pub fn status(status: &Value) -> String {
    let mut out = format!(
        "millrace {}, process {}, up {} s, config {}\n",
        cell(status, "version"),
        cell(status, "pid"),
        cell(status, "uptime_s"),
        cell(status, "config"),
    );
    let holder = match &status["holder"]["socket"] {
        Value::String(socket) => format!("at {socket}"),
        _ => "none: a restart disconnects the VMMs".into(),
    };
    let _ = writeln!(out, "holder {holder}\n");
    out.push_str(&sidecores(&status["sidecores"]));
    if !items(&status["switches"]).is_empty() {
        out.push('\n');
        out.push_str(&switches(&status["switches"]));
    }
    let all: Vec<Value> =
        items(&status["vms"]).iter().flat_map(|vm| items(&vm["ports"]).to_vec()).collect();
    if !all.is_empty() {
        out.push('\n');
        out.push_str(&ports(&Value::Array(all)));
    }
    out
}

fn sidecores(list: &Value) -> String {
    let head = [
        "SIDECORE",
        "CPU",
        "NODE",
        "ACTIVE",
        "SPIN_US",
        "WORKERS",
        "BUSY_ROUNDS",
        "SLEEPS",
        "PANICS",
        "STALLS",
    ];
    let keys = [
        "index",
        "cpu",
        "node",
        "active",
        "spin_us",
        "workers",
        "busy_rounds",
        "sleeps",
        "panics",
        "stalls",
    ];
    let rows: Vec<Vec<String>> =
        items(list).iter().map(|s| keys.iter().map(|k| cell(s, k)).collect()).collect();
    table(&head, &rows)
}

fn switches(list: &Value) -> String {
    let head = ["SWITCH", "SIDECORE", "UPLINK", "ADDRESSES"];
    let rows: Vec<Vec<String>> = items(list)
        .iter()
        .map(|s| {
            let macs = items(&s["macs"]).len().to_string();
            vec![cell(s, "name"), cell(s, "sidecore"), cell(s, "uplink"), macs]
        })
        .collect();
    table(&head, &rows)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_image_that_was_mended_says_so() {
        let image = json!({"was_checked": true, "mended_counts": 3, "freed_leaks": 16});
        let disk = json!({"format": "qcow2", "path": "/a", "len_bytes": 512, "image": image});
        let mended = "qcow2 /a 512 bytes (was not closed: 3 counts mended, 16 leaks freed)";
        assert_eq!(detail(&json!({ "disk": disk })), mended);
        let disk = json!({"format": "raw", "path": "/a", "len_bytes": 512});
        assert_eq!(detail(&json!({ "disk": disk })), "raw /a 512 bytes");
    }

    #[test]
    #[allow(non_snake_case)]
    fn abuse_B1_a_disk_with_few_queues_says_what_qemu_is_to_be_told() {
        let told = |queues: u16, connected: bool| {
            let disk = json!({"format": "raw", "path": "/a", "len_bytes": 512});
            detail(&json!({ "disk": disk, "queues": queues, "connected": connected }))
        };
        assert_eq!(told(2, false), "raw /a 512 bytes (QEMU: num-queues=2 or fewer)");
        assert_eq!([told(2, true), told(32, false)], ["raw /a 512 bytes", "raw /a 512 bytes"]);
    }

    #[test]
    fn columns_are_aligned_and_absent_values_are_dashes() {
        let list = json!([
            {"vm": "web", "port": "net0", "kind": "net", "connected": true, "health": "ok",
             "queues_running": 2, "queues": 2, "requests": 10, "bytes": 1000, "drops": 0,
             "socket": "/run/web.sock", "net": {"switch": "lan", "link": false}},
            {"vm": "a-long-name", "port": "d", "kind": "disk", "connected": false,
             "health": "broken", "reason": "why", "queues_running": 0, "queues": 1,
             "requests": 0, "bytes": 0, "drops": 0},
        ]);
        let text = ports(&list);
        let lines: Vec<&str> = text.lines().collect();
        let column = lines[0].find("PORT").unwrap();
        assert_eq!(&lines[1][column..column + 4], "net0");
        assert!(lines[1].ends_with("switch lan - (link down)  /run/web.sock"), "{text}");
        assert_eq!(lines[2].split_whitespace().rev().nth(1), Some("why"), "{text}");
    }

    #[test]
    fn pipes_have_a_line_each() {
        let list = json!([{"vm": "web", "id": 7, "source": "disk root, 3 extents",
                           "sink": "192.0.2.10:80 to 198.51.100.7:40000", "len_bytes": 1000,
                           "moved_bytes": 20, "state": "moving", "age_ms": 4}]);
        let text = pipes(&list);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].find("SINK"), lines[1].find("192.0.2.10:80 to"), "{text}");
        assert!(lines[1].ends_with("1000   20     moving  4"), "{text}");
        assert_eq!(pipes(&json!([])).lines().count(), 1);
    }

    #[test]
    fn channels_have_a_line_each_with_sums_over_peers() {
        let link = |vm: &str, state: &str, sent_bytes: u64| {
            json!({"vm": vm, "state": state, "memory": "plugged", "held_pages": 2,
                   "lent_messages": 1, "sent": 5, "received": 6, "sent_bytes": sent_bytes,
                   "received_bytes": u64::MAX, "referred_bytes": 3 * sent_bytes / 4, "refused": 0})
        };
        let mut failed = link("cache", "none", 0);
        failed["reason"] = json!("none of 2 root ports is free");
        let list = json!([
            {"vm": "web", "domain": "shop", "state": "active", "silent": false,
             "addresses": ["10.0.0.1", "fe80::1"], "links": [link("db", "up", 100), failed]},
            {"vm": "db", "domain": "shop", "state": "joined", "silent": true, "addresses": [],
             "links": []},
            {"vm": "old", "domain": "shop", "state": "out", "silent": false, "addresses": [],
             "links": [], "reason": "no front end is connected"},
        ]);
        let text = channels(&list);
        let lines: Vec<&str> = text.lines().collect();
        let cells = |line: &str| -> Vec<String> {
            let cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
            cells.map(Into::into).collect()
        };
        let max = u64::MAX.to_string();
        let peers = "db (up), cache (not plugged)";
        let why = "cache: none of 2 root ports is free";
        let wanted = [
            "web",
            "shop",
            "active",
            "10.0.0.1, fe80::1",
            peers,
            "10",
            "100",
            "12",
            &max,
            "75 %",
            "4",
            why,
        ];
        assert_eq!(cells(lines[1]), wanted, "{text}");
        assert_eq!(cells(lines[2])[2..5], ["joined (silent)", "-", "-"], "{text}");
        assert!(lines[3].ends_with("no front end is connected"), "{text}");
        assert_eq!(channels(&json!([])).lines().count(), 1);
    }

    #[test]
    fn modules_have_a_line_each_and_all_their_numbers() {
        let list = json!([
            {"vm": "db", "module": "table", "state": "running", "clients": 2, "requests": 70,
             "latency_p50_ns": 41250, "latency_p99_ns": 900, "memory_bytes": 65536,
             "stored_bytes": 9,
             "latency": {"buckets": {"1024": 1, "1920": 1, "65536": 4}}},
            {"vm": "web", "module": "kv", "state": "failed", "reason": "no such file"},
        ]);
        let text = modules(&list);
        let lines: Vec<&str> = text.lines().collect();
        let cells: Vec<&str> = lines[1].split_whitespace().collect();
        assert_eq!(cells, ["db", "table", "running", "2", "70", "41.2", "0.9", "65536", "9"]);
        assert!(lines[2].ends_with("no such file"), "{text}");
        let text = module_stats(&list);
        assert!(text.starts_with("db/table running\n"), "{text}");
        assert!(text.contains("  requests          70\n"), "{text}");
        let bars = format!(
            "  from        1.0 us           2  {}\n  from       65.5 us           4  {}\n",
            "#".repeat(20),
            "#".repeat(40)
        );
        assert!(text.contains(&bars), "{text}");
        assert!(text.ends_with("\nweb/kv failed: no such file\n"), "{text}");
    }

    #[test]
    fn an_answer_of_another_daemon_shows_what_it_has() {
        assert!(status(&json!({"version": "9"})).starts_with("millrace 9, process -"));
    }
}
