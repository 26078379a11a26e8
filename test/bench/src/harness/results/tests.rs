use serde_json::Value;

use super::*;
use crate::harness::samples;

/// The design's own example, word for word.
const PUBLISHED: &str = r#"{"machine": {"cpu": "…", "cores": 2, "kernel": "…"},
  "commit": "…", "rows": [
  {"case": "tcp_rr", "ours": {"name": "switch", "value": 2600, "unit": "1/s"},
   "peer": {"name": "tap-bridge", "value": 1450, "unit": "1/s"},
   "better": "higher", "ratio": 1.79, "ratio_min": 1.4, "ratio_max": 2.2, "rounds": 11,
   "host_cpu_us_per_op": {"ours": 310, "peer": 560}, "target": 1.3}]}"#;

/// The first complaint of our schema about a value.
fn complaint(value: &Value) -> Option<String> {
    let schema: Value =
        serde_json::from_str(include_str!("../../../schema/results.schema.json")).unwrap();
    let checker = jsonschema::validator_for(&schema).unwrap();
    checker.iter_errors(value).next().map(|e| format!("{}: {e}", e.instance_path()))
}

#[test]
fn the_published_example_is_read_and_fits_the_schema() {
    let r: Results = serde_json::from_str(PUBLISHED).unwrap();
    assert_eq!(r.rows[0].ours.value, 2600.0);
    assert_eq!(r.rows[0].target, Some(1.3));
    assert!(!r.rows[0].missed());
    let v: Value = serde_json::from_str(PUBLISHED).unwrap();
    assert_eq!(complaint(&v), None);
}

#[test]
fn what_we_write_fits_the_schema_and_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("demo.json");
    let r = samples::results();
    r.write(&path).unwrap();
    assert_eq!(Results::read(&path).unwrap(), r);
    let v: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(complaint(&v), None);
    let bare = &v["rows"][3];
    assert!(bare.get("target").is_none(), "a row without a floor has no target field: {bare}");
}

#[test]
fn the_schema_refuses_what_programs_could_not_compare() {
    let good = serde_json::to_value(samples::results()).unwrap();
    let refused = |change: &dyn Fn(&mut Value), says: &str| {
        let mut bad = good.clone();
        change(&mut bad["rows"][1]);
        let text = complaint(&bad).unwrap();
        assert!(text.starts_with("/rows/1") && text.contains(says), "{text}");
    };
    refused(&|row| drop(row.as_object_mut().unwrap().remove("ratio")), "\"ratio\" is a required");
    refused(&|row| row["ratio"] = 0.into(), "less than or equal to the minimum of 0");
    refused(&|row| row["better"] = "sideways".into(), "not one of");
    refused(&|row| row["rounds"] = 2.5.into(), "integer");
    let mut lost = samples::results();
    let (case, name, why) = ("flood64_split".into(), "vpp".into(), "not installed".into());
    lost.missing.push(crate::harness::results::Missing { case, name, why });
    let mut lost = serde_json::to_value(lost).unwrap();
    assert_eq!(complaint(&lost), None);
    lost["missing"][0]["why"] = 3.into();
    assert!(complaint(&lost).unwrap().starts_with("/missing/0/why"));
    refused(&|row| row["winner"] = "us".into(), "winner");
    assert_eq!(complaint(&good), None);
}

#[test]
fn a_floor_is_missed_only_below_it() {
    let mut row = samples::results().rows[0].clone();
    row.target = Some(1.2);
    row.ratio = 1.2;
    assert!(!row.missed());
    row.ratio = 1.1999;
    assert!(row.missed());
    row.target = None;
    assert!(!row.missed());
}

#[test]
fn an_interval_decides_where_there_is_one() {
    let stand = |interval| {
        let row = Row { ratio_interval: interval, ..samples::results().rows[0].clone() };
        (row.stand(), row.is_behind())
    };
    assert_eq!(stand(Some((1.01, 1.3))), (Some(Stand::Ahead), false));
    assert_eq!(stand(Some((0.9, 1.0))), (Some(Stand::Level), false));
    assert_eq!(stand(Some((0.9, 0.99))), (Some(Stand::Behind), true));
    assert_eq!(stand(None).0, None);
    // The median alone would have missed it; the rounds do not say so.
    let mut row = samples::results().rows[2].clone();
    assert!(row.missed());
    row.ratio_interval = Some((0.85, 1.25));
    assert!(!row.missed() && !row.is_behind());
}

#[test]
fn a_row_is_behind_by_its_floor_or_by_a_peer_that_it_should_lead() {
    let behind = |target, aim, ratio| {
        Row { target, aim, ratio, ..samples::results().rows[0].clone() }.is_behind()
    };
    // To be met: nothing above 1 is possible, and the floor says what is close enough.
    assert!(!behind(Some(0.95), None, 0.97) && behind(Some(0.95), None, 0.94));
    // Good enough for the run, and still slower than the peer.
    assert!(behind(Some(0.9), Some(1.0), 0.97) && !behind(Some(0.9), Some(1.0), 1.0));
    assert!(!behind(Some(1.0), Some(1.3), 1.1) && behind(Some(1.2), Some(1.5), 1.1));
    assert!(behind(None, None, 0.97) && !behind(None, None, 1.0));
}

#[test]
fn a_broken_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.json");
    std::fs::write(&path, "{\"rows\": 3}").unwrap();
    let text = Results::read(&path).unwrap_err().to_string();
    assert!(text.contains("x.json") && text.contains("line 1"), "{text}");
    let text = Results::read(&dir.path().join("none.json")).unwrap_err().to_string();
    assert!(text.starts_with("read ") && text.contains("none.json"), "{text}");
}
