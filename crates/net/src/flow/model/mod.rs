//! A model of everything around a flow: a guest, a peer and twins with small TCPs of their own, a
//! lossy network between switch and peer, and pipes one after the other. Each byte on the wire has a
//! content of its own, so that any byte that is lost, doubled or moved is seen.

mod ends;
mod world;

use proptest::prelude::*;

use world::World;

/// How a run goes.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub seed: u64,
    pub v6: bool,
    pub timestamps: bool,
    pub sack: bool,
    /// Whose SYN comes first.
    pub guest_connects: bool,
    /// The guest's and the peer's first numbers, and their clocks.
    pub first: [u32; 2],
    pub clocks: [u32; 2],
    /// Frames of a thousand that the network loses, doubles, delays, damages; that the guest has no
    /// buffer for.
    pub loss: u32,
    pub twice: u32,
    pub late: u32,
    pub damage: u32,
    pub no_buffer: u32,
    /// Bytes that the guest writes, each followed by a pipe's.
    pub parts: Vec<(u32, u32)>,
    /// Another thread of the guest's program writes while pipes run.
    pub rude: bool,
    /// Bytes that the peer sends.
    pub peer_bytes: u32,
    /// The peer closes its direction when it has sent them.
    pub peer_closes: bool,
    pub peer_buffer: u32,
}

/// Numbers near where they wrap, or anywhere.
fn numbers() -> impl Strategy<Value = u32> {
    prop_oneof![(0..6000_u32).prop_map(|n| n.wrapping_sub(3000)), any::<u32>()]
}

fn plans() -> impl Strategy<Value = Plan> {
    let flags = any::<[bool; 6]>();
    let firsts = ([numbers(), numbers()], [numbers(), numbers()]);
    let net = (0..100_u32, 0..60_u32, 0..200_u32, 0..30_u32, 0..100_u32);
    let parts = prop::collection::vec((0..2500_u32, 0..6000_u32), 1..5);
    let peer = (0..4000_u32, 1500..9000_u32);
    (any::<u64>(), flags, firsts, net, parts, peer).prop_map(
        |(seed, flags, firsts, net, parts, peer)| {
            let [v6, timestamps, sack, guest_connects, rude, peer_closes] = flags;
            let (loss, twice, late, damage, no_buffer) = net;
            let (first, clocks) = firsts;
            let (peer_bytes, peer_buffer) = peer;
            Plan {
                seed,
                v6,
                timestamps,
                sack,
                guest_connects,
                first,
                clocks,
                loss,
                twice,
                late,
                damage,
                no_buffer,
                parts,
                rude,
                peer_bytes,
                peer_closes,
                peer_buffer,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_byte_arrives_once_and_in_its_place(plan in plans()) {
        World::new(plan).run();
    }
}
