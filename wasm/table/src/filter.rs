//! Filters: which entries a scan wants. Their meaning is described at `guest_abi::table::Filter`.

use core::cmp::Ordering;

use guest_abi::table::{
    self as abi, MAX_FILTER_BYTES, MAX_KEY_BYTES, MAX_TERMS, op_flag, part, test,
};
use zerocopy::FromBytes;

use crate::fail::{Fail, fail};
use crate::op::OpRef;

const HEAD_BYTES: usize = size_of::<abi::Filter>();

/// Length of the longest value of a scan.
pub const MAX_BYTES: usize = HEAD_BYTES + MAX_KEY_BYTES + MAX_FILTER_BYTES;

/// Filter of a scan.
#[derive(Debug, Clone, Copy)]
pub struct Filter<'a> {
    terms: &'a [u8],
    /// Limit of entries that the scan looks at.
    pub examine: u32,
    /// Whether it needs more of an entry than its key.
    pub wants_values: bool,
}

/// Splits the value of a scan: head, high bound, terms.
fn split(value: &[u8]) -> Option<(abi::Filter, &[u8], &[u8])> {
    let (head, rest) = abi::Filter::read_from_prefix(value).ok()?;
    let high = rest.get(..head.high_bytes.get() as usize)?;
    Some((head, high, &rest[high.len()..]))
}

/// Splits terms: the first one, its operand, the others.
fn next_term(terms: &[u8]) -> Option<(abi::Term, &[u8], &[u8])> {
    let (term, rest) = abi::Term::read_from_prefix(terms).ok()?;
    let operand = rest.get(..term.operand_bytes.get() as usize)?;
    Some((term, operand, &rest[operand.len()..]))
}

/// High bound of a scan or an estimate.
pub fn high<'a>(op: &OpRef<'a>) -> &'a [u8] {
    if !op.has(op_flag::FILTER) {
        return op.value;
    }
    split(op.value).map_or(&[], |(_, high, _)| high)
}

/// Checks the value of a scan.
pub fn check(op: &OpRef<'_>, i: u32) -> Result<(), Fail> {
    if op.value.len() > MAX_KEY_BYTES && !op.has(op_flag::FILTER) {
        let len = op.value.len();
        return Err(fail!(
            LIMIT,
            "op {i}, SCAN: bound of {len} bytes, the limit is {MAX_KEY_BYTES}"
        ));
    }
    if !op.has(op_flag::FILTER) {
        return Ok(());
    }
    let Some((head, high, mut terms)) = split(op.value) else {
        return Err(fail!(BAD_REQUEST, "op {i}, SCAN: its filter goes beyond its end"));
    };
    if head.terms.get() > MAX_TERMS {
        let count = head.terms.get();
        return Err(fail!(LIMIT, "op {i}, SCAN: {count} terms, the limit is {MAX_TERMS}"));
    }
    if high.len() > MAX_KEY_BYTES || terms.len() > MAX_FILTER_BYTES {
        let (bound, len) = (high.len(), terms.len());
        return Err(fail!(
            LIMIT,
            "op {i}, SCAN: bound of {bound} bytes and filter of {len}, the limits are {MAX_KEY_BYTES} and \
             {MAX_FILTER_BYTES}"
        ));
    }
    for n in 0..head.terms.get() {
        let Some((term, _, rest)) = next_term(terms) else {
            return Err(fail!(BAD_REQUEST, "op {i}, SCAN: term {n} goes beyond the filter's end"));
        };
        let known =
            term.part <= part::VALUE && (test::BELOW..=test::NOT_EQUAL).contains(&term.test);
        if !known || term.reserved.get() != 0 {
            return Err(fail!(
                BAD_REQUEST,
                "op {i}, SCAN: term {n}: unknown part {}, test {} or reserved bits",
                term.part,
                term.test
            ));
        }
        terms = rest;
    }
    if !terms.is_empty() || head.reserved.get() != 0 {
        return Err(fail!(BAD_REQUEST, "op {i}, SCAN: bytes after its filter, or reserved bits"));
    }
    Ok(())
}

fn is_true(term: &abi::Term, operand: &[u8], whole: &[u8]) -> bool {
    let from = (term.offset.get() as usize).min(whole.len());
    let to = from.saturating_add(term.len_bytes.get() as usize).min(whole.len());
    let order = whole[from..to].cmp(operand);
    match term.test {
        test::BELOW => order == Ordering::Less,
        test::AT_MOST => order != Ordering::Greater,
        test::EQUAL => order == Ordering::Equal,
        test::AT_LEAST => order != Ordering::Less,
        test::ABOVE => order == Ordering::Greater,
        _ => order != Ordering::Equal,
    }
}

impl<'a> Filter<'a> {
    /// Filter of a scan which was checked, if it has one.
    pub fn of(op: &OpRef<'a>) -> Option<Self> {
        if !op.has(op_flag::FILTER) {
            return None;
        }
        let (head, _, terms) = split(op.value)?;
        let examine = if head.examine.get() == 0 { u32::MAX } else { head.examine.get() };
        let mut filter = Self { terms, examine, wants_values: false };
        filter.wants_values = filter.terms().any(|(term, _)| term.part == part::VALUE);
        Some(filter)
    }

    fn terms(&self) -> impl Iterator<Item = (abi::Term, &'a [u8])> + use<'a> {
        let mut terms = self.terms;
        core::iter::from_fn(move || {
            let (term, operand, rest) = next_term(terms)?;
            terms = rest;
            Some((term, operand))
        })
    }

    fn all(&self, part: u8, whole: &[u8]) -> bool {
        self.terms().filter(|(term, _)| term.part == part).all(|(t, o)| is_true(&t, o, whole))
    }

    /// Whether all its terms about keys are true.
    pub fn takes_key(&self, key: &[u8]) -> bool {
        self.all(part::KEY, key)
    }

    /// Whether all its terms about values are true.
    pub fn takes_value(&self, value: &[u8]) -> bool {
        self.all(part::VALUE, value)
    }
}
