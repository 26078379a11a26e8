//! The tree keeps its rules.

#[test]
fn tree_keeps_its_rules() {
    let report = tidy::check_tree(&tidy::find_root()).unwrap();
    assert!(report.is_clean(), "{}", report.failures_text());
}
