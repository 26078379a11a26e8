//! First uses: which setting of the config names a value that only one may have.

use std::collections::HashMap;
use std::hash::Hash;

use crate::reader::Context;

/// The setting that used each value of one kind first: values that must differ.
pub(crate) struct FirstUses<K> {
    what: &'static str,
    fix: &'static str,
    by: HashMap<K, String>,
}

impl<K: Eq + Hash> FirstUses<K> {
    /// No value of the kind `what` is in use yet; `fix` is the advice where one is used twice.
    pub(crate) fn new(what: &'static str, fix: &'static str) -> Self {
        Self { what, fix, by: HashMap::new() }
    }

    /// Takes `key`, shown as `shown`, for `field`; a second taker is noted.
    pub(crate) fn take(&mut self, ctx: &mut Context, key: K, shown: &str, field: &str) {
        if !self.note_if_taken(ctx, &key, shown, field, self.fix) {
            self.by.insert(key, field.into());
        }
    }

    /// Notes a problem of `field` where another setting has taken `key`; returns whether one has.
    pub(crate) fn note_if_taken(
        &self,
        ctx: &mut Context,
        key: &K,
        shown: &str,
        field: &str,
        fix: &str,
    ) -> bool {
        let Some(first) = self.by.get(key) else { return false };
        let what = format!("{} {shown} is taken by", self.what);
        ctx.conflict(&what, first, field, fix);
        true
    }
}
