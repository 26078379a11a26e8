//! Accelerators of the guests of a document's tables.
//!
//! A byte that passes through an emulated guest costs several times what it costs under KVM, so
//! numbers of both say nothing beside each other. Within a run all guests run alike
//! ([`lab::acceleration`]), and a table is one run's. A document, and the summary that is made from
//! it, hold tables of many runs: those are of one kind, or refused.

use std::path::Path;

use clap::ValueEnum;
use lab::Accelerator;

use crate::harness::error::BenchError;
use crate::harness::table::Section;

/// Refuses a document with tables of both kinds.
pub(crate) fn check_alike(document: &str, path: &Path) -> Result<(), BenchError> {
    let sections = Section::value_variants().iter();
    let told: Vec<(Section, Accelerator)> =
        sections.filter_map(|section| Some((*section, of_section(document, *section)?))).collect();
    let names = |kind: Accelerator| {
        let of: Vec<&str> =
            told.iter().filter(|(_, by)| *by == kind).map(|(section, _)| section.begin()).collect();
        of.join(", ")
    };
    match (names(Accelerator::Kvm), names(Accelerator::Tcg)) {
        (kvm, tcg) if !kvm.is_empty() && !tcg.is_empty() => {
            Err(BenchError::MixedGuests { path: path.to_owned(), kvm, tcg })
        }
        _ => Ok(()),
    }
}

/// Accelerator of the guests of a section's table, by the line that says where it was measured.
fn of_section(document: &str, section: Section) -> Option<Accelerator> {
    let (_, rest) = document.split_once(section.begin())?;
    let (table, _) = rest.split_once(section.end())?;
    let line = table.lines().find(|line| line.starts_with("Measured on "))?;
    [Accelerator::Kvm, Accelerator::Tcg].into_iter().find(|by| line.contains(by.phrase()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::{samples, table};

    fn document(tables: &[(Section, Option<Accelerator>)]) -> String {
        let part = |(section, guests): &(Section, Option<Accelerator>)| {
            let mut results = samples::results();
            results.machine.guests = *guests;
            format!("{}\n{}{}\n", section.begin(), section.markdown(&results), section.end())
        };
        tables.iter().map(part).collect()
    }

    #[test]
    fn a_document_has_tables_of_one_kind() {
        let (kvm, tcg) = (Some(Accelerator::Kvm), Some(Accelerator::Tcg));
        let check = |tables: &[_]| check_alike(&document(tables), Path::new("r.md"));
        check(&[(Section::Demo, kvm), (Section::Pipes, kvm), (Section::Peers, None)]).unwrap();
        check(&[(Section::Demo, tcg), (Section::Pipes, tcg), (Section::Peers, None)]).unwrap();
        let mixed = check(&[(Section::Demo, kvm), (Section::Pipes, tcg), (Section::Channels, tcg)]);
        let text = mixed.unwrap_err().to_string();
        let said = "r.md: guests run by KVM in <!-- bench:demo -->, guests emulated (TCG) in \
                    <!-- bench:pipes -->, <!-- bench:channels -->";
        assert!(text.starts_with(said), "{text}");
    }

    #[test]
    fn a_table_of_the_other_kind_is_not_put_into_a_document() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("results.md");
        let old = document(&[
            (Section::Demo, Some(Accelerator::Tcg)),
            (Section::Pipes, Some(Accelerator::Tcg)),
        ]);
        std::fs::write(&path, &old).unwrap();
        let mut results = samples::results();
        results.machine.guests = Some(Accelerator::Kvm);
        let new = Section::Pipes.markdown(&results);
        let text = table::rewrite_file(&path, Section::Pipes, &new).unwrap_err().to_string();
        assert!(text.contains("guests run by KVM in <!-- bench:pipes -->"), "{text}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), old);
        results.machine.guests = Some(Accelerator::Tcg);
        table::rewrite_file(&path, Section::Pipes, &Section::Pipes.markdown(&results)).unwrap();
    }

    #[test]
    fn the_published_tables_of_guests_say_how_those_ran() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results.md");
        let document = std::fs::read_to_string(&path).unwrap();
        check_alike(&document, &path).unwrap();
        let without = [Section::Peers, Section::Qcow2, Section::Shares, Section::Idle];
        for section in Section::value_variants() {
            let told = of_section(&document, *section).is_some();
            assert_eq!(told, !without.contains(section), "{section:?}");
        }
    }
}
