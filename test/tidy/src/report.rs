//! Report: findings sorted into failures, exceptions and what is not clean yet.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::circles::Circle;
use crate::config::{Allow, Config, is_under};
use crate::finding::Finding;
use crate::rules;

/// Result of a check.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Findings that fail the test.
    pub failures: Vec<Finding>,
    /// Findings under a `not_yet` prefix.
    pub not_yet: Vec<Finding>,
    /// Findings that an exception covers.
    pub allowed: Vec<Finding>,
    /// Entries of `tidy.toml` that fit nothing any more, and entries of unknown rules.
    pub stale: Vec<String>,
    /// All circles of imports, those of two files too.
    pub circles: Vec<Circle>,
    /// Dependencies of tests that point up the map.
    pub arrows_of_tests: Vec<String>,
}

impl Report {
    /// Sorts findings by the settings.
    pub fn new(
        mut findings: Vec<Finding>,
        circles: Vec<Circle>,
        arrows_of_tests: Vec<String>,
        config: &Config,
    ) -> Report {
        findings.sort();
        findings.dedup();
        let mut report = Report {
            failures: Vec::new(),
            not_yet: Vec::new(),
            allowed: Vec::new(),
            stale: unknown_rules(config),
            circles,
            arrows_of_tests,
        };
        let mut is_allow_used = vec![false; config.allow.len()];
        let mut used_prefixes = Vec::new();
        for finding in findings {
            let allow = config.allow.iter().position(|a| covers(a, &finding));
            let prefixes = config.not_yet.get(finding.rule).map_or(&[][..], Vec::as_slice);
            let fits = prefixes.iter().filter(|p| is_under(&finding.path, p));
            let prefix = fits.max_by_key(|p| p.len());
            if let Some(at) = allow {
                is_allow_used[at] = true;
                report.allowed.push(finding);
            } else if let Some(prefix) = prefix {
                used_prefixes.push((finding.rule, prefix.as_str()));
                report.not_yet.push(finding);
            } else {
                report.failures.push(finding);
            }
        }
        for (allow, _) in config.allow.iter().zip(is_allow_used).filter(|(_, used)| !used) {
            let (rule, path) = (&allow.rule, &allow.path);
            report.stale.push(format!("allow {rule} {path}: fits nothing any more: take it off"));
        }
        for (rule, prefixes) in &config.not_yet {
            for prefix in prefixes {
                if !used_prefixes.contains(&(rule.as_str(), prefix)) {
                    report
                        .stale
                        .push(format!("not_yet {rule} {prefix}: is clean now: take it off"));
                }
            }
        }
        report
    }

    /// Tells whether the tree keeps its rules.
    pub fn is_clean(&self) -> bool {
        self.failures.is_empty() && self.stale.is_empty()
    }

    /// Text of what fails, a line each.
    pub fn failures_text(&self) -> String {
        let failures = self.failures.iter().map(|f| format!("\n{f}"));
        failures.chain(self.stale.iter().map(|s| format!("\ntidy.toml: {s}"))).collect()
    }

    /// Numbers and sizes of circles by package, the largest first.
    pub fn circle_sizes(&self) -> BTreeMap<&str, Vec<usize>> {
        let mut sizes: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for circle in &self.circles {
            sizes.entry(&circle.package).or_default().push(circle.files.len());
        }
        sizes
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "circles of imports, with the names that tie them:")?;
        for circle in &self.circles {
            writeln!(f, "  {}: {} files", circle.package, circle.files.len())?;
            for tie in &circle.ties {
                let names: Vec<&str> = tie.names.iter().map(String::as_str).collect();
                writeln!(f, "    {} -> {}: {}", tie.from, tie.to, names.join(", "))?;
            }
        }
        writeln!(f, "\nsizes of circles by package:")?;
        for (package, sizes) in self.circle_sizes() {
            writeln!(f, "  {package}: {sizes:?}")?;
        }
        writeln!(f, "\ndependencies of tests that point up the map:")?;
        for arrow in &self.arrows_of_tests {
            writeln!(f, "  {arrow}")?;
        }
        for (title, findings) in [("not yet", &self.not_yet), ("allowed", &self.allowed)] {
            writeln!(f, "\n{title}:")?;
            for finding in findings {
                writeln!(f, "  {finding}")?;
            }
        }
        writeln!(f, "\nfindings by rule: failures, not yet, allowed")?;
        for rule in rules::NAMES {
            let count = |findings: &[Finding]| findings.iter().filter(|f| f.rule == *rule).count();
            let (failures, not_yet) = (count(&self.failures), count(&self.not_yet));
            writeln!(f, "  {rule}: {failures}, {not_yet}, {}", count(&self.allowed))?;
        }
        if !self.is_clean() {
            writeln!(f, "\nfailures:{}", self.failures_text())?;
        }
        Ok(())
    }
}

fn covers(allow: &Allow, finding: &Finding) -> bool {
    allow.rule == finding.rule
        && is_under(&finding.path, &allow.path)
        && finding.text.contains(&allow.text)
        && allow.limit.is_none_or(|limit| finding.size <= limit)
}

fn unknown_rules(config: &Config) -> Vec<String> {
    let names = config.not_yet.keys().chain(config.allow.iter().map(|a| &a.rule));
    let mut unknown: Vec<String> = names
        .filter(|name| !rules::NAMES.contains(&name.as_str()))
        .map(|name| format!("{name}: no such rule"))
        .collect();
    let silent = config.allow.iter().filter(|a| a.reason.trim().is_empty());
    unknown.extend(silent.map(|a| format!("allow {} {}: has no reason", a.rule, a.path)));
    unknown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing;

    fn report(settings: &str, finding: Finding) -> Report {
        let mut config = testing::config();
        #[derive(serde::Deserialize, Default)]
        #[serde(default)]
        struct Lists {
            allow: Vec<Allow>,
            not_yet: BTreeMap<String, Vec<String>>,
        }
        let lists: Lists = toml::from_str(settings).unwrap();
        (config.allow, config.not_yet) = (lists.allow, lists.not_yet);
        Report::new(vec![finding], Vec::new(), Vec::new(), &config)
    }

    fn finding() -> Finding {
        Finding::new("functions", "a/b.rs", 3, "f has 80 lines").sized(80)
    }

    #[test]
    fn a_finding_fails() {
        let report = report("", finding());
        assert!(!report.is_clean());
        assert!(report.failures_text().contains("a/b.rs:3: functions: f has 80 lines"));
    }

    #[test]
    fn a_prefix_without_findings_fails() {
        assert!(report("not_yet.functions = ['a']", finding()).is_clean());
        let report = report("not_yet.functions = ['a', 'c']", finding());
        assert_eq!(report.stale, ["not_yet functions c: is clean now: take it off"]);
    }

    #[test]
    fn an_exception_has_a_limit_and_a_reason() {
        let allow = |limit: usize, reason: &str| {
            format!(
                "[[allow]]\nrule = 'functions'\npath = 'a/b.rs'\nlimit = {limit}\n\
                 reason = '{reason}'"
            )
        };
        assert!(report(&allow(80, "a table"), finding()).is_clean());
        assert!(!report(&allow(79, "a table"), finding()).is_clean());
        assert!(!report(&allow(80, ""), finding()).is_clean());
    }

    #[test]
    fn a_rule_that_is_not_known_fails() {
        assert!(!report("not_yet.function = ['a']", finding()).is_clean());
    }
}
