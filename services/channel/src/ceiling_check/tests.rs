//! A model clock and model counters.

#![allow(non_snake_case)]

use super::*;

const MIB: u64 = 1 << 20;
const CEILING: Ceiling = Ceiling { bytes_per_s: 4 * MIB, ops_per_s: 0, burst_ms: 100 };
const SLACK: Slack = Slack { queues: 1, heartbeat_ms: 500 };
const LEN: u64 = 1 << 16;

/// One member, and its peers as they report.
struct Model {
    check: CeilingCheck,
    now: Instant,
    peers: Vec<(u64, Option<Received>)>,
}

impl Model {
    fn new(ceiling: Ceiling, peers: u64) -> Self {
        let now = Instant::now();
        let received = |_| Some(Received { generation: 1, messages: 0, bytes: 0 });
        let peers = (1..=peers).map(|peer| (peer, received(peer))).collect();
        let mut model = Self { check: CeilingCheck::new(ceiling, now), now, peers };
        assert_eq!(model.look(0), None);
        model
    }

    /// A peer receives messages of this length.
    fn receive(&mut self, peer: usize, messages: u64, len: u64) {
        let received = self.peers[peer].1.as_mut().unwrap();
        received.messages = received.messages.wrapping_add(messages);
        received.bytes = received.bytes.wrapping_add(messages * len);
    }

    fn look(&mut self, after_ms: u64) -> Option<String> {
        self.now += Duration::from_millis(after_ms);
        self.check.check(&self.peers, SLACK, self.now)
    }

    /// Seconds until it is over, at this rate to the first peer. None: it is not, for an hour.
    fn seconds_until_over(&mut self, bytes_per_s: u64) -> Option<u64> {
        (1..3600).find(|_| {
            self.receive(0, bytes_per_s / LEN / 2, LEN);
            let early = self.look(1).is_some();
            self.receive(0, bytes_per_s / LEN / 2, LEN);
            self.look(999).is_some() || early
        })
    }
}

#[test]
fn an_honest_member_may_use_all_of_its_ceiling_for_ever() {
    for percent in [1, 50, 100, 120] {
        let mut model = Model::new(CEILING, 1);
        assert_eq!(model.seconds_until_over(CEILING.bytes_per_s * percent / 100), None);
    }
}

#[test]
fn abuse_V20_a_member_that_ignores_its_ceiling_is_found() {
    for (times, at_most) in [(2, 60), (10, 5), (100, 1)] {
        let mut model = Model::new(CEILING, 1);
        let seconds = model.seconds_until_over(times * CEILING.bytes_per_s);
        assert!(seconds.is_some_and(|seconds| seconds <= at_most), "{times}: {seconds:?}");
    }
    let mut model = Model::new(CEILING, 1);
    model.receive(0, 2000, LEN);
    let text = model.look(500).unwrap();
    let rate = 2000 * LEN * 2;
    let wanted = format!(
        "its peers received {} bytes of it in 500 ms, which is {rate} per second; its ceiling is \
         {}",
        2000 * LEN,
        CEILING.bytes_per_s
    );
    assert_eq!(text, wanted);
}

#[test]
fn abuse_V20_what_all_peers_received_counts_together() {
    let mut model = Model::new(CEILING, 8);
    let found = (0..600).any(|_| {
        (0..8).for_each(|peer| model.receive(peer, CEILING.bytes_per_s / LEN / 4, LEN));
        model.look(1000).is_some()
    });
    assert!(found);
}

#[test]
fn abuse_V20_small_messages_count_with_their_minimum() {
    let mut model = Model::new(CEILING, 1);
    let found = (0..600).any(|_| {
        model.receive(0, 4 * CEILING.bytes_per_s / 512, 1);
        model.look(1000).is_some()
    });
    assert!(found);
}

#[test]
fn abuse_V20_messages_have_a_ceiling_of_their_own() {
    let ceiling = Ceiling { bytes_per_s: 0, ops_per_s: 1000, burst_ms: 100 };
    let mut model = Model::new(ceiling, 1);
    for _ in 0..600 {
        model.receive(0, 500, LEN);
        assert_eq!(model.look(500), None);
    }
    let text = (0..60).find_map(|_| {
        model.receive(0, 3000, 1);
        model.look(1000)
    });
    let text = text.unwrap();
    assert!(text.contains(" messages of it in ") && text.ends_with("ceiling is 1000"), "{text}");
    assert!(text.contains("which is 3000 per second"), "{text}");
}

#[test]
fn a_low_ceiling_falls_between_looks_that_are_close_together() {
    let ceiling = Ceiling { bytes_per_s: 0, ops_per_s: 1, burst_ms: 1 };
    let mut model = Model::new(ceiling, 1);
    for look in 0..1_000_000 {
        model.receive(0, u64::from(look % 100 == 0), 0);
        assert_eq!(model.look(10), None);
    }
}

#[test]
fn a_burst_after_a_pause_and_a_late_report_are_no_excess() {
    let burst = Ceiling { burst_ms: 10_000, ..CEILING };
    let mut model = Model::new(burst, 1);
    for _ in 0..20 {
        model.receive(0, 10 * burst.bytes_per_s / LEN, LEN);
        assert_eq!(model.look(10), None);
        assert_eq!(model.look(10_000), None);
    }
    // A peer that was not scheduled reports ten seconds at once.
    let mut model = Model::new(CEILING, 2);
    for _ in 0..20 {
        assert_eq!(model.look(10_000), None);
        model.receive(1, 10 * CEILING.bytes_per_s / LEN, LEN);
        assert_eq!(model.look(1), None);
        model.receive(0, CEILING.bytes_per_s / LEN, LEN);
        assert_eq!(model.look(1000), None);
    }
}

#[test]
fn what_waited_in_the_rings_may_be_received_at_once() {
    // Of each of three peers that did not look at its rings for long.
    let mut model = Model::new(CEILING, 3);
    let (slots, copies) = (SLOTS as u64, MAX_FIFO_CHUNKS as u64);
    for peer in 0..3 {
        model.receive(peer, slots, MAX_MESSAGE_LEN.into());
        model.receive(peer, copies, LEN);
    }
    assert_eq!(model.look(1), None);
}

#[test]
fn counters_that_begin_anew_are_counted_from_zero() {
    let mut model = Model::new(CEILING, 1);
    let half = CEILING.bytes_per_s / LEN / 2;
    for generation in 2..600 {
        model.receive(0, half, LEN);
        assert_eq!(model.look(500), None);
        // The module is loaded anew; by the next look it has counted more than before.
        model.peers[0].1 = Some(Received { generation, messages: 0, bytes: 0 });
        model.receive(0, half, LEN);
        assert_eq!(model.look(500), None);
        // The link is made anew, of the same load.
        model.peers[0].1 = Some(Received { generation, messages: 1, bytes: LEN });
        assert_eq!(model.look(1), None);
    }
}

#[test]
fn abuse_V20_links_that_come_and_go_hide_nothing() {
    let mut model = Model::new(CEILING, 1);
    let found = (0..100).any(|_| {
        model.peers[0].1 = None;
        assert_eq!(model.look(1), None);
        model.peers[0].1 = Some(Received { generation: 1, messages: 0, bytes: 0 });
        model.receive(0, 4 * CEILING.bytes_per_s / LEN, LEN);
        model.look(999).is_some()
    });
    assert!(found);
}

#[test]
fn counters_that_wrap_charge_little() {
    let mut model = Model::new(CEILING, 1);
    let high = Received { generation: 1, messages: 5, bytes: u64::MAX - LEN };
    model.check.seen.insert(1, Some(high));
    model.peers[0].1 = Some(high);
    for _ in 0..60 {
        model.receive(0, CEILING.bytes_per_s / LEN, LEN);
        assert_eq!(model.look(1000), None);
    }
}

#[test]
fn a_new_ceiling_holds_once_the_module_has_surely_read_it() {
    let mut model = Model::new(Ceiling::default(), 1);
    // Without a ceiling nothing is counted.
    model.receive(0, 1 << 40, LEN);
    assert_eq!(model.look(1), None);
    assert!(model.check.seen.is_empty());
    model.check.set(CEILING, SLACK, model.now);
    assert_eq!(model.check.ceiling(), CEILING);
    for _ in 0..9 {
        model.receive(0, 1 << 20, LEN);
        assert_eq!(model.look(1000), None);
    }
    // A second change meanwhile does not shorten that.
    let half = Ceiling { bytes_per_s: CEILING.bytes_per_s / 2, ..CEILING };
    model.check.set(half, SLACK, model.now);
    for _ in 0..9 {
        model.receive(0, 1 << 20, LEN);
        assert_eq!(model.look(1000), None);
    }
    assert_eq!(model.look(1000), None);
    model.receive(0, 1 << 20, LEN);
    assert!(model.look(1000).unwrap().ends_with(&format!("ceiling is {}", half.bytes_per_s)));
    // What was excess is none without a ceiling.
    model.check.set(Ceiling::default(), SLACK, model.now);
    model.receive(0, 1 << 20, LEN);
    assert_eq!(model.look(1000), None);
}
