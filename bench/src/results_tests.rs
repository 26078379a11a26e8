use serde_json::Value;

use super::*;
use crate::samples;

/// The design's own example, word for word.
const PUBLISHED: &str = r#"{"machine": {"cpu": "…", "cores": 2, "kernel": "…"}, "commit": "…", "rows": [
  {"case": "tcp_rr", "ours": {"name": "switch", "value": 2600, "unit": "1/s"},
   "peer": {"name": "tap-bridge", "value": 1450, "unit": "1/s"},
   "better": "higher", "ratio": 1.79, "ratio_min": 1.4, "ratio_max": 2.2, "rounds": 11,
   "host_cpu_us_per_op": {"ours": 310, "peer": 560}, "target": 1.3}]}"#;

fn schema() -> Value {
    serde_json::from_str(include_str!("../schema/results.schema.json")).unwrap()
}

/// As much of JSON Schema as our schema uses; returns the first complaint.
fn complaint(schema: &Value, value: &Value, at: &str) -> Option<String> {
    if let Some(allowed) = schema.get("enum").and_then(Value::as_array) {
        return (!allowed.contains(value)).then(|| format!("{at}: not one of {allowed:?}"));
    }
    let fits = match schema["type"].as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64(),
        "number" => value.is_number(),
        other => panic!("the checker does not know type {other}"),
    };
    if !fits {
        return Some(format!("{at}: not of type {}", schema["type"]));
    }
    if let (Some(least), Some(n)) = (schema.get("exclusiveMinimum"), value.as_f64())
        && n <= least.as_f64().unwrap()
    {
        return Some(format!("{at}: {n} is not above {least}"));
    }
    if let Some(items) = value.as_array() {
        let mut each = items.iter().enumerate();
        return each.find_map(|(i, v)| complaint(&schema["items"], v, &format!("{at}[{i}]")));
    }
    let fields = value.as_object()?;
    for name in schema["required"].as_array().unwrap() {
        if !fields.contains_key(name.as_str().unwrap()) {
            return Some(format!("{at}: lacks {name}"));
        }
    }
    fields.iter().find_map(|(name, v)| match schema["properties"].get(name) {
        Some(s) => complaint(s, v, &format!("{at}.{name}")),
        None => Some(format!("{at}: {name} is not in the schema")),
    })
}

#[test]
fn the_published_example_is_read_and_fits_the_schema() {
    let r: Results = serde_json::from_str(PUBLISHED).unwrap();
    assert_eq!(r.rows[0].ours.value, 2600.0);
    assert_eq!(r.rows[0].target, Some(1.3));
    assert!(!r.rows[0].missed());
    let v: Value = serde_json::from_str(PUBLISHED).unwrap();
    assert_eq!(complaint(&schema(), &v, "$"), None);
}

#[test]
fn what_we_write_fits_the_schema_and_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("demo.json");
    let r = samples::results();
    r.write(&path).unwrap();
    assert_eq!(Results::read(&path).unwrap(), r);
    let v: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(complaint(&schema(), &v, "$"), None);
    let bare = &v["rows"][3];
    assert!(bare.get("target").is_none(), "a row without a floor has no target field: {bare}");
}

#[test]
fn the_schema_refuses_what_programs_could_not_compare() {
    let good = serde_json::to_value(samples::results()).unwrap();
    let mut no_ratio = good.clone();
    no_ratio["rows"][0].as_object_mut().unwrap().remove("ratio");
    assert_eq!(complaint(&schema(), &no_ratio, "$").unwrap(), "$.rows[0]: lacks \"ratio\"");
    let mut zero = good.clone();
    zero["rows"][1]["ratio"] = 0.into();
    assert_eq!(complaint(&schema(), &zero, "$").unwrap(), "$.rows[1].ratio: 0 is not above 0");
    let mut sideways = good;
    sideways["rows"][0]["better"] = "sideways".into();
    assert!(complaint(&schema(), &sideways, "$").is_some());
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
fn a_broken_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.json");
    std::fs::write(&path, "{\"rows\": 3}").unwrap();
    let text = Results::read(&path).unwrap_err().to_string();
    assert!(text.contains("x.json") && text.contains("line 1"), "{text}");
    let text = Results::read(&dir.path().join("none.json")).unwrap_err().to_string();
    assert!(text.starts_with("read ") && text.contains("none.json"), "{text}");
}
