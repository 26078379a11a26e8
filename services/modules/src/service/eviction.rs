//! Eviction: which client lets go of memory when there is no room.

use std::time::Instant;

use crate::clients::Clients;
use crate::conn::Conn;

/// Memory that could be let go of.
pub(super) enum Holding {
    /// Replies that are kept for a client, by its number.
    Replies(u32),
    /// Connection with its buffers, by its place.
    Conn(usize),
}

/// Finds the largest holding that could be let go of.
pub(super) fn find_largest(conns: &[Option<Conn>], clients: &mut Clients) -> Option<Holding> {
    let kept = clients.iter_mut().map(|(number, client)| (client.spare_bytes(), number));
    let kept = kept.max().filter(|(bytes, _)| *bytes > 0);
    match (kept, find_slowest(conns)) {
        (Some((bytes, number)), conn) if conn.is_none_or(|(other, _)| other <= bytes) => {
            Some(Holding::Replies(number))
        }
        (_, Some((_, at))) => Some(Holding::Conn(at)),
        _ => None,
    }
}

/// Finds the slowest connection: of those that hold at least half of what the largest one does, the
/// one that does so for the longest time. Whoever sends a long request, or takes a long reply,
/// without a pause is through by then. Returns its bytes and its place.
fn find_slowest(conns: &[Option<Conn>]) -> Option<(usize, usize)> {
    let holding = || {
        let holds = |(at, conn): (usize, &Option<Conn>)| -> Option<(usize, (usize, Instant))> {
            Some((at, conn.as_ref()?.holds()?))
        };
        conns.iter().enumerate().filter_map(holds)
    };
    let most = holding().map(|(_, (bytes, _))| bytes).max()?;
    let large = holding().filter(|(_, (bytes, _))| *bytes >= most / 2);
    large.min_by_key(|(_, (_, since))| *since).map(|(at, (bytes, _))| (bytes, at))
}
