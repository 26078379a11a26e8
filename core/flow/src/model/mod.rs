//! A model of everything around a flow: a guest, a peer and twins with small TCPs of their own, a
//! lossy network between switch and peer, and pipes one after the other, in both directions. Each
//! byte on the wire has a content of its own, so that any byte that is lost, doubled or moved is
//! seen.

mod ends;
mod receive;
mod send;
mod simulation;

use proptest::prelude::*;

use simulation::Simulation;

/// Event in the life of the connection; they come one after the other.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Part {
    /// The guest writes so many bytes, and a twin so many behind them.
    Send { bytes: u32, len: u32 },
    /// A twin receives so many bytes, if they come in time; the pipe takes so many of them at once.
    Receive { wanted: u32, patience: u32, appetite: u32, buffer: u32 },
    /// The daemon is killed, and another one goes on with what it noted.
    Restart,
}

/// How a run goes.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub seed: u64,
    pub v6: bool,
    pub timestamps: bool,
    pub sack: bool,
    /// Whether the guest's SYN comes first.
    pub guest_connects: bool,
    /// The guest's SYN is sent once more, and passes behind what the peer says first.
    pub syn_again: bool,
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
    pub parts: Vec<Part>,
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

fn parts() -> impl Strategy<Value = Part> {
    let send = (0..2500_u32, 0..6000_u32).prop_map(|(bytes, len)| Part::Send { bytes, len });
    let receive = (1..6000_u32, 50..4000_u32, 1..1500_u32, 1000..9000_u32);
    let receive = receive.prop_map(|(wanted, patience, appetite, buffer)| Part::Receive {
        wanted,
        patience,
        appetite,
        buffer,
    });
    prop_oneof![4 => send, 5 => receive, 1 => Just(Part::Restart)]
}

fn plans() -> impl Strategy<Value = Plan> {
    let flags = any::<[bool; 7]>();
    let firsts = ([numbers(), numbers()], [numbers(), numbers()]);
    let net = (0..100_u32, 0..60_u32, 0..200_u32, 0..30_u32, 0..100_u32);
    let parts = prop::collection::vec(parts(), 1..6);
    let peer = (0..16_000_u32, 1500..9000_u32);
    (any::<u64>(), flags, firsts, net, parts, peer).prop_map(
        |(seed, flags, firsts, net, parts, peer)| {
            let [v6, timestamps, sack, guest_connects, rude, peer_closes, syn_again] = flags;
            let (loss, twice, late, damage, no_buffer) = net;
            let (first, clocks) = firsts;
            let (peer_bytes, peer_buffer) = peer;
            Plan {
                seed,
                v6,
                timestamps,
                sack,
                guest_connects,
                syn_again,
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
        Simulation::new(plan).run();
    }
}
