//! Rules: one file each. A rule finds; exceptions are not its business.

mod abuse_codes;
mod circles;
mod columns;
mod doc_lines;
mod file_names;
mod lengths;
mod links;
pub mod rooms;
mod syntax;
mod test_layout;
mod unsafe_code;

use crate::circles::Circle;
use crate::config::Config;
use crate::facts::Facts;
use crate::finding::Finding;

/// Names of all rules, as in `tidy.toml`.
pub const NAMES: &[&str] = &[
    abuse_codes::NAME,
    circles::NAME,
    columns::NAME,
    doc_lines::NAME,
    file_names::NAME,
    lengths::FILES,
    lengths::FUNCTIONS,
    links::NAME,
    rooms::NAME,
    syntax::NAME,
    test_layout::NAME,
    unsafe_code::NAME,
];

/// Findings of all rules.
pub fn find_all(facts: &Facts, circles: &[Circle], config: &Config) -> Vec<Finding> {
    let mut found = Vec::new();
    abuse_codes::find(facts, &mut found);
    circles::find(circles, config, &mut found);
    columns::find(facts, config, &mut found);
    doc_lines::find(facts, config, &mut found);
    file_names::find(facts, config, &mut found);
    lengths::find(facts, config, &mut found);
    links::find(facts, config, &mut found);
    rooms::find(facts, &mut found);
    syntax::find(facts, &mut found);
    test_layout::find(facts, &mut found);
    unsafe_code::find(facts, &mut found);
    found
}

#[cfg(test)]
mod testing {
    use super::*;
    use crate::config::testing::config;

    /// Places and texts of what one rule finds in these files.
    pub(crate) fn found(rule: &str, sources: &[(&str, &str)]) -> Vec<String> {
        let facts = Facts::from_sources(sources);
        let mut findings = find_all(&facts, &crate::circles::find(&facts), &config());
        findings.retain(|f| f.rule == rule);
        findings.sort();
        findings.iter().map(|f| format!("{}:{}: {}", f.path, f.line, f.text)).collect()
    }
}
